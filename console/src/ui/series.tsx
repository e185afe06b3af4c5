// Charts of figures over time.
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { t } from "../i18n";
import { isDark } from "../session";
import { clock } from "../text";

export interface SeriesLine {
  name: string;
  values: (number | null)[];
}

const HEIGHT = 150;
/** The least width of a chart, seconds. */
const LEAST_SPAN = 60;
/** Distances of ticks, seconds: labels have whole seconds, so that no two are the same. */
const TIME_STEPS = [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21_600, 43_200, 86_400];
const POWERS = Array.from({ length: 32 }, (_, at) => 2 ** (at + 10));

interface Props {
  title: string;
  /** Seconds since 1970. */
  times: number[];
  lines: SeriesLine[];
  show: (value: number) => string;
  /** The least top of the scale. */
  top?: number;
  /** Ticks at powers of two. */
  isBinary?: boolean;
}

/** A chart. Its text form, for those who do not see it, has the last, the least and the greatest value of each line. */
export function Series({ title, times, lines, show, top, isBinary = false }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | undefined>(undefined);
  const dark = isDark.value;
  const shape = lines.map((line) => line.name).join();
  useEffect(() => {
    const target = box.current;
    if (!target) return;
    const style = getComputedStyle(document.documentElement);
    const colour = (name: string) => style.getPropertyValue(name).trim();
    const strokes = ["--series-1", "--series-2", "--series-3"].map(colour);
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    plot.current = new uPlot(
      {
        width: Math.max(target.clientWidth, 200),
        height: HEIGHT,
        legend: { show: false },
        cursor: { show: false },
        padding: [8, 30, 8, 0],
        scales: { x: { range: (_, first, last) => timeRange(first, last) }, y: { range: (_, least, most) => [Math.min(0, least ?? 0), Math.max(most ?? 0, top ?? 0) || 1] } },
        axes: [
          { ...axis, size: 26, space: 90, incrs: TIME_STEPS, values: (_, ticks) => ticks.map((tick) => clock(new Date(tick * 1000).toISOString())) },
          { ...axis, size: 64, space: 36, ...(isBinary && { incrs: POWERS }), values: (_, ticks) => ticks.map((tick) => show(tick)) },
        ],
        series: [{}, ...lines.map((line, at) => ({ label: line.name, stroke: strokes[at % strokes.length] ?? "", width: 1.5, points: { show: false }, spanGaps: false }))],
      },
      [times, ...lines.map((line) => line.values)] as uPlot.AlignedData,
      target,
    );
    const watcher = new ResizeObserver(() => plot.current?.setSize({ width: Math.max(target.clientWidth, 200), height: HEIGHT }));
    watcher.observe(target);
    return () => {
      watcher.disconnect();
      plot.current?.destroy();
    };
  }, [dark, shape]);
  useEffect(() => {
    plot.current?.setData([times, ...lines.map((line) => line.values)] as uPlot.AlignedData);
  }, [times, lines]);
  const summary = lines.map((line) => `${line.name}: ${describe(line.values, show)}`).join("; ");
  return (
    <figure class="series">
      <figcaption>
        <span class="series-title">{title}</span>
        {lines.map((line, at) => (
          <span key={line.name} class={`key key-${at + 1}`}>
            {lines.length > 1 && `${line.name} `}
            <strong>{last(line.values, show)}</strong>
          </span>
        ))}
      </figcaption>
      <div ref={box} role="img" aria-label={`${title}. ${summary}`} />
    </figure>
  );
}

function timeRange(first: number | null, last: number | null): [number, number] {
  const end = last ?? Date.now() / 1000;
  return [Math.min(first ?? end, end - LEAST_SPAN), end];
}

function known(values: (number | null)[]): number[] {
  return values.filter((value): value is number => value !== null);
}

function last(values: (number | null)[], show: (value: number) => string): string {
  const value = known(values).at(-1);
  return value === undefined ? "–" : show(value);
}

function describe(values: (number | null)[], show: (value: number) => string): string {
  const all = known(values);
  if (all.length === 0) return t.series.none;
  return t.series.range(last(values, show), show(Math.min(...all)), show(Math.max(...all)));
}
