/** Waits until `is` answers with something true, for at most half a minute. */
export async function until(what, is, seconds = 30) {
  const end = Date.now() + seconds * 1000;
  for (;;) {
    const answer = await is();
    if (answer) return answer;
    if (Date.now() > end) throw new Error(`not within ${seconds} s: ${what}`);
    await new Promise((wake) => setTimeout(wake, 50));
  }
}

export function assert(is, what) {
  if (!is) throw new Error(what);
}

export function same(found, wanted, what) {
  if (found !== wanted) throw new Error(`${what}: ${JSON.stringify(found)}, expected ${JSON.stringify(wanted)}`);
}
