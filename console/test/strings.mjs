// All text of the interface is in `src/i18n`: both languages have all of it, and nothing else of the source has any. Needs
// neither a server nor a browser: `node test/strings.mjs`.
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";
import { build, transform } from "esbuild";
import { assert } from "./until.mjs";

const SOURCE = fileURLToPath(new URL("../src", import.meta.url));
/** Chinese text without Chinese characters. */
const SAME = /^( ?ID|Dockerfile|Shell ⟨0⟩|⟨0⟩ \/ ⟨1⟩|，|Webhook|URL|CPU)$/;
/** Names that are no words of a language: headers, keys, events and methods. */
const NAMES = new Set(["Enter", "Escape", "English", "Python", "Markdown", "Authorization", "Dockerfile", "vCPUs", "Ctrl K", "print(6*7)"]);

/** The literals of JavaScript as esbuild writes it, each with what stands before it. */
function* literals(code) {
  const token = /\/\/[^\n]*|\/\*[\s\S]*?\*\/|"((?:[^"\\\n]|\\.)*)"|'((?:[^'\\\n]|\\.)*)'|`((?:[^`\\]|\\.)*)`|(?<=[(,=:[!&|?{};\n] ?)\/(?![/*])(?:[^/\\\n[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+\/\w*/g;
  for (const found of code.matchAll(token)) {
    const text = found[1] ?? found[2] ?? found[3];
    if (text !== undefined) yield [text, code.slice(Math.max(found.index - 40, 0), found.index), found[3] !== undefined];
  }
}

/** Whether a literal is text for people. Classes of the style sheet, addresses, code and names of headers are none. */
function isText(text, before, isTemplate, classes) {
  const plain = isTemplate ? text.replace(/\$\{(?:[^{}]|\{[^{}]*\})*\}/g, "·") : text;
  if (!/\p{L}{2}/u.test(plain) || /^[A-Z_]+$|^(ui-monospace|https:|noopener)/.test(plain) || NAMES.has(plain) || /jsxs?\($/.test(before)) return false;
  if (/(children|"aria-label"|label|title|placeholder|hint|note|alt): (\[[^\]]*)?$/.test(before) && !/^(n|cube) ?=?/.test(plain)) return true;
  if (plain.split(/\s+/).every((word) => classes.has(word.replace(/-?·$/, "")) || word === "·")) return false;
  return /^[A-Z][a-z]+[.!?…]?$/.test(plain) || /(^|[\s·])[a-z]{2,},? ([a-z]{2,}|·)/i.test(plain.replace(/^(export|const|from|import|cube|FROM) [\s\S]*/, ""));
}

/** Text outside of `src/i18n`, with the file that has it. */
async function strays() {
  const found = [];
  const classes = new Set([...readFileSync(join(SOURCE, "style.css"), "utf8").matchAll(/[.]([a-z][\w-]*)/g)].map(([, name]) => name));
  for (const name of readdirSync(SOURCE, { recursive: true })) {
    if (!/\.tsx?$/.test(name) || name.startsWith("i18n") || name.endsWith(".d.ts")) continue;
    const { code } = await transform(readFileSync(join(SOURCE, name), "utf8"), { loader: "tsx", charset: "utf8", jsx: "automatic", jsxImportSource: "preact" });
    for (const [text, before, isTemplate] of literals(code)) if (isText(text, before, isTemplate, classes)) found.push(`${name}: ${text}`);
  }
  return found;
}

/** The text of a language by its keys; functions are called with words of their own. */
function flat(texts, path = "") {
  return Object.entries(texts).flatMap(([key, value]) => {
    if (typeof value === "object") return flat(value, `${path}${key}.`);
    return [[path + key, typeof value === "function" ? value(...Array.from({ length: value.length }, (_, at) => `⟨${at}⟩`)) : value]];
  });
}

async function languages() {
  globalThis.navigator ??= { languages: ["en"] };
  globalThis.document ??= { documentElement: {} };
  const { outputFiles } = await build({
    stdin: { contents: 'export { en } from "./en"; export { zh } from "./zh";', resolveDir: join(SOURCE, "i18n") },
    bundle: true,
    write: false,
    format: "esm",
  });
  const { en, zh } = await import(`data:text/javascript;base64,${Buffer.from(outputFiles[0].contents).toString("base64")}`);
  return [new Map(flat(en)), new Map(flat(zh))];
}

async function everyText() {
  const [en, zh] = await languages();
  const wrong = [...en].filter(([key, text]) => {
    const other = zh.get(key);
    const marks = (of) => [...of.matchAll(/⟨\d⟩|`[^`]*`/g)].map(String).sort().join();
    return !other || (!/\p{Script=Han}/u.test(other) && /[a-z]{2}/i.test(text) && !SAME.test(other)) || (marks(text) !== marks(other) && !text.includes("NaN"));
  });
  assert(wrong.length === 0, `not in Chinese, or with other values and code:\n${wrong.map(([key, text]) => `${key}: ${text} / ${zh.get(key)}`).join("\n")}`);
  assert(en.size === zh.size && en.size > 300, `${en.size} texts in English, ${zh.size} in Chinese`);
}

async function noLiteral() {
  const found = await strays();
  assert(found.length === 0, `text that is not in src/i18n:\n${found.join("\n")}`);
}

export const cases = [
  ["both languages have every text", false, everyText],
  ["no text of the interface is in the code", false, noLiteral],
];

if (import.meta.url === pathToFileURL(process.argv[1] ?? "").href) for (const [, , test] of cases) await test();
