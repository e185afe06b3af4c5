// Text that a guest, a client or a server wrote is shown through `clean`: as plain text, with nothing in it that moves,
// hides or reverses what stands beside it.

import { locale } from "./i18n/language";

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

/** Formats of Intl, by what they do: they are costly to make. */
const formats = new Map<string, Intl.NumberFormat | Intl.DateTimeFormat>();

function format<T extends Intl.NumberFormat | Intl.DateTimeFormat>(make: (locale: string) => T, name: string): T {
  const key = `${locale.value} ${name}`;
  const known = (formats.get(key) as T | undefined) ?? make(locale.value);
  formats.set(key, known);
  return known;
}

function numbers(options: Intl.NumberFormatOptions): Intl.NumberFormat {
  return format((of) => new Intl.NumberFormat(of, options), JSON.stringify(options));
}

function dates(options: Intl.DateTimeFormatOptions): Intl.DateTimeFormat {
  return format((of) => new Intl.DateTimeFormat(of, options), JSON.stringify(options));
}

/** With exactly `digits` after the decimal point. */
export function number(value: number, digits = 0): string {
  return numbers({ minimumFractionDigits: digits, maximumFractionDigits: digits }).format(value);
}

function inUnit(value: number, unit: string, digits = 0): string {
  return numbers({ style: "unit", unit, unitDisplay: "short", maximumFractionDigits: digits }).format(value);
}

export function percent(share: number, digits = 0): string {
  return numbers({ style: "percent", minimumFractionDigits: digits, maximumFractionDigits: digits }).format(share);
}

/** Binary units have the same names in all languages, and Intl has none of them. */
export function bytes(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  let left = value;
  while (left >= 1024 && at < units.length - 1) {
    left /= 1024;
    at += 1;
  }
  return `${number(left, at === 0 || left >= 100 ? 0 : 1)} ${units[at]}`;
}

export function millis(seconds: number): string {
  const ms = seconds * 1000;
  return ms < 1000 ? inUnit(ms, "millisecond", ms < 1 ? 3 : ms < 10 ? 2 : ms < 100 ? 1 : 0) : inUnit(seconds, "second", 1);
}

export function when(stamp: string | null | undefined): string {
  const at = new Date(stamp ?? "");
  return Number.isNaN(at.getTime()) ? "–" : dates({ dateStyle: "medium", timeStyle: "medium" }).format(at);
}

export function clock(stamp: string | undefined): string {
  const at = new Date(stamp ?? "");
  return Number.isNaN(at.getTime()) ? "–" : dates({ hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" }).format(at);
}

/** Time from or to now: `4 min`. */
export function span(stamp: string, now = Date.now()): string {
  const seconds = Math.abs(new Date(stamp).getTime() - now) / 1000;
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 90) return inUnit(seconds, "second");
  if (seconds < 5400) return inUnit(seconds / 60, "minute");
  if (seconds < 129_600) return inUnit(seconds / 3600, "hour");
  return inUnit(seconds / 86_400, "day");
}

/** Of English text. */
export function count(n: number, one: string, many = `${one}s`): string {
  return `${number(n)} ${n === 1 ? one : many}`;
}

/** Sizes of memory and disk, which the server has in MiB. */
export function mebibytes(value: number): string {
  return `${number(value)} MiB`;
}
