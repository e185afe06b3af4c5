// A live terminal. Its output is the guest's: sequences that reach beyond the screen do nothing here.
import { FitAddon } from "@xterm/addon-fit";
import { Terminal } from "@xterm/xterm";
import { useEffect, useRef, useState } from "preact/hooks";
import { explain } from "../api";
import { Badge, Button, Choice, Panel } from "../ui/parts";
import { Shell, type ShellState } from "./shell";

/** Titles, colours of the palette, links, directories, notifications, clipboard, and what terminals of some makers add. */
const IGNORED = [0, 1, 2, 4, 5, 7, 8, 9, 10, 11, 12, 17, 19, 50, 51, 52, 99, 104, 110, 111, 112, 133, 633, 777, 1337];

export function makeTerminal(): Terminal {
  const terminal = new Terminal({
    allowProposedApi: false,
    convertEol: false,
    cursorBlink: false,
    fontFamily: 'ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace',
    fontSize: 13,
    minimumContrastRatio: 4.5,
    scrollback: 5000,
    // Links are neither drawn nor opened: where one leads is the guest's choice.
    linkHandler: { activate: () => undefined },
    windowOptions: {},
    theme: { background: "#0b0e13", foreground: "#dfe4ec", cursor: "#7cb3ff", selectionBackground: "#31507d" },
  });
  for (const code of IGNORED) terminal.parser.registerOscHandler(code, () => true);
  // Device control strings (settings, fonts, images) and the status strings of DECRQSS.
  terminal.parser.registerDcsHandler({ intermediates: "$", final: "q" }, () => true);
  terminal.parser.registerDcsHandler({ intermediates: "+", final: "q" }, () => true);
  return terminal;
}

export function TerminalView({ id, shown }: { id: string; shown: boolean }) {
  const box = useRef<HTMLDivElement>(null);
  const leave = useRef<HTMLDivElement>(null);
  const held = useRef<{ terminal: Terminal; fit: FitAddon } | undefined>(undefined);
  const [user, setUser] = useState("user");
  const [state, setState] = useState<ShellState>({ kind: "opening" });
  const [turn, setTurn] = useState(0);
  const [reads, setReads] = useState(false);
  useEffect(() => {
    const target = box.current;
    if (!target) return;
    const terminal = makeTerminal();
    const fit = new FitAddon();
    terminal.loadAddon(fit);
    terminal.open(target);
    // Tab belongs to the shell, so the keyboard needs another way out.
    terminal.attachCustomKeyEventHandler((event) => {
      if (event.key !== "Escape" || !event.shiftKey) return true;
      if (event.type === "keydown") leave.current?.focus();
      return false;
    });
    held.current = { terminal, fit };
    const size = () => {
      if (target.clientWidth > 0) fit.fit();
    };
    size();
    const shell = new Shell(id, user, terminal, setState);
    // Tests read the screen through this; the page does not use it.
    Object.assign(target, { cubeTerminal: terminal });
    const watcher = new ResizeObserver(size);
    watcher.observe(target);
    terminal.focus();
    return () => {
      watcher.disconnect();
      shell.close();
      terminal.dispose();
    };
  }, [id, user, turn]);
  useEffect(() => {
    if (shown) {
      held.current?.fit.fit();
      held.current?.terminal.focus();
    }
  }, [shown]);
  useEffect(() => {
    if (held.current) held.current.terminal.options.screenReaderMode = reads;
  }, [reads, turn, user]);
  return (
    <Panel
      title="Terminal"
      tools={
        <>
          <div ref={leave} tabIndex={-1} class="hint">
            Shift+Esc leaves the terminal
          </div>
          <ShellBadge state={state} />
          <Button pressed={reads} onClick={() => setReads(!reads)}>
            Screen reader
          </Button>
          <Choice
            label="User"
            value={user}
            onInput={setUser}
            options={[
              ["user", "user"],
              ["root", "root"],
            ]}
          />
          {state.kind === "ended" && <Button onClick={() => setTurn(turn + 1)}>New shell</Button>}
        </>
      }
    >
      <div class="terminal-box" ref={box} />
    </Panel>
  );
}

function ShellBadge({ state }: { state: ShellState }) {
  switch (state.kind) {
    case "opening":
      return <Badge tone="info">opening</Badge>;
    case "open":
      return <Badge tone="good">connected</Badge>;
    case "asleep":
      return <Badge tone="warn">paused</Badge>;
    case "cut":
      return <Badge tone="warn">reconnecting</Badge>;
    case "ended":
      return <Badge tone={state.error ? "bad" : "calm"}>{state.error ? explain(state.error) : `ended, status ${state.code}`}</Badge>;
  }
}
