// A shell in a sandbox: its output goes to a terminal, what is typed goes to it in order. A cut stream is taken up again:
// the shell lives on in the sandbox while the server restarts, and also when this page ends. Its tag finds it again.
import { signal } from "@preact/signals";
import type { Terminal } from "@xterm/xterm";
import { ApiError } from "../api";
import { call, decode, encode, guestOf, stream, type Guest, type ProcessEvent } from "../envd";
import { t } from "../i18n";
import { clock } from "../text";
import { Screen } from "./screen";

export type ShellState = { kind: "opening" } | { kind: "open" } | { kind: "cut" } | { kind: "asleep" } | { kind: "ended"; code: number; error?: unknown };

/** Tries to take up a cut stream, one every second or more. */
const MOST_TRIES = 120;
const MOST_INPUT = 64 << 10;
/** Input that waits to be sent. */
const MOST_HELD = 1 << 20;
/** Ctrl-C, Ctrl-Z and Ctrl-\ as bytes. */
const INTERRUPTS = [0x03, 0x1a, 0x1c];

const now = () => clock(new Date().toISOString());

export interface ShellSpec {
  sandbox: string;
  user: string;
  /** Names the process in the sandbox. */
  tag: string;
  /** Whether the shell already runs. */
  runs: boolean;
}

export class Shell {
  readonly state = signal<ShellState>({ kind: "opening" });
  private readonly abort = new AbortController();
  private readonly screen: Screen;
  private guest: Guest | undefined;
  /** Whether the process was started, here or before. */
  private runs: boolean;
  /** Why and since when no output comes. */
  private gap: { why: string; since: string } | undefined;
  /** Typed and not yet sent. */
  private typed: Uint8Array[] = [];
  private sending = false;

  constructor(
    private readonly spec: ShellSpec,
    private readonly terminal: Terminal,
  ) {
    this.screen = new Screen(terminal);
    this.runs = spec.runs;
    const text = new TextEncoder();
    terminal.onData((data) => this.type(text.encode(data)));
    terminal.onBinary((data) => this.type(Uint8Array.from(data, (char) => char.charCodeAt(0))));
    terminal.onResize(() => void this.resize(0));
    void this.run();
  }

  /** Stops following the shell, which goes on. */
  leave(): void {
    this.abort.abort();
  }

  /** Ends the shell. */
  async end(): Promise<void> {
    this.leave();
    if (this.runs && this.guest) await endShell(this.guest, this.spec.tag);
  }

  private get process() {
    return { tag: this.spec.tag };
  }

  private async run(): Promise<void> {
    for (let tries = 0; tries < MOST_TRIES; tries += 1) {
      try {
        this.guest = await guestOf(this.spec.sandbox);
        if (this.guest.isPaused) {
          tries = 0;
          this.lose(t.terminal.wasPaused, { kind: "asleep" });
          await this.pause();
          if (this.abort.signal.aborted) return;
          continue;
        }
        for await (const event of this.events(this.guest)) {
          tries = 0;
          if (await this.take(event)) return;
        }
        throw new Error(t.errors.cut);
      } catch (error) {
        if (this.abort.signal.aborted) return;
        // A refusal is final once the server answers again: the sandbox or the shell is gone.
        const isFinal = error instanceof ApiError && [400, 401, 403, 404, 501].includes(error.status);
        if (isFinal || (!this.runs && tries > 2)) return this.over(-1, error);
        this.lose(t.terminal.notConnected, { kind: "cut" });
        await this.pause();
      }
      if (this.abort.signal.aborted) return;
    }
    this.over(-1, new Error(t.terminal.noReturn));
  }

  private over(code: number, error?: unknown): void {
    this.runs = false;
    this.state.value = { kind: "ended", code, error };
  }

  private lose(why: string, state: ShellState): void {
    if (this.runs) this.gap ??= { why, since: now() };
    this.state.value = state;
  }

  private pause(): Promise<void> {
    return new Promise((wake) => setTimeout(wake, 1000));
  }

  private events(guest: Guest): AsyncGenerator<ProcessEvent> {
    if (this.runs) return stream(guest, "process.Process/Connect", { process: this.process }, this.abort.signal);
    const process = { cmd: "/bin/bash", args: ["-i", "-l"], envs: { TERM: "xterm-256color", LANG: "C.UTF-8" } };
    return stream(guest, "process.Process/Start", { process, pty: { size: this.size() }, tag: this.spec.tag }, this.abort.signal, this.spec.user);
  }

  private size(fewer = 0) {
    return { cols: this.terminal.cols, rows: Math.max(this.terminal.rows - fewer, 1) };
  }

  /** Whether the shell has ended. */
  private async take(event: ProcessEvent): Promise<boolean> {
    if (event.start) this.started();
    if (event.data?.pty) await this.screen.write(decode(event.data.pty));
    if (!event.end) return false;
    this.over(event.end.exitCode ?? 0);
    return true;
  }

  private started(): void {
    const isNew = !this.runs;
    this.runs = true;
    this.state.value = { kind: "open" };
    if (!isNew) {
      const { why, since } = this.gap ?? { why: "", since: "" };
      this.screen.mark(since ? t.terminal.missing(why, since, now()) : t.terminal.attached(now()));
      // A changed size makes the shell and full-screen programs draw themselves.
      void this.resize(1).then(() => this.resize(0));
    } else void this.resize(0);
    this.gap = undefined;
    void this.flush();
  }

  private type(bytes: Uint8Array): void {
    const held = this.typed.reduce((total, part) => total + part.length, 0);
    if (held + bytes.length > MOST_HELD) return this.screen.mark(t.terminal.notSent);
    if (bytes.length === 1 && INTERRUPTS.includes(bytes[0] ?? 0)) this.screen.interrupt();
    this.typed.push(bytes);
    void this.flush();
  }

  /** Sends what was typed, one request at a time, so that it arrives in order. While the shell cannot be reached, it waits. */
  private async flush(): Promise<void> {
    if (this.sending || !this.guest || this.state.value.kind !== "open") return;
    this.sending = true;
    try {
      while (this.typed.length > 0) {
        const parts = this.typed.splice(0);
        const all = new Uint8Array(await new Blob(parts as BlobPart[]).arrayBuffer());
        for (let at = 0; at < all.length; at += MOST_INPUT) {
          const pty = encode(all.subarray(at, at + MOST_INPUT));
          await call(this.guest, "process.Process/SendInput", { process: this.process, input: { pty } });
        }
      }
    } catch {
      // It is not repeated: it could arrive twice.
      if (!this.abort.signal.aborted && this.runs) this.screen.mark(t.terminal.mayBeLost);
    }
    this.sending = false;
  }

  private async resize(fewer: number): Promise<void> {
    if (!this.guest || !this.runs) return;
    const order = { process: this.process, pty: { size: this.size(fewer) } };
    await call(this.guest, "process.Process/Update", order).catch(() => undefined);
  }
}

/** Kills a shell by its tag. */
export async function endShell(guest: Guest, tag: string): Promise<void> {
  if (guest.isPaused) return;
  await call(guest, "process.Process/SendSignal", { process: { tag }, signal: "SIGNAL_SIGKILL" }).catch((error: unknown) => {
    // It has ended by itself.
    if (!(error instanceof ApiError && error.status === 404)) throw error;
  });
}
