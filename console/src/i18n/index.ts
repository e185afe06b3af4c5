import { en } from "./en";
import { language, type Language } from "./language";
import { zh } from "./zh";

export type Text = typeof en;
const texts: Record<Language, Text> = { en, zh };

/** The text of the interface in the chosen language. A view that reads it is drawn again when the language changes. */
export const t: Text = new Proxy(en, { get: (_, section) => texts[language.value][section as keyof Text] });

/** The text of a name that the server or a guest has sent, if there is one. */
export function named(texts: Record<string, string>, name: string): string | undefined {
  return Object.hasOwn(texts, name) ? texts[name] : undefined;
}
