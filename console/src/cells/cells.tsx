// Runs cells on the sandbox's code interpreter.
import { signal } from "@preact/signals";
import { explain } from "../api";
import { t } from "../i18n";
import { execute, guestOf } from "../envd";
import { Badge, Button, Choice, Empty, Panel } from "../ui/parts";
import { Rich } from "../ui/rich";
import { Output, type Piece } from "./output";

interface Cell {
  id: number;
  language: string;
  code: string;
  pieces: Piece[];
  state: "runs" | "done" | "failed";
  /** The execution count of the interpreter. */
  number?: number;
}

const LANGUAGES = ["python", "javascript", "typescript", "bash", "r", "java"].map((name) => [name, name] as const);
const MOST_PIECES = 200;
const MOST_TEXT = 200_000;

/** The cells of a sandbox, as long as this page lives. */
class Book {
  readonly cells = signal<Cell[]>([]);
  readonly code = signal("");
  readonly language = signal("python");
  running: AbortController | undefined;
}
const books = new Map<string, Book>();

export function forgetCells(): void {
  for (const book of books.values()) book.running?.abort();
  books.clear();
}

export function Cells({ id }: { id: string }) {
  const book = books.get(id) ?? new Book();
  books.set(id, book);
  const [cells, code, language] = [book.cells.value, book.code.value, book.language.value];
  const change = (cell: number, by: (before: Cell) => Cell) => {
    book.cells.value = book.cells.value.map((one) => (one.id === cell ? by(one) : one));
  };
  const run = async () => {
    if (!code.trim() || book.running) return;
    const abort = new AbortController();
    book.running = abort;
    const cell: Cell = { id: Date.now(), language, code, pieces: [], state: "runs" };
    book.cells.value = [...book.cells.value.slice(-19), cell];
    book.code.value = "";
    try {
      for await (const event of execute(await guestOf(id), cell.code, language, abort.signal)) {
        change(cell.id, (before) => after(before, event));
      }
      change(cell.id, (before) => ({ ...before, state: before.state === "runs" ? "done" : before.state }));
    } catch (error) {
      const value = abort.signal.aborted ? t.cells.interrupted : explain(error);
      change(cell.id, (before) => ({ ...before, state: "failed", pieces: [...before.pieces, { kind: "error", name: "", value, traceback: "" }] }));
    }
    book.running = undefined;
  };
  const isRunning = cells.some((cell) => cell.state === "runs");
  return (
    <Panel title={t.cells.title} tools={<span class="muted">{t.cells.port}</span>}>
      {cells.length === 0 && (
        <Empty title={t.cells.none}>
          <Rich text={t.cells.noneText} />
        </Empty>
      )}
      {cells.map((cell) => (
        <CellView key={cell.id} cell={cell} />
      ))}
      <form
        class="cell form"
        onSubmit={(event) => {
          event.preventDefault();
          void run();
        }}
      >
        <label class="label" for="cell-code">
          {t.cells.cell}
        </label>
        <textarea
          id="cell-code"
          rows={5}
          spellcheck={false}
          value={code}
          placeholder="print(6*7)"
          onInput={(event) => (book.code.value = event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key === "Enter" && (event.ctrlKey || event.metaKey || event.shiftKey)) {
              event.preventDefault();
              void run();
            }
          }}
        />
        <div class="tools">
          <Choice label={t.cells.language} value={language} onInput={(value) => (book.language.value = value)} options={LANGUAGES} />
          <button type="submit" class="main" disabled={isRunning || !code.trim()}>
            {t.cells.run}
          </button>
          {isRunning && <Button onClick={() => book.running?.abort()}>{t.cells.interrupt}</Button>}
          <span class="hint">{t.cells.hint}</span>
        </div>
      </form>
    </Panel>
  );
}

function after(before: Cell, event: Record<string, unknown>): Cell {
  const kept = before.pieces;
  const add = (piece: Piece): Cell => ({ ...before, pieces: [...kept, piece].slice(-MOST_PIECES) });
  switch (event["type"]) {
    case "number_of_executions":
      return { ...before, number: Number(event["execution_count"]) };
    case "stdout":
    case "stderr": {
      const kind = event["type"];
      const text = String(event["text"] ?? "");
      const last = kept.at(-1);
      if (last?.kind === kind && last.text.length < MOST_TEXT) return { ...before, pieces: [...kept.slice(0, -1), { kind, text: last.text + text }] };
      return add({ kind, text });
    }
    case "result":
      return add({ kind: "result", data: event });
    case "error":
      return { ...add({ kind: "error", name: String(event["name"] ?? ""), value: String(event["value"] ?? ""), traceback: String(event["traceback"] ?? "") }), state: "failed" };
    default:
      return before;
  }
}

function CellView({ cell }: { cell: Cell }) {
  const tones = { runs: "info", done: "good", failed: "bad" } as const;
  return (
    <div class="cell">
      <div class="tools">
        <Badge tone={tones[cell.state]}>{t.cells.states[cell.state]}</Badge>
        <span class="muted">
          {cell.language}
          {Number.isFinite(cell.number) && ` [${cell.number}]`}
        </span>
      </div>
      <pre class="cell-code" tabIndex={0} aria-label={t.cells.code}>
        {cell.code}
      </pre>
      {cell.pieces.map((piece, at) => (
        <Output key={at} piece={piece} />
      ))}
      {cell.state !== "runs" && cell.pieces.length === 0 && <p class="muted">{t.cells.noOutput}</p>}
    </div>
  );
}
