// A chart as the interpreter describes it (e2b-charts): checked here, drawn by `chart.tsx`. Everything is the guest's.
import { line } from "../text";

export interface Axis {
  label: string;
  /** Names in the place of numbers. */
  names?: string[];
}

export interface Chart {
  title: string;
  kind: "line" | "scatter" | "bar" | "pie" | "box";
  x: Axis;
  y: Axis;
  series: { name: string; points: [number, number][] }[];
  slices: { name: string; value: number }[];
  boxes: { name: string; five: [number, number, number, number, number]; outliers: number[] }[];
  parts: Chart[];
}

const MOST_POINTS = 4000;
const MOST_SERIES = 24;

type Fields = Record<string, unknown>;
const fields = (value: unknown): Fields => (typeof value === "object" && value !== null ? (value as Fields) : {});
const many = (value: unknown, most: number): unknown[] => (Array.isArray(value) ? value.slice(0, most) : []);
const isNumber = (value: unknown): value is number => typeof value === "number" && Number.isFinite(value) && Math.abs(value) < 1e300;

/** `undefined`: no chart that can be drawn. */
export function chartOf(value: unknown, depth = 0): Chart | undefined {
  const of = fields(value);
  const chart: Chart = { title: line(of["title"] ?? "", 120), kind: "line", x: axis(of, "x"), y: axis(of, "y"), series: [], slices: [], boxes: [], parts: [] };
  const elements = many(of["elements"], MOST_SERIES * 20).map(fields);
  switch (of["type"]) {
    case "line":
    case "scatter":
      chart.kind = of["type"];
      chart.series = points(elements.slice(0, MOST_SERIES), chart);
      return chart.series.length ? chart : undefined;
    case "bar": {
      chart.kind = "bar";
      const bars = elements.filter((bar) => isNumber(Number(bar["value"])));
      const names = [...new Set(bars.map((bar) => line(bar["label"], 40)))].slice(0, 100);
      const groups = [...new Set(bars.map((bar) => line(bar["group"] ?? "", 40)))].slice(0, MOST_SERIES);
      chart.x.names = names;
      chart.series = groups.map((name) => ({
        name,
        points: bars.filter((bar) => line(bar["group"] ?? "", 40) === name).map((bar): [number, number] => [names.indexOf(line(bar["label"], 40)), Number(bar["value"])]),
      }));
      return bars.length ? chart : undefined;
    }
    case "pie":
      chart.kind = "pie";
      chart.slices = elements.slice(0, MOST_SERIES).flatMap((slice) => (isNumber(slice["angle"]) && slice["angle"] > 0 ? [{ name: line(slice["label"], 60), value: slice["angle"] }] : []));
      return chart.slices.length ? chart : undefined;
    case "box_and_whisker":
      chart.kind = "box";
      chart.boxes = elements.slice(0, 60).flatMap((box) => {
        const five = ["min", "first_quartile", "median", "third_quartile", "max"].map((name) => box[name]);
        const outliers = many(box["outliers"], 200).filter(isNumber);
        return five.every(isNumber) ? [{ name: line(box["label"], 40), five: five as Chart["boxes"][number]["five"], outliers }] : [];
      });
      return chart.boxes.length ? chart : undefined;
    case "superchart":
      if (depth > 0) return undefined;
      chart.parts = elements.slice(0, 9).flatMap((part) => chartOf(part, depth + 1) ?? []);
      return chart.parts.length ? chart : undefined;
    default:
      return undefined;
  }
}

function axis(of: Fields, name: string): Axis {
  return { label: line(of[`${name}_label`] ?? "", 80) };
}

/** Points of lines. Values that are no numbers are times, or else names in the order in which they come. */
function points(elements: Fields[], chart: Chart): Chart["series"] {
  let left = MOST_POINTS;
  const seen = new Map<string, number>();
  const place = (value: unknown): number => {
    if (isNumber(value)) return value;
    const name = line(value, 40);
    if (!seen.has(name)) seen.set(name, seen.size);
    return seen.get(name) ?? 0;
  };
  const series = elements.flatMap((element) => {
    const raw = many(element["points"], left);
    left -= raw.length;
    const all = raw.flatMap((point): [number, number][] => {
      const [x, y] = many(point, 2);
      return isNumber(y) ? [[place(x), y]] : [];
    });
    return all.length ? [{ name: line(element["label"] ?? "", 60), points: all }] : [];
  });
  if (seen.size) chart.x.names = [...seen.keys()];
  return series;
}
