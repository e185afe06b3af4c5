// Elements that every page uses.
import type { ComponentChildren } from "preact";
import { useEffect, useId, useRef, useState } from "preact/hooks";
import { explain } from "../api";
import { named, t } from "../i18n";
import type { Live } from "../live";
import { dialogs, notify } from "../session";
import { line } from "../text";
import { Rich } from "./rich";
import { Notices } from "./notices";

export type Tone = "good" | "bad" | "warn" | "calm" | "info";

export function Badge({ tone, children }: { tone: Tone; children: ComponentChildren }) {
  return <span class={`badge ${tone}`}>{children}</span>;
}

export function StateBadge({ state }: { state: string }) {
  const tones: Record<string, Tone> = { running: "good", ready: "good", paused: "warn", building: "info", waiting: "info", error: "bad" };
  return <Badge tone={tones[state] ?? "calm"}>{named(t.states, state) ?? line(state, 32)}</Badge>;
}

interface ButtonProps {
  onClick: () => unknown;
  children: ComponentChildren;
  kind?: "plain" | "main" | "danger";
  disabled?: boolean;
  label?: string;
  pressed?: boolean;
}

/** A button that is busy until the promise of its handler settles, and shows the handler's error. */
export function Button({ onClick, children, kind = "plain", disabled = false, label, pressed }: ButtonProps) {
  const [busy, setBusy] = useState(false);
  const mounted = useRef(true);
  useEffect(() => () => void (mounted.current = false), []);
  const run = async () => {
    if (busy) return;
    setBusy(true);
    try {
      await onClick();
    } catch (error) {
      notify("bad", explain(error));
    }
    if (mounted.current) setBusy(false);
  };
  return (
    <button type="button" class={kind} disabled={disabled} aria-disabled={busy} aria-busy={busy} aria-label={label} aria-pressed={pressed} onClick={run}>
      {children}
    </button>
  );
}

interface PanelProps {
  title: string;
  tools?: ComponentChildren;
  children: ComponentChildren;
  /** Whether it covers the rest of the page. */
  isFull?: boolean;
}

export function Panel({ title, tools, children, isFull = false }: PanelProps) {
  const id = useId();
  return (
    <section class={isFull ? "panel full" : "panel"} aria-labelledby={id}>
      <header>
        <h2 id={id}>{title}</h2>
        {tools && <div class="tools">{tools}</div>}
      </header>
      {children}
    </section>
  );
}

export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty">
      <p class="empty-title">{title}</p>
      {children && <div class="empty-text">{children}</div>}
    </div>
  );
}

export function Failure({ error, retry }: { error: unknown; retry?: () => void }) {
  return (
    <div class="failure" role="alert">
      <p>{line(explain(error))}</p>
      {retry && <Button onClick={retry}>{t.common.tryAgain}</Button>}
    </div>
  );
}

/** The content of a view once it has data; before that, a place for it, or the reason why there is none. */
export function Loaded<T>({ live, children }: { live: Live<T>; children: (data: T) => ComponentChildren }) {
  if (live.data !== undefined) return <>{children(live.data)}</>;
  if (live.error !== undefined) return <Failure error={live.error} retry={live.reload} />;
  return (
    <div class="waiting" role="status">
      <span class="sr">{t.common.loading}</span>
      <span class="bar" />
      <span class="bar" />
      <span class="bar short" />
    </div>
  );
}

export function Facts({ of }: { of: [string, ComponentChildren][] }) {
  return (
    <dl class="facts">
      {of.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

export function Figure({ name, value, note }: { name: string; value: ComponentChildren; note?: ComponentChildren }) {
  return (
    <div class="figure">
      <div class="figure-name">{name}</div>
      <div class="figure-value">{value}</div>
      {note && <div class="figure-note">{note}</div>}
    </div>
  );
}

interface FieldProps {
  label: string;
  value: string;
  onInput: (value: string) => void;
  hint?: string;
  type?: "text" | "search" | "number" | "password";
  placeholder?: string;
  min?: string;
  step?: string;
  /** Several lines. */
  isLong?: boolean;
}

export function Field({ label, value, onInput, hint, isLong = false, ...rest }: FieldProps) {
  const id = useId();
  const shared = { id, value, autocomplete: "off", spellcheck: false, "aria-describedby": hint ? `${id}-hint` : undefined };
  return (
    <div class="field">
      <label for={id}>{label}</label>
      {isLong ? (
        <textarea {...shared} rows={3} onInput={(event) => onInput(event.currentTarget.value)} />
      ) : (
        <input {...shared} onInput={(event) => onInput(event.currentTarget.value)} {...(rest as object)} />
      )}
      {hint && (
        <p class="hint" id={`${id}-hint`}>
          <Rich text={hint} />
        </p>
      )}
    </div>
  );
}

interface ChoiceProps {
  label: string;
  value: string;
  options: (readonly [string, string])[];
  onInput: (value: string) => void;
}

export function Choice({ label, value, options, onInput }: ChoiceProps) {
  const id = useId();
  return (
    <div class="field">
      <label for={id}>{label}</label>
      <select id={id} value={value} onChange={(event) => onInput(event.currentTarget.value)}>
        {options.map(([option, name]) => (
          <option key={option} value={option}>
            {name}
          </option>
        ))}
      </select>
    </div>
  );
}

interface ChecksProps {
  label: string;
  value: string[];
  options: (readonly [string, string])[];
  onInput: (value: string[]) => void;
}

/** Several of a few. */
export function Checks({ label, value, options, onInput }: ChecksProps) {
  return (
    <fieldset class="checks">
      <legend class="label">{label}</legend>
      {options.map(([option, name]) => (
        <label key={option}>
          <input type="checkbox" checked={value.includes(option)} onChange={(event) => onInput(event.currentTarget.checked ? [...value, option] : value.filter((one) => one !== option))} />
          {name}
        </label>
      ))}
    </fieldset>
  );
}

/** A table that scrolls on its own if it is wider than the page, also by keyboard. Names with `#` are of numbers. */
export function Table({ label, head, children }: { label: string; head: string[]; children: ComponentChildren }) {
  return (
    <div class="scroll" role="group" aria-label={label} tabIndex={0}>
      <table>
        <thead>
          <tr>
            {head.map((name, at) => (
              <th key={at} scope="col" class={name.startsWith("#") ? "num" : ""}>
                {name.replace(/^#/, "") || <span class="sr">{t.common.actions}</span>}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>{children}</tbody>
      </table>
    </div>
  );
}

interface DialogProps {
  title: string;
  onClose: () => void;
  children: ComponentChildren;
  /** The button that does it; without one, there is nothing to cancel. */
  action?: ComponentChildren;
  /** The word on the button that does nothing. */
  leave?: string;
  isWide?: boolean;
}

export function Dialog({ title, onClose, children, action, leave = t.common.cancel, isWide = false }: DialogProps) {
  const ref = useRef<HTMLDialogElement>(null);
  const id = useId();
  const me = useRef(Symbol("dialog")).current;
  useEffect(() => {
    ref.current?.showModal();
    dialogs.value = [...dialogs.value, me];
    return () => {
      dialogs.value = dialogs.value.filter((one) => one !== me);
    };
  }, []);
  return (
    <dialog ref={ref} class={isWide ? "wide" : ""} aria-labelledby={id} onClose={onClose}>
      <h2 id={id}>{title}</h2>
      <div class="dialog-body">{children}</div>
      {action && (
        <div class="dialog-tools">
          <Button onClick={onClose}>{leave}</Button>
          {action}
        </div>
      )}
      {dialogs.value.at(-1) === me && <Notices />}
    </dialog>
  );
}

interface ConfirmProps {
  title: string;
  /** Of what is lost. */
  name: string;
  text?: string;
  /** The word on the button. */
  verb?: string;
  onClose: () => void;
  confirm: () => Promise<unknown>;
}

/** Asks before something is lost. */
export function Confirm({ title, name, text, verb = t.common.delete, onClose, confirm }: ConfirmProps) {
  const act = async () => {
    await confirm();
    onClose();
  };
  return (
    <Dialog
      title={title}
      onClose={onClose}
      action={
        <Button kind="danger" onClick={act}>
          {verb}
        </Button>
      }
    >
      <p class="guest mono">{line(name, 300)}</p>
      {text && <p class="muted">{text}</p>}
    </Dialog>
  );
}

export interface Tab {
  id: string;
  name: string;
  href: string;
}

/** Tabs are links: each has an address. */
export function Tabs({ label, tabs, current }: { label: string; tabs: Tab[]; current: string }) {
  return (
    <nav class="tabs" aria-label={label}>
      {tabs.map((tab) => (
        <a key={tab.id} href={tab.href} aria-current={tab.id === current ? "page" : undefined}>
          {tab.name}
        </a>
      ))}
    </nav>
  );
}
