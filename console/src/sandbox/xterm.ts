// A terminal that shows what a guest writes: sequences that reach beyond the screen do nothing here.
import { Terminal } from "@xterm/xterm";

/** Titles, colours of the palette, links, directories, notifications, clipboard, and what terminals of some makers add. */
const IGNORED = [0, 1, 2, 4, 5, 7, 8, 9, 10, 11, 12, 17, 19, 50, 51, 52, 99, 104, 110, 111, 112, 133, 633, 777, 1337];

export const DEFAULT_FONT_PX = 13;

export function makeTerminal(): Terminal {
  const terminal = new Terminal({
    allowProposedApi: false,
    convertEol: false,
    cursorBlink: false,
    fontFamily: 'ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace',
    fontSize: DEFAULT_FONT_PX,
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
