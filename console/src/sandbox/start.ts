// The phases of a sandbox's last start, from `Server-Timing`.

/** Headers of creates of this page. */
export const startOf = new Map<string, Headers>();

export interface Phase {
  name: string;
  ms: number;
}

const ENTRY = /^\s*([\w-]+);dur=([\d.]+)/;

export function phases(headers: Headers | undefined): Phase[] {
  const text = headers?.get("server-timing") ?? "";
  return text.split(",").flatMap((part) => {
    const found = ENTRY.exec(part);
    return found ? [{ name: found[1] ?? "", ms: Number(found[2]) }] : [];
  });
}

export function origin(headers: Headers | undefined): string {
  return headers?.get("x-cube-start") ?? "";
}
