// What the page holds beyond a view: the key, whether the server answers, the theme, the route. The key is in memory only:
// no storage, no cookie, no URL.
import { batch, computed, effect, signal } from "@preact/signals";

export const key = signal("");
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
}
export const notices = signal<Notice[]>([]);
let lastNotice = 0;

/** Shows a message for some seconds; an error stays until it is closed. */
export function notify(kind: Notice["kind"], text: string): void {
  lastNotice += 1;
  const id = lastNotice;
  notices.value = [...notices.value.slice(-3), { id, kind, text }];
  if (kind === "good") setTimeout(() => dismiss(id), 6000);
}

export function dismiss(id: number): void {
  notices.value = notices.value.filter((notice) => notice.id !== id);
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
