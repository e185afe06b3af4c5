// `report.json` of a run (docs/measure/report-format.md): what of it is compared.
import { t } from "../i18n";
import { line } from "../text";

export interface Times {
  n: number;
  failed: number;
  p50_ms: number | null;
  p95_ms: number | null;
  p99_ms: number | null;
}

export interface Report {
  file: string;
  scenario: string;
  started: number;
  grade: string;
  ended: string;
  commit: string;
  phases: [string, Times][];
  /** A gate that is inconclusive is not met. */
  gates: { met: number; missed: number };
}

/** The most that one report may have; those of this project have some 100 KiB. */
export const MOST_BYTES = 32 << 20;
const FORMAT = 3;

type Fields = Record<string, unknown>;
const fields = (value: unknown): Fields => (typeof value === "object" && value !== null ? (value as Fields) : {});
const number = (value: unknown): number | null => (typeof value === "number" && Number.isFinite(value) ? value : null);

/** Throws if the text is no report. */
export function readReport(file: string, text: string): Report {
  return reportOf(file, JSON.parse(text));
}

/** Throws if the value is no report. */
export function reportOf(file: string, value: unknown): Report {
  const whole = fields(value);
  if (whole["format"] !== FORMAT) throw new Error(t.reports.notOne(line(file, 80), FORMAT));
  const host = fields(whole["host"]);
  const phases = Object.entries(fields(whole["phases"])).slice(0, 20);
  const gates = Array.isArray(whole["gates"]) ? whole["gates"].map(fields) : [];
  const met = gates.filter((gate) => gate["verdict"] === "met").length;
  return {
    file: line(file, 120),
    scenario: line(whole["scenario"], 80),
    started: number(whole["started_unix_ms"]) ?? 0,
    grade: line(host["grade"], 20),
    ended: line(whole["ended"], 20),
    commit: line(host["commit"] ?? "", 12),
    phases: phases.map(([name, value]) => [line(name, 40), times(fields(value))]),
    gates: { met, missed: gates.length - met },
  };
}

function times(of: Fields): Times {
  return { n: number(of["n"]) ?? 0, failed: number(of["failed"]) ?? 0, p50_ms: number(of["p50_ms"]), p95_ms: number(of["p95_ms"]), p99_ms: number(of["p99_ms"]) };
}
