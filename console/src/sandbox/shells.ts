// The shells of each sandbox, as long as this page lives: other pages of the console do not end them. After a reload, the
// tab's own are taken up again, and those of other tabs are offered.
import { signal } from "@preact/signals";
import { FitAddon } from "@xterm/addon-fit";
import type { Terminal } from "@xterm/xterm";
import { call, guestOf } from "../envd";
import { endShell, Shell } from "./shell";
import { makeTerminal } from "./xterm";

/** `cube-console/<tab>/<user>/<number>` */
const TAG = /^cube-console\/([0-9a-f]{8})\/([a-z_][\w-]{0,31})\/(\d{1,4})$/;
const TAB = "cube-tab";
/** Open shells of a sandbox in this page. */
export const MOST_SHELLS = 8;
/** Shells of other tabs that are offered. */
const MOST_OFFERS = 20;

export interface OpenShell {
  tag: string;
  user: string;
  number: number;
  terminal: Terminal;
  fit: FitAddon;
  /** Holds the terminal, wherever it is shown. */
  host: HTMLElement;
  shell: Shell;
}

export interface Offer {
  tag: string;
  user: string;
  number: number;
}

/** Identifies this tab of the browser. A reload keeps it. */
const tab = (() => {
  const fresh = [...crypto.getRandomValues(new Uint8Array(4))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  try {
    const stored = sessionStorage.getItem(TAB) ?? "";
    if (/^[0-9a-f]{8}$/.test(stored)) return stored;
    sessionStorage.setItem(TAB, fresh);
  } catch {
    // The browser allows no storage: a reload makes another tab of this one.
  }
  return fresh;
})();

export class Shells {
  readonly open = signal<OpenShell[]>([]);
  readonly shown = signal("");
  /** Shells of other tabs, and of this one if its page was left too long ago. */
  readonly offers = signal<Offer[]>([]);
  private looking: Promise<void> | undefined;

  constructor(private readonly sandbox: string) {}

  current(): OpenShell | undefined {
    return this.open.value.find((one) => one.tag === this.shown.value) ?? this.open.value.at(-1);
  }

  /** Finds the shells that run. Opens one if this tab has none. */
  look(): Promise<void> {
    this.looking ??= this.find().finally(() => (this.looking = undefined));
    return this.looking;
  }

  private async find(): Promise<void> {
    const isLost = (one: OpenShell) => one.shell.state.value.kind === "ended" && "error" in one.shell.state.value && one.shell.state.value.error !== undefined;
    for (const one of this.open.value.filter(isLost)) this.forget(one);
    const found = await running(this.sandbox).catch(() => []);
    const others = found.filter((one) => !this.open.value.some((open) => open.tag === one.tag));
    for (const one of others.filter((one) => one.tag.startsWith(`cube-console/${tab}/`))) this.add(one, true);
    this.offers.value = others.filter((one) => !this.open.value.some((open) => open.tag === one.tag)).slice(0, MOST_OFFERS);
    if (this.open.value.length === 0) this.start("user");
  }

  start(user: string): void {
    const number = Math.max(0, ...this.open.value.map((one) => one.number), ...this.offers.value.map((one) => one.number)) + 1;
    this.add({ tag: `cube-console/${tab}/${user}/${number}`, user, number }, false);
  }

  /** Takes up a shell that runs. */
  attach(offer: Offer): void {
    this.offers.value = this.offers.value.filter((one) => one.tag !== offer.tag);
    this.add(offer, true);
  }

  async endOffer(offer: Offer): Promise<void> {
    await endShell(await guestOf(this.sandbox), offer.tag);
    this.offers.value = this.offers.value.filter((one) => one.tag !== offer.tag);
  }

  async close(one: OpenShell): Promise<void> {
    this.forget(one);
    await one.shell.end();
  }

  /** Leaves all shells, which go on. */
  leave(): void {
    for (const one of this.open.value) this.forget(one);
    this.offers.value = [];
  }

  private add({ tag, user, number }: Offer, runs: boolean): void {
    if (this.open.value.length >= MOST_SHELLS) return;
    const terminal = makeTerminal();
    const fit = new FitAddon();
    terminal.loadAddon(fit);
    const host = document.createElement("div");
    host.className = "terminal-host";
    const shell = new Shell({ sandbox: this.sandbox, user, tag, runs }, terminal);
    this.open.value = [...this.open.value, { tag, user, number, terminal, fit, host, shell }];
    this.shown.value = tag;
  }

  private forget(one: OpenShell): void {
    this.open.value = this.open.value.filter((other) => other !== one);
    one.shell.leave();
    one.terminal.dispose();
    one.host.remove();
  }
}

async function running(sandbox: string): Promise<Offer[]> {
  const guest = await guestOf(sandbox);
  if (guest.isPaused) return [];
  const { processes } = await call<{ processes?: { tag?: unknown }[] }>(guest, "process.Process/List", {});
  return (processes ?? []).flatMap(({ tag }) => {
    const [, , user = "", number = ""] = TAG.exec(String(tag ?? "")) ?? [];
    return user ? [{ tag: String(tag), user, number: Number(number) }] : [];
  });
}

const all = new Map<string, Shells>();

export function shellsOf(sandbox: string): Shells {
  const known = all.get(sandbox) ?? new Shells(sandbox);
  all.set(sandbox, known);
  return known;
}

/** Leaves the shells of a sandbox, or of all. */
export function leaveShells(sandbox?: string): void {
  for (const [id, shells] of all) {
    if (sandbox !== undefined && sandbox !== id) continue;
    shells.leave();
    all.delete(id);
  }
}
