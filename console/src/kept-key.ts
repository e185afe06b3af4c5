// The key over a reload of its tab. It is kept in two halves, each useless alone: a random pad in the tab's session storage,
// and the key combined with it in the state of the history entry. On a server with keys, pages of sandboxes that are served
// by path have this origin: in the same tab they could read the storage, but never the state of another page's entry.
// Without the pad, entries that the tab still has from before "Forget key" give nothing.
import { decode, encode } from "./base64";

const PAD = "cube-key-pad";
const MOST_KEY = 256;

function combine(bytes: Uint8Array, pad: Uint8Array): Uint8Array {
  return bytes.map((byte, at) => byte ^ (pad[at] ?? 0));
}

/** The key that this tab had before a reload, or an empty string. */
export function keptKey(): string {
  const kept = (history.state as { cubeKey?: unknown } | null)?.cubeKey;
  try {
    const pad = sessionStorage.getItem(PAD);
    if (typeof kept !== "string" || !pad) return "";
    return new TextDecoder("utf-8", { fatal: true }).decode(combine(decode(kept), decode(pad)));
  } catch {
    // The browser allows no storage, or another page has changed it: the key is asked for again.
    return "";
  }
}

/** Keeps `key` for reloads of this history entry; an empty one forgets the key in all entries. */
export function keepKey(key: string): void {
  const bytes = new TextEncoder().encode(key);
  try {
    if (bytes.length === 0 || bytes.length > MOST_KEY) {
      sessionStorage.removeItem(PAD);
      history.replaceState(null, "");
      return;
    }
    const pad = padOf(sessionStorage.getItem(PAD)) ?? crypto.getRandomValues(new Uint8Array(MOST_KEY));
    sessionStorage.setItem(PAD, encode(pad));
    history.replaceState({ cubeKey: encode(combine(bytes, pad)) }, "");
  } catch {
    // The browser allows no storage: the key is in memory only.
  }
}

function padOf(stored: string | null): Uint8Array | undefined {
  try {
    const pad = decode(stored ?? "");
    return pad.length === MOST_KEY ? pad : undefined;
  } catch {
    return undefined;
  }
}
