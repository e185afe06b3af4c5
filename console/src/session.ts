// What the page holds beyond a view: the key, whether the server answers, the theme, the route. The key outlives a reload of
// its tab (`kept-key.ts`), and is in no cookie and no URL.
import { batch, computed, effect, signal } from "@preact/signals";
import { keepKey, keptKey } from "./kept-key";

export const key = signal(keptKey());
/** `asked`: the server wants a key, and the page has none that it takes. */
export const access = signal<"unknown" | "asked" | "granted">("unknown");
/** Why the last key was not taken. */
export const refusal = signal("");
/** Whether the last request reached the server. */
export const online = signal(true);
/** Grows each time that the server answers again after it had not: views load anew. */
export const revival = signal(0);

export type Theme = "system" | "light" | "dark";
export const theme = signal<Theme>("system");

export interface Notice {
  id: number;
  kind: "good" | "bad";
  text: string;
  /** Address of what the message is about. */
  href: string | undefined;
}
export const notices = signal<Notice[]>([]);
/** Open dialogs. Messages are shown in the last one: everything outside of it is inert. */
export const dialogs = signal<symbol[]>([]);
let lastNotice = 0;
const SHOWN_MS = { good: 6000, bad: 20_000 };

/** Shows a message for some seconds, and as long as it is pointed at. The same message again replaces the one before. */
export function notify(kind: Notice["kind"], text: string, href?: string): void {
  lastNotice += 1;
  const id = lastNotice;
  const others = notices.value.filter((notice) => notice.text !== text);
  notices.value = [...others.slice(-3), { id, kind, text, href }];
  const leave = () => (document.querySelector(".notices:is(:hover, :focus-within)") ? void setTimeout(leave, 1000) : dismiss(id));
  setTimeout(leave, SHOWN_MS[kind]);
}

export function dismiss(id: number): void {
  notices.value = notices.value.filter((notice) => notice.id !== id);
}

let touches = 0;
for (const name of ["pointerdown", "keydown"]) addEventListener(name, () => (touches += 1), { capture: true });

/**
 * Call it when a task begins; the result opens a page when the task is over. If the person has used the page in the
 * meantime, it is not moved under their hands: a message links to the page instead.
 */
export function arrival(): (text: string, ...parts: string[]) => void {
  const [before, from] = [touches, location.hash];
  return (text, ...parts) => {
    if (touches === before && location.hash === from) {
      notify("good", text);
      go(...parts);
    } else {
      notify("good", text, link(...parts));
    }
  };
}

export function reached(does: boolean): void {
  if (does && !online.value) revival.value += 1;
  online.value = does;
}

export function signOut(): void {
  batch(() => {
    key.value = "";
    refusal.value = "";
    access.value = "asked";
  });
}

const hash = signal(location.hash);
addEventListener("hashchange", () => {
  hash.value = location.hash;
});
// Each entry of the history has a state of its own.
effect(() => {
  void hash.value;
  keepKey(key.value);
});

/** The parts of `#/sandboxes/<id>/<tab>`. */
export const route = computed(() => {
  const parts = hash.value.replace(/^#\/?/, "").split("/").filter(Boolean);
  return parts.map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
});

export function go(...parts: string[]): void {
  location.hash = link(...parts);
}

export function link(...parts: string[]): string {
  return `#/${parts.map(encodeURIComponent).join("/")}`;
}

effect(() => {
  const root = document.documentElement;
  if (theme.value === "system") delete root.dataset["theme"];
  else root.dataset["theme"] = theme.value;
});

const systemDark = signal(matchMedia("(prefers-color-scheme: dark)").matches);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => {
  systemDark.value = event.matches;
});
export const isDark = computed(() => theme.value === "dark" || (theme.value === "system" && systemDark.value));
