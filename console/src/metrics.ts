// The server's own figures: OpenMetrics text, as far as this page uses it.

export interface Sample {
  name: string;
  labels: Record<string, string>;
  value: number;
}

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

export function parse(text: string): Sample[] {
  const samples: Sample[] = [];
  for (const row of text.split("\n")) {
    if (row.startsWith("#")) continue;
    const found = LINE.exec(row);
    if (!found) continue;
    const labels: Record<string, string> = {};
    for (const [, name = "", value = ""] of (found[2] ?? "").matchAll(LABEL)) {
      labels[name] = value.replace(/\\(.)/g, "$1");
    }
    samples.push({ name: found[1] ?? "", labels, value: Number(found[3]) });
  }
  return samples;
}

export function gauge(samples: Sample[], name: string): number | undefined {
  return samples.find((sample) => sample.name === name)?.value;
}

export function sum(samples: Sample[], name: string, where: Record<string, string> = {}): number {
  return matching(samples, name, where).reduce((total, sample) => total + sample.value, 0);
}

function matching(samples: Sample[], name: string, where: Record<string, string>): Sample[] {
  const wanted = Object.entries(where);
  return samples.filter((sample) => sample.name === name && wanted.every(([label, value]) => sample.labels[label] === value));
}

export interface Histogram {
  count: number;
  /** Upper bound in seconds, and the number of values up to it. */
  buckets: [number, number][];
}

export function histogram(samples: Sample[], name: string, where: Record<string, string>): Histogram {
  const buckets = new Map<number, number>();
  for (const sample of matching(samples, `${name}_bucket`, where)) {
    const bound = sample.labels["le"] === "+Inf" ? Infinity : Number(sample.labels["le"]);
    buckets.set(bound, (buckets.get(bound) ?? 0) + sample.value);
  }
  return { count: sum(samples, `${name}_count`, where), buckets: [...buckets].sort(([a], [b]) => a - b) };
}

/** The samples that a quantile needs before it means anything, as in the project's reports. */
const NEEDED: Record<string, number> = { "0.5": 10, "0.95": 100 };

/** The bucket of the value of nearest rank: it lies above `over` and is at most `upTo`, both in seconds. */
export function quantile(of: Histogram, share: 0.5 | 0.95): { over: number; upTo: number } | undefined {
  if (of.count < (NEEDED[String(share)] ?? 0)) return undefined;
  const rank = Math.ceil(share * of.count);
  let over = 0;
  for (const [bound, count] of of.buckets) {
    if (count >= rank) return { over, upTo: bound };
    over = bound;
  }
  return undefined;
}
