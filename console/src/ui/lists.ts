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

interface Rule {
  transform: { headers: Record<string, string> };
}

/** Lines of `HOST HEADER: VALUE` as header rules. The lines of a host make one rule. */
export function rules(text: string): Record<string, Rule[]> {
  const hosts = new Map<string, Map<string, string>>();
  for (const [at, row] of text.split("\n").entries()) {
    if (!row.trim()) continue;
    const [, host = "", header = "", value = ""] = /^\s*(\S+)\s+([^\s:]+):\s*(.*?)\s*$/.exec(row) ?? [];
    if (!host) throw new Error(t.errors.rule(at + 1));
    const headers = hosts.get(host.toLowerCase()) ?? new Map<string, string>();
    hosts.set(host.toLowerCase(), headers.set(header, value));
  }
  return Object.fromEntries([...hosts].map(([host, headers]) => [host, [{ transform: { headers: Object.fromEntries(headers) } }]]));
}
