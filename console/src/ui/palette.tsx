// Goes to a page, a sandbox or a template by a few letters: Ctrl-K.
import { signal } from "@preact/signals";
import { useEffect, useId, useState } from "preact/hooks";
import { all, get, type Listed, type Template } from "../api";
import { t } from "../i18n";
import { useLive } from "../live";
import { nameOf } from "../pages/names";
import { link } from "../session";
import { line } from "../text";
import { pairsText } from "./lists";
import { Dialog } from "./parts";

export interface Target {
  name: string;
  note: string;
  href: string;
}

const isOpen = signal(false);
const SHOWN = 12;

export function openPalette(): void {
  isOpen.value = true;
}

/** Ctrl-K in a terminal belongs to the shell, and a dialog stays in front. */
export function listenForPalette(): () => void {
  const pressed = (event: KeyboardEvent) => {
    if (event.key.toLowerCase() !== "k" || !(event.ctrlKey || event.metaKey) || event.shiftKey || event.altKey) return;
    if (event.target instanceof Element && event.target.closest(".terminal-box, dialog")) return;
    event.preventDefault();
    openPalette();
  };
  addEventListener("keydown", pressed);
  return () => removeEventListener("keydown", pressed);
}

async function load(signal: AbortSignal): Promise<Target[]> {
  const [sandboxes, templates] = await Promise.all([all<Listed>("/v2/sandboxes?state=running,paused").catch(() => []), get<Template[]>("/templates", signal).catch(() => [])]);
  return [
    ...sandboxes.map((one) => ({ name: one.sandboxID, note: line([one.alias ?? one.templateID, pairsText(one.metadata)].join(" "), 160), href: link("sandboxes", one.sandboxID) })),
    ...templates.map((one) => ({ name: line(nameOf(one), 80), note: t.create.template, href: link("templates", one.templateID) })),
  ];
}

export function Palette({ pages }: { pages: Target[] }) {
  return isOpen.value ? <Open pages={pages} /> : null;
}

function Open({ pages }: { pages: Target[] }) {
  const [typed, setTyped] = useState("");
  const [at, setAt] = useState(0);
  const live = useLive(load, 0);
  const id = useId();
  const wanted = typed.toLowerCase().split(/\s+/).filter(Boolean);
  const found = [...pages, ...(live.data ?? [])].filter(({ name, note }) => wanted.every((word) => `${name} ${note}`.toLowerCase().includes(word))).slice(0, SHOWN);
  const chosen = Math.min(at, found.length - 1);
  const close = () => (isOpen.value = false);
  useEffect(() => document.getElementById(`${id}-${chosen}`)?.scrollIntoView({ block: "nearest" }), [chosen]);
  const open = (target: Target | undefined) => {
    if (!target) return;
    close();
    location.hash = target.href;
  };
  const keys: Record<string, () => void> = { ArrowDown: () => setAt((chosen + 1) % found.length), ArrowUp: () => setAt((chosen + found.length - 1) % found.length), Enter: () => open(found[chosen]) };
  const pressed = (event: KeyboardEvent) => {
    const act = event.isComposing ? undefined : keys[event.key];
    if (!act || found.length === 0) return;
    event.preventDefault();
    act();
  };
  const typing = (value: string) => {
    setTyped(value);
    setAt(0);
  };
  return (
    <Dialog title={t.palette.title} onClose={close}>
      <input type="text" role="combobox" aria-label={t.palette.find} aria-expanded={found.length > 0} aria-controls={id} aria-activedescendant={found.length ? `${id}-${chosen}` : undefined} autocomplete="off" value={typed} onInput={(event) => typing(event.currentTarget.value)} onKeyDown={pressed} />
      {found.length === 0 && <p class="muted">{t.sandboxes.noMatch(line(typed, 60))}</p>}
      <ul id={id} hidden={found.length === 0} class="palette" role="listbox" aria-label={t.palette.title}>
        {found.map((target, n) => (
          <li key={target.href} id={`${id}-${n}`} role="option" aria-selected={n === chosen} onClick={() => open(target)}>
            <span class="guest">{target.name}</span>
            <span class="guest muted">{target.note}</span>
          </li>
        ))}
      </ul>
    </Dialog>
  );
}
