// Draws a checked chart as SVG elements of this page, with its values as a table for those who do not see it.
import { t } from "../i18n";
import type { Chart } from "./chart-data";

const COLOURS = ["#3b82f6", "#d9772b", "#2e9e5b", "#b152c9", "#c9a227", "#d0485a", "#2aa3a3", "#8a7ad6"];
const colour = (at: number) => COLOURS[at % COLOURS.length] ?? "#888";
const [WIDE, HIGH, LEFT, BELOW, ABOVE] = [640, 300, 60, 40, 10];

export function ChartView({ chart }: { chart: Chart }) {
  if (chart.parts.length) {
    return (
      <div class="grid">
        {chart.parts.map((part, at) => (
          <ChartView key={at} chart={part} />
        ))}
      </div>
    );
  }
  const names = chart.kind === "pie" ? chart.slices.map((slice) => slice.name) : chart.series.map((series) => series.name);
  return (
    <figure class="cell-chart">
      {chart.title && <h3>{chart.title}</h3>}
      <svg viewBox={`0 0 ${WIDE} ${HIGH}`} role="img" aria-label={describe(chart)}>
        {chart.kind === "pie" ? <Pie chart={chart} /> : <Plot chart={chart} />}
      </svg>
      {names.length > 1 && (
        <figcaption class="legend">
          {names.map((name, at) => (
            <span key={at}>
              <span class="swatch" style={{ background: colour(at) }} />
              {name || t.cells.series(at + 1)}
            </span>
          ))}
        </figcaption>
      )}
    </figure>
  );
}

function describe(chart: Chart): string {
  const parts = [
    ...chart.series.map((series) => `${series.name || t.cells.aSeries}: ${series.points.slice(0, 12).map(([x, y]) => `${chart.x.names?.[x] ?? short(x)} ${short(y)}`).join(", ")}`),
    ...chart.slices.map((slice) => `${slice.name} ${short(slice.value)}`),
    ...chart.boxes.map((box) => `${box.name} ${t.cells.median} ${short(box.five[2])}`),
  ];
  return `${t.cells.chart(chart.kind, chart.title)}. ${parts.slice(0, 8).join("; ")}`;
}

function short(value: number): string {
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3)) return value.toExponential(1);
  return String(Math.round(value * 1000) / 1000);
}

interface Scale {
  of: (value: number) => number;
  ticks: number[];
}

function scale(least: number, most: number, from: number, to: number): Scale {
  const [low, high] = least === most ? [least - 0.5, most + 0.5] : [least, most];
  const raw = (high - low) / 5;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = ([1, 2, 5, 10].find((factor) => factor * power >= raw) ?? 10) * power;
  const ticks: number[] = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high && ticks.length < 12; tick += step) ticks.push(tick);
  return { of: (value) => from + ((value - low) / (high - low)) * (to - from), ticks };
}

function bounds(values: number[]): [number, number] {
  let [least, most] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < least) least = value;
    if (value > most) most = value;
  }
  return Number.isFinite(least) ? [least, most] : [0, 1];
}

function Plot({ chart }: { chart: Chart }) {
  const isBar = chart.kind === "bar";
  const places = chart.kind === "box" ? chart.boxes.map((box) => box.name) : chart.x.names;
  const all = chart.series.flatMap((series) => series.points);
  const values = chart.kind === "box" ? chart.boxes.flatMap((box) => [...box.five, ...box.outliers]) : all.map(([, y]) => y);
  const [least, most] = bounds(isBar ? [0, ...values] : values);
  const x = places ? scale(-0.5, places.length - 0.5, LEFT, WIDE - 10) : scale(...bounds(all.map(([at]) => at)), LEFT, WIDE - 10);
  const y = scale(least, most, HIGH - BELOW, ABOVE);
  const step = Math.ceil((places?.length ?? 0) / 10) || 1;
  return (
    <>
      {y.ticks.map((tick) => (
        <g key={tick}>
          <line class="axis" x1={LEFT} x2={WIDE - 10} y1={y.of(tick)} y2={y.of(tick)} />
          <text x={LEFT - 6} y={y.of(tick) + 4} text-anchor="end">
            {short(tick)}
          </text>
        </g>
      ))}
      {(places ?? x.ticks).map((tick, at) =>
        places && at % step ? null : (
          <text key={at} x={x.of(places ? at : (tick as number))} y={HIGH - BELOW + 16} text-anchor="middle">
            {places ? String(tick).slice(0, 12) : short(tick as number)}
          </text>
        ),
      )}
      <text x={(LEFT + WIDE) / 2} y={HIGH - 6} text-anchor="middle">
        {chart.x.label}
      </text>
      <text x={12} y={HIGH / 2} text-anchor="middle" transform={`rotate(-90 12 ${HIGH / 2})`}>
        {chart.y.label}
      </text>
      {chart.kind === "line" &&
        chart.series.map((series, at) => (
          <polyline key={at} fill="none" stroke={colour(at)} stroke-width="2" points={series.points.map(([px, py]) => `${x.of(px).toFixed(1)},${y.of(py).toFixed(1)}`).join(" ")} />
        ))}
      {chart.kind === "scatter" && chart.series.map((series, at) => series.points.map(([px, py], n) => <circle key={`${at}-${n}`} cx={x.of(px)} cy={y.of(py)} r="3" fill={colour(at)} />))}
      {isBar && <Bars chart={chart} x={x} y={y} />}
      {chart.kind === "box" && <Boxes chart={chart} x={x} y={y} />}
    </>
  );
}

function Bars({ chart, x, y }: { chart: Chart; x: Scale; y: Scale }) {
  const whole = (x.of(1) - x.of(0)) * 0.8;
  const wide = whole / Math.max(chart.series.length, 1);
  return (
    <>
      {chart.series.map((series, at) =>
        series.points.map(([place, value], n) => (
          <rect
            key={`${at}-${n}`}
            x={x.of(place) - whole / 2 + at * wide}
            y={Math.min(y.of(value), y.of(0))}
            width={Math.max(wide - 1, 1)}
            height={Math.abs(y.of(value) - y.of(0))}
            fill={colour(at)}
          />
        )),
      )}
    </>
  );
}

function Boxes({ chart, x, y }: { chart: Chart; x: Scale; y: Scale }) {
  const wide = Math.min((x.of(1) - x.of(0)) * 0.5, 60);
  return (
    <>
      {chart.boxes.map((box, at) => {
        const [least, first, median, third, most] = box.five;
        const middle = x.of(at);
        return (
          <g key={at} stroke={colour(at)} fill="none" stroke-width="1.5">
            <line x1={middle} x2={middle} y1={y.of(least)} y2={y.of(first)} />
            <line x1={middle} x2={middle} y1={y.of(third)} y2={y.of(most)} />
            <rect x={middle - wide / 2} y={y.of(third)} width={wide} height={Math.abs(y.of(first) - y.of(third))} />
            <line x1={middle - wide / 2} x2={middle + wide / 2} y1={y.of(median)} y2={y.of(median)} />
            {box.outliers.map((value, n) => (
              <circle key={n} cx={middle} cy={y.of(value)} r="2.5" />
            ))}
          </g>
        );
      })}
    </>
  );
}

function Pie({ chart }: { chart: Chart }) {
  const total = chart.slices.reduce((sum, slice) => sum + slice.value, 0);
  const [middle, radius] = [{ x: WIDE / 2, y: HIGH / 2 }, HIGH / 2 - 12];
  let from = -Math.PI / 2;
  return (
    <>
      {chart.slices.map((slice, at) => {
        const share = slice.value / total;
        const to = from + share * Math.PI * 2;
        const corner = (angle: number) => `${(middle.x + radius * Math.cos(angle)).toFixed(1)} ${(middle.y + radius * Math.sin(angle)).toFixed(1)}`;
        const path = `M ${middle.x} ${middle.y} L ${corner(from)} A ${radius} ${radius} 0 ${share > 0.5 ? 1 : 0} 1 ${corner(to)} Z`;
        from = to;
        return share > 0.9999 ? <circle key={at} cx={middle.x} cy={middle.y} r={radius} fill={colour(at)} /> : <path key={at} d={path} fill={colour(at)} />;
      })}
    </>
  );
}
