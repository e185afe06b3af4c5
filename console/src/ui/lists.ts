// Lists that people type.
import { t } from "../i18n";

/** Words between blanks and commas, each once. */
export function words(text: string): string[] {
  return [...new Set(text.split(/[\s,]+/).filter(Boolean))];
}

/** Lines of `NAME=value`. Throws with the line that is none. */
export function pairs(text: string): Record<string, string> {
  const lines = text.split("\n").map((row) => row.replace(/\r$/, ""));
  return Object.fromEntries(
    lines.flatMap((row, at) => {
      if (!row.trim()) return [];
      const [, name, value] = /^\s*([^=\s][^=]*?)\s*=(.*)$/.exec(row) ?? [];
      if (name === undefined) throw new Error(t.errors.pair(at + 1));
      return [[name, value ?? ""]];
    }),
  );
}

export function pairsText(of: Record<string, string> | undefined): string {
  return Object.entries(of ?? {})
    .map(([name, value]) => `${name}=${value}`)
    .join("\n");
}
