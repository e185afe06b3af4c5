// Live terminals: the shells of a sandbox, one of them shown.
import { signal } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";
import { explain } from "../api";
import { t } from "../i18n";
import { line } from "../text";
import { copyText } from "../ui/copy";
import { Badge, Button, Panel } from "../ui/parts";
import type { ShellState } from "./shell";
import { leaveShells, MOST_SHELLS, shellsOf, type Offer, type OpenShell, type Shells } from "./shells";
import { DEFAULT_FONT_PX } from "./xterm";

const fontPx = signal(DEFAULT_FONT_PX);
const LEAST_FONT_PX = 9;
const MOST_FONT_PX = 24;
const isRead = signal(false);

export function TerminalView({ id }: { id: string }) {
  const shells = shellsOf(id);
  const leave = useRef<HTMLParagraphElement>(null);
  const [isFull, setIsFull] = useState(false);
  useEffect(() => void shells.look(), [shells]);
  const current = shells.current();
  const left = () => {
    setIsFull(false);
    leave.current?.focus();
  };
  return (
    <Panel
      title={t.terminal.title}
      isFull={isFull}
      tools={
        <>
          {current && <ShellBadge state={current.shell.state.value} />}
          <Button onClick={() => (fontPx.value -= 1)} disabled={fontPx.value <= LEAST_FONT_PX} label={t.terminal.smaller}>
            A−
          </Button>
          <Button onClick={() => (fontPx.value += 1)} disabled={fontPx.value >= MOST_FONT_PX} label={t.terminal.larger}>
            A+
          </Button>
          <Button pressed={isRead.value} onClick={() => (isRead.value = !isRead.value)}>
            {t.terminal.reader}
          </Button>
          <Button pressed={isFull} onClick={() => setIsFull(!isFull)}>
            {t.terminal.fill}
          </Button>
        </>
      }
    >
      <div class="shells">
        {shells.open.value.map((one) => (
          <ShellTab key={one.tag} one={one} shells={shells} isShown={one === current} />
        ))}
        {["user", "root"].map((user) => (
          <Button key={user} onClick={() => shells.start(user)} disabled={shells.open.value.length >= MOST_SHELLS} label={t.terminal.newShell(user)}>
            + {user}
          </Button>
        ))}
        <p ref={leave} tabIndex={-1} class="hint">
          {t.terminal.hint}
        </p>
      </div>
      <Offers shells={shells} />
      <div class="terminal-box">{current && <Shown key={current.tag} one={current} left={left} isFull={isFull} />}</div>
    </Panel>
  );
}

/** Of a sandbox that has ended: its terminals as they were. They go when the page is left. */
export function LastScreens({ id }: { id: string }) {
  const shells = shellsOf(id);
  useEffect(() => () => leaveShells(id), [id]);
  const current = shells.current();
  return (
    <Panel title={t.terminal.last} tools={<span class="muted">{t.terminal.untilLeft}</span>}>
      {shells.open.value.length > 1 && (
        <div class="shells">
          {shells.open.value.map((one) => (
            <Button key={one.tag} pressed={one === current} onClick={() => (shells.shown.value = one.tag)}>
              {nameOf(one)}
            </Button>
          ))}
        </div>
      )}
      <div class="terminal-box">{current && <Shown key={current.tag} one={current} left={() => undefined} isFull={false} />}</div>
    </Panel>
  );
}

const nameOf = (one: Offer) => `${one.user} ${one.number}`;

/** Puts the terminal of a shell, which lives on outside of this view, into the page. */
function Shown({ one, left, isFull }: { one: OpenShell; left: () => void; isFull: boolean }) {
  const place = useRef<HTMLDivElement>(null);
  const [px, reads] = [fontPx.value, isRead.value];
  useEffect(() => {
    const target = place.current;
    if (!target) return;
    const { terminal, fit, host } = one;
    target.append(host);
    if (!terminal.element) terminal.open(host);
    terminal.attachCustomKeyEventHandler((event) => own(event, one, left));
    // Tests read the screen through this; the page does not use it.
    Object.assign(target.parentElement ?? target, { cubeTerminal: terminal });
    const watcher = new ResizeObserver(() => {
      if (target.clientWidth > 0) fit.fit();
    });
    watcher.observe(target);
    terminal.focus();
    return () => {
      watcher.disconnect();
      host.remove();
    };
  }, [one]);
  useEffect(() => {
    one.terminal.options.fontSize = px;
    one.terminal.options.screenReaderMode = reads;
    one.fit.fit();
    one.terminal.focus();
  }, [one, px, reads, isFull]);
  return <div class="terminal-place" ref={place} />;
}

/** Keys that are not the shell's. Tab belongs to the shell, so the keyboard needs another way out. */
function own(event: KeyboardEvent, { terminal }: OpenShell, left: () => void): boolean {
  if (event.key === "Escape" && event.shiftKey) {
    if (event.type === "keydown") left();
    return false;
  }
  if (event.code === "KeyC" && event.ctrlKey && event.shiftKey) {
    event.preventDefault();
    if (event.type === "keydown" && terminal.hasSelection()) void copyText(terminal.getSelection());
    return false;
  }
  // The browser pastes.
  return !(event.code === "KeyV" && event.ctrlKey && event.shiftKey);
}

function ShellTab({ one, shells, isShown }: { one: OpenShell; shells: Shells; isShown: boolean }) {
  const name = nameOf(one);
  return (
    <span class="shell">
      <Button pressed={isShown} onClick={() => (shells.shown.value = one.tag)} label={t.terminal.shell(name)}>
        {name}
      </Button>
      <Button onClick={() => shells.close(one)} label={t.terminal.end(name)}>
        ×
      </Button>
    </span>
  );
}

function Offers({ shells }: { shells: Shells }) {
  const offers = shells.offers.value;
  if (offers.length === 0) return null;
  return (
    <ul class="offers" aria-label={t.terminal.others}>
      {offers.map((offer: Offer) => (
        <li key={offer.tag}>
          <span>
            {t.terminal.stillRuns(line(nameOf(offer), 40))}
          </span>
          <Button onClick={() => shells.attach(offer)}>{t.terminal.attach}</Button>
          <Button kind="danger" onClick={() => shells.endOffer(offer)}>
            {t.terminal.endOther}
          </Button>
        </li>
      ))}
    </ul>
  );
}

function ShellBadge({ state }: { state: ShellState }) {
  switch (state.kind) {
    case "opening":
      return <Badge tone="info">{t.terminal.states.opening}</Badge>;
    case "open":
      return <Badge tone="good">{t.terminal.states.open}</Badge>;
    case "asleep":
      return <Badge tone="warn">{t.terminal.states.asleep}</Badge>;
    case "cut":
      return <Badge tone="warn">{t.terminal.states.cut}</Badge>;
    case "ended":
      return <Badge tone={state.error ? "bad" : "calm"}>{state.error ? explain(state.error) : t.terminal.ended(state.code)}</Badge>;
  }
}
