/** Text of the interface: what stands between backquotes is code. */
export function Rich({ text }: { text: string }) {
  return <>{text.split("`").map((part, at) => (at % 2 ? <code key={at}>{part}</code> : part))}</>;
}
