// What a cell has put out. Nothing of it is ever parsed as HTML or run: text is text, tables and charts are drawn from data,
// images are images, in which browsers run no script and load nothing.
import { useState } from "preact/hooks";
import { t } from "../i18n";
import { clean, line, output } from "../text";
import { Button, Table } from "../ui/parts";
import { chartOf } from "./chart-data";
import { ChartView } from "./chart";

export type Piece =
  | { kind: "stdout" | "stderr"; text: string }
  | { kind: "result"; data: Record<string, unknown> }
  | { kind: "error"; name: string; value: string; traceback: string };

const MOST_IMAGE = 8 << 20;
const MOST_SVG = 512 << 10;
const MOST_ROWS = 200;
const MOST_COLUMNS = 50;

export function Output({ piece }: { piece: Piece }) {
  switch (piece.kind) {
    case "stdout":
    case "stderr":
      return (
        <pre class={`cell-out guest ${piece.kind === "stderr" ? "error" : ""}`} tabIndex={0} aria-label={piece.kind}>
          {output(piece.text)}
        </pre>
      );
    case "error":
      return (
        <pre class="cell-out error guest" tabIndex={0} aria-label={t.cells.error}>
          {output(piece.traceback || [piece.name, piece.value].filter(Boolean).join(": "))}
        </pre>
      );
    case "result":
      return <Result data={piece.data} />;
  }
}

function Result({ data }: { data: Record<string, unknown> }) {
  const text = (name: string) => (typeof data[name] === "string" ? data[name] : undefined);
  const chart = chartOf(data["chart"]);
  const columns = columnsOf(data["data"]);
  const image = (["png", "jpeg"] as const).find((name) => text(name));
  const source = (["html", "markdown", "latex", "javascript"] as const).find((name) => text(name));
  const svg = text("svg");
  return (
    <>
      {columns && <Columns columns={columns} />}
      {chart && <ChartView chart={chart} />}
      {!chart && image && <Picture kind={image} base64={text(image) ?? ""} />}
      {svg !== undefined && <Drawing svg={svg} />}
      {data["json"] !== undefined && !columns && (
        <pre class="cell-out guest" tabIndex={0} aria-label="JSON">
          {clean(JSON.stringify(data["json"], null, 2), 100_000)}
        </pre>
      )}
      {!columns && !chart && !image && data["json"] === undefined && text("text") !== undefined && (
        <pre class="cell-out guest" tabIndex={0} aria-label={t.cells.result}>
          {output(text("text"))}
        </pre>
      )}
      {source && !columns && <Source kind={source} text={text(source) ?? ""} />}
    </>
  );
}

const SOURCES = { html: "HTML", markdown: "Markdown", latex: "LaTeX", javascript: "JavaScript" };

function Source({ kind, text }: { kind: keyof typeof SOURCES; text: string }) {
  return (
    <details>
      <summary>{t.cells.source(SOURCES[kind])}</summary>
      <pre class="cell-out guest" tabIndex={0} aria-label={t.cells.sourceOf}>
        {output(text, 100_000)}
      </pre>
    </details>
  );
}

const BASE64 = /^[A-Za-z0-9+/\s]*={0,2}\s*$/;

function Picture({ kind, base64 }: { kind: "png" | "jpeg"; base64: string }) {
  if (base64.length > MOST_IMAGE || !BASE64.test(base64)) return <p class="muted">{t.cells.badImage}</p>;
  return <img class="cell-image" alt={t.cells.image} src={`data:image/${kind};base64,${base64.replace(/\s/g, "")}`} />;
}

/** An SVG as an image has no script, no links and loads nothing. As a data URL it has no origin, wherever it is opened. */
function Drawing({ svg }: { svg: string }) {
  const [isShown, setIsShown] = useState(false);
  if (svg.length > MOST_SVG) return <p class="muted">{t.cells.badDrawing}</p>;
  if (!isShown) return <Button onClick={() => setIsShown(true)}>{t.cells.showDrawing}</Button>;
  return <img class="cell-image" alt={t.cells.drawing} src={`data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`} />;
}

function columnsOf(value: unknown): [string, unknown[]][] | undefined {
  if (typeof value !== "object" || value === null || Array.isArray(value)) return undefined;
  const columns = Object.entries(value as Record<string, unknown>).filter((entry): entry is [string, unknown[]] => Array.isArray(entry[1]));
  return columns.length ? columns.slice(0, MOST_COLUMNS) : undefined;
}

function isNumeric(values: unknown[]): boolean {
  return values.every((value) => value === null || typeof value === "number");
}

function Columns({ columns }: { columns: [string, unknown[]][] }) {
  const rows = Math.max(...columns.map(([, values]) => values.length));
  const shown = Math.min(rows, MOST_ROWS);
  return (
    <>
      <Table label={t.cells.table} head={[`#${t.cells.row}`, ...columns.map(([name, values]) => `${isNumeric(values) ? "#" : " "}${line(name, 80)}`)]}>
        {Array.from({ length: shown }, (_, row) => (
          <tr key={row}>
            <td class="num muted">{row}</td>
            {columns.map(([name, values]) => (
              <td key={name} class={isNumeric(values) ? "num" : ""}>
                <span class="guest">{cellText(values[row])}</span>
              </td>
            ))}
          </tr>
        ))}
      </Table>
      {rows > shown && <p class="muted">{t.cells.notShown(rows - shown)}</p>}
    </>
  );
}

function cellText(value: unknown): string {
  if (value === null || value === undefined) return "–";
  return line(typeof value === "object" ? JSON.stringify(value) : value, 200);
}
