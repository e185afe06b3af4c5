// Text that a guest, a client or a server wrote is shown through `clean`: as plain text, with nothing in it that moves,
// hides or reverses what stands beside it.

/** C0 and C1 controls, marks of direction, invisible characters, separators of lines, tags. */
const UNSAFE =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;
/** More marks on one letter than any language has reach into the lines above and below. */
const STACKED = /(\p{M}{3})\p{M}+/gu;
/** Sequences that terminals read as colours and movements. */
const ESCAPES = /\u001b(?:\[[0-?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|[PX^_][^\u001b]*(?:\u001b\\)?|[ -/]*[0-~])/gu;

/** `text` without what is unsafe to show; each such character is replaced by a visible mark. At most `most` characters. */
export function clean(text: unknown, most = 4096): string {
  const whole = typeof text === "string" ? text : String(text ?? "");
  const cut = whole.length > most ? `${whole.slice(0, most)}…` : whole;
  return cut.replace(STACKED, "$1").replace(UNSAFE, "\u{fffd}");
}

/** The same on one line. */
export function line(text: unknown, most = 512): string {
  return clean(text, most).replace(/[\n\t]/g, " ");
}

/** Output of programs: as `clean`, without the colours that programs write for terminals. */
export function output(text: unknown, most = 200_000): string {
  const whole = typeof text === "string" ? text : String(text ?? "");
  return clean(whole.slice(0, most).replace(ESCAPES, "").replace(/\r\n?/g, "\n"), most);
}

export function bytes(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  let left = value;
  while (left >= 1024 && at < units.length - 1) {
    left /= 1024;
    at += 1;
  }
  return `${at === 0 || left >= 100 ? Math.round(left) : left.toFixed(1)} ${units[at]}`;
}

export function millis(seconds: number): string {
  const ms = seconds * 1000;
  if (ms < 1) return `${(ms * 1000).toFixed(0)} µs`;
  return ms < 1000 ? `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

export function when(stamp: string | null | undefined): string {
  const at = new Date(stamp ?? "");
  return Number.isNaN(at.getTime()) ? "–" : at.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
}

export function clock(stamp: string | undefined): string {
  const at = new Date(stamp ?? "");
  return Number.isNaN(at.getTime()) ? "–" : at.toLocaleTimeString(undefined, { hour12: false });
}

/** Time from or to now: `4 min`. */
export function span(stamp: string, now = Date.now()): string {
  const seconds = Math.abs(new Date(stamp).getTime() - now) / 1000;
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129_600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86_400)} d`;
}

export function count(n: number, one: string, many = `${one}s`): string {
  return `${n} ${n === 1 ? one : many}`;
}
