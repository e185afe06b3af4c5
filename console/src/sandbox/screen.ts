// Output on its way to a terminal. At most HIGH_WATER bytes wait to be drawn: no more is read until they are below LOW_WATER,
// so a flood stays in the sandbox (https://xtermjs.org/docs/guides/flowcontrol/).
//
// What waits in buffers between the sandbox and here when a job is interrupted has lost its meaning; a terminal's line
// discipline drops it too. So an interrupt during a flood skips output until none comes for a moment, and draws the last
// part of it.
import type { Terminal } from "@xterm/xterm";
import { join } from "../envd";
import { t } from "../i18n";
import { bytes } from "../text";

const HIGH_WATER = 256 << 10;
const LOW_WATER = 64 << 10;
/** Bytes that wait when an interrupt counts as one of a flood. */
const FLOOD = 16 << 10;
/** Bytes of skipped output that are drawn. */
const KEPT = 4 << 10;
const QUIET_MS = 300;
const MOST_SKIP_MS = 3000;

interface Skip {
  parts: Uint8Array[];
  held: number;
  dropped: number;
  until: number;
  timer: ReturnType<typeof setTimeout>;
}

export class Screen {
  private waiting = 0;
  private wake: (() => void) | undefined;
  private skip: Skip | undefined;

  constructor(private readonly terminal: Terminal) {}

  /** Resolves when more may be read. */
  async write(output: Uint8Array): Promise<void> {
    if (this.skip) return this.pass(this.skip, output);
    this.draw(output);
    if (this.waiting > HIGH_WATER) await new Promise<void>((wake) => (this.wake = wake));
  }

  /** A line of the console's own between those of the guest. Full-screen programs repaint themselves instead. */
  mark(text: string): void {
    if (this.skip) this.end(this.skip);
    const { type, cursorX } = this.terminal.buffer.active;
    if (type === "normal") this.terminal.write(`\x1b[0m${cursorX > 0 ? "\r\n" : ""}\x1b[33m── ${text} ──\x1b[0m\r\n`);
  }

  /** The person has typed an interrupt. */
  interrupt(): void {
    if (this.skip || this.waiting < FLOOD) return;
    const skip: Skip = { parts: [], held: 0, dropped: 0, until: Date.now() + MOST_SKIP_MS, timer: setTimeout(() => this.end(skip), QUIET_MS) };
    this.skip = skip;
    this.resume();
  }

  private draw(output: Uint8Array): void {
    this.waiting += output.length;
    this.terminal.write(output, () => {
      this.waiting -= output.length;
      if (this.waiting < LOW_WATER) this.resume();
    });
  }

  private resume(): void {
    this.wake?.();
    this.wake = undefined;
  }

  private pass(skip: Skip, output: Uint8Array): void {
    skip.parts.push(output);
    skip.held += output.length;
    while (skip.held - (skip.parts[0]?.length ?? 0) >= KEPT) {
      const first = skip.parts.shift()?.length ?? 0;
      skip.held -= first;
      skip.dropped += first;
    }
    clearTimeout(skip.timer);
    if (Date.now() > skip.until) return this.end(skip);
    skip.timer = setTimeout(() => this.end(skip), QUIET_MS);
  }

  private end(skip: Skip): void {
    clearTimeout(skip.timer);
    this.skip = undefined;
    let rest = join(skip.parts, skip.held);
    if (skip.dropped > 0) {
      // Begins with a whole line, so neither within a character nor within a sequence.
      const cut = rest.indexOf(10) + 1;
      this.mark(t.terminal.skipped(bytes(skip.dropped + cut)));
      rest = rest.subarray(cut);
    }
    if (rest.length > 0) this.draw(rest);
  }
}
