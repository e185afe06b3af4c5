// The language of the interface: the first of the browser's that the console has, until another one is chosen.
import { computed, effect, signal } from "@preact/signals";

export type Language = "en" | "zh";
const STORED = "cube-language";

function isKnown(name: unknown): name is Language {
  return name === "en" || name === "zh";
}

function ofBrowser(): Language {
  return navigator.languages.map((name) => name.slice(0, 2).toLowerCase()).find(isKnown) ?? "en";
}

function stored(): Language | undefined {
  try {
    const name = localStorage.getItem(STORED);
    return isKnown(name) ? name : undefined;
  } catch {
    return undefined;
  }
}

export const language = signal<Language>(stored() ?? ofBrowser());

/** The locale of dates, numbers and units: a regional form of English, or the Chinese of the mainland. */
export const locale = computed(() => (language.value === "zh" ? "zh-CN" : (navigator.languages.find((name) => name.startsWith("en")) ?? "en")));

export function choose(next: Language): void {
  language.value = next;
  try {
    localStorage.setItem(STORED, next);
  } catch {
    // The browser allows no storage: the choice lasts until a reload.
  }
}

effect(() => {
  document.documentElement.lang = locale.value;
});
