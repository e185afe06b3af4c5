// Builds `dist` from `src`: one call of esbuild, then names by content and a manifest of sums. cube-api compresses the files
// when it is built.
//
// The output is a function of the sources and of package-lock.json: no time, no path, no order of a file system. CI builds
// again and compares (`cargo xtask test --tier console`).
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const dist = join(process.argv[2] ?? here, "dist");
/** Of everything that the first page loads, compressed. */
const MOST_BYTES = 250 * 1024;

const built = await build({
  absWorkingDir: here,
  entryPoints: ["src/main.tsx"],
  bundle: true,
  minify: true,
  format: "esm",
  target: ["chrome120", "firefox121", "safari17"],
  jsx: "automatic",
  jsxImportSource: "preact",
  charset: "utf8",
  legalComments: "none",
  outdir: "out",
  write: false,
  logLevel: "warning",
});

const sha = (bytes) => createHash("sha256").update(bytes).digest("hex");

rmSync(dist, { recursive: true, force: true });
mkdirSync(dist, { recursive: true });
const files = {};
let total = 0;
const put = (name, bytes) => {
  writeFileSync(join(dist, name), bytes);
  files[name] = { bytes: bytes.length, sha256: sha(bytes) };
  total += gzipSync(bytes, { level: 9 }).length;
};
const names = {};
for (const file of built.outputFiles) {
  const kind = file.path.endsWith(".css") ? "css" : "js";
  names[kind] = `console-${sha(file.contents).slice(0, 12)}.${kind}`;
  put(names[kind], Buffer.from(file.contents));
}
const page = readFileSync(join(here, "src/index.html"), "utf8");
put("index.html", Buffer.from(page.replace("CONSOLE_CSS", names.css).replace("CONSOLE_JS", names.js)));
// The licences of what is in the script, which ask to be passed on with it.
const licences = ["preact", "@preact/signals", "@preact/signals-core", "@xterm/xterm", "@xterm/addon-fit", "uplot"].map((name) => {
  const dir = join(here, "node_modules", name);
  const { version } = JSON.parse(readFileSync(join(dir, "package.json"), "utf8"));
  return `${name} ${version}\n\n${readFileSync(join(dir, "LICENSE"), "utf8").trim()}\n`;
});
put("licenses.txt", Buffer.from(licences.join(`\n${"-".repeat(80)}\n\n`)));
const lock = sha(readFileSync(join(here, "package-lock.json")));
writeFileSync(join(dist, "manifest.json"), `${JSON.stringify({ format: 1, lock, files }, null, 2)}\n`);
console.log(`${Object.keys(files).length} files, ${(total / 1024).toFixed(1)} KiB compressed`);
if (total > MOST_BYTES) {
  console.error(`the console has ${total} bytes compressed, at most ${MOST_BYTES}`);
  process.exit(1);
}
