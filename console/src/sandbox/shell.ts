// A shell in a sandbox: its output goes to a terminal, what is typed goes to it in order. A cut stream is taken up again:
// the shell lives on in the sandbox while the server restarts.
import type { Terminal } from "@xterm/xterm";
import { ApiError } from "../api";
import { call, decode, encode, guestOf, stream, type Guest, type ProcessEvent } from "../envd";

export type ShellState = { kind: "opening" } | { kind: "open" } | { kind: "cut" } | { kind: "asleep" } | { kind: "ended"; code: number; error?: unknown };

/** Tries to take up a cut stream, one every second or more. */
const MOST_TRIES = 120;
const MOST_INPUT = 64 * 1024;

export class Shell {
  private readonly abort = new AbortController();
  private guest: Guest | undefined;
  private pid = 0;
  /** Typed and not yet sent. */
  private typed: Uint8Array[] = [];
  private sending = false;

  constructor(
    private readonly id: string,
    private readonly user: string,
    private readonly terminal: Terminal,
    private readonly show: (state: ShellState) => void,
  ) {
    const text = new TextEncoder();
    terminal.onData((data) => this.type(text.encode(data)));
    terminal.onBinary((data) => this.type(Uint8Array.from(data, (char) => char.charCodeAt(0))));
    terminal.onResize(() => void this.resize());
    addEventListener("pagehide", () => this.close(), { signal: this.abort.signal });
    void this.run();
  }

  close(): void {
    this.abort.abort();
    if (this.pid && this.guest && !this.guest.isPaused) {
      const order = { process: { pid: this.pid }, signal: "SIGNAL_SIGKILL" };
      void call(this.guest, "process.Process/SendSignal", order, undefined, true).catch(() => undefined);
    }
  }

  private get size() {
    return { cols: this.terminal.cols, rows: this.terminal.rows };
  }

  private async run(): Promise<void> {
    for (let tries = 0; tries < MOST_TRIES; tries += 1) {
      try {
        this.guest = await guestOf(this.id);
        if (this.guest.isPaused) {
          tries = 0;
          this.show({ kind: "asleep" });
          await this.pause();
          if (this.abort.signal.aborted) return;
          continue;
        }
        for await (const event of this.events(this.guest)) {
          tries = 0;
          if (await this.take(event)) return;
        }
        throw new Error("The stream was cut.");
      } catch (error) {
        if (this.abort.signal.aborted) return;
        // A refusal is final once the server answers again: the sandbox or the shell is gone.
        const isFinal = error instanceof ApiError && [400, 401, 403, 404, 501].includes(error.status);
        if (isFinal || (this.pid === 0 && tries > 2)) return this.show({ kind: "ended", code: -1, error });
        this.show({ kind: "cut" });
        await this.pause();
      }
      if (this.abort.signal.aborted) return;
    }
    this.show({ kind: "ended", code: -1, error: new Error("The server did not come back.") });
  }

  private pause(): Promise<void> {
    return new Promise((wake) => setTimeout(wake, 1000));
  }

  private events(guest: Guest): AsyncGenerator<ProcessEvent> {
    if (this.pid) return stream(guest, "process.Process/Connect", { process: { pid: this.pid } }, this.abort.signal);
    const process = { cmd: "/bin/bash", args: ["-i", "-l"], envs: { TERM: "xterm-256color", LANG: "C.UTF-8" } };
    return stream(guest, "process.Process/Start", { process, pty: { size: this.size } }, this.abort.signal, this.user);
  }

  /** Whether the shell has ended. The next event is read once this one is on the screen, so a flood stays in the guest. */
  private async take(event: ProcessEvent): Promise<boolean> {
    if (event.start) {
      this.pid = event.start.pid ?? 0;
      this.show({ kind: "open" });
      void this.resize();
      void this.flush();
    }
    if (event.data?.pty) {
      const bytes = decode(event.data.pty);
      await new Promise<void>((done) => this.terminal.write(bytes, done));
    }
    if (!event.end) return false;
    this.pid = 0;
    this.show({ kind: "ended", code: event.end.exitCode ?? 0 });
    return true;
  }

  private type(bytes: Uint8Array): void {
    const held = this.typed.reduce((total, part) => total + part.length, 0);
    if (held + bytes.length > 16 * MOST_INPUT) return;
    this.typed.push(bytes);
    void this.flush();
  }

  /** Sends what was typed, one request at a time, so that it arrives in order. */
  private async flush(): Promise<void> {
    if (this.sending || !this.guest || !this.pid) return;
    this.sending = true;
    try {
      while (this.typed.length > 0) {
        const parts = this.typed.splice(0);
        const all = new Uint8Array(await new Blob(parts as BlobPart[]).arrayBuffer());
        for (let at = 0; at < all.length; at += MOST_INPUT) {
          const pty = encode(all.subarray(at, at + MOST_INPUT));
          await call(this.guest, "process.Process/SendInput", { process: { pid: this.pid }, input: { pty } });
        }
      }
    } catch {
      // What was lost is not repeated: it could arrive twice.
    }
    this.sending = false;
  }

  private async resize(): Promise<void> {
    if (!this.guest || !this.pid) return;
    const order = { process: { pid: this.pid }, pty: { size: this.size } };
    await call(this.guest, "process.Process/Update", order).catch(() => undefined);
  }
}
