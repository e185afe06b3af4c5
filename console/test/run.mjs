// The test of the console: one server, one browser, real sandboxes. Prints a line per case, and writes cases.json and
// screenshots to CUBE_CONSOLE_RESULTS.
//
// Everything runs in a network of its own, so that no other server and no outside is involved. CUBE_BIN and CUBE_ARTIFACTS are
// those of the project's other tests; CUBE_CONSOLE_ONLY runs only cases whose names contain it, besides the first ones.
import { spawnSync } from "node:child_process";
import { mkdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import * as strings from "./strings.mjs";
import { Browser } from "./browser.mjs";
import { Server } from "./server.mjs";
import * as access from "./cases/access.mjs";
import * as sandboxes from "./cases/sandboxes.mjs";
import * as terminal from "./cases/terminal.mjs";
import * as files from "./cases/files.mjs";
import * as hostile from "./cases/hostile.mjs";
import * as builds from "./cases/builds.mjs";
import * as lists from "./cases/lists.mjs";
import * as looks from "./cases/looks.mjs";

const NETWORK = [
  "ip link set lo up",
  "ip link add up0 type veth peer name up1",
  "ip addr add 203.0.113.2/24 dev up0",
  "ip link set up0 up",
  "ip link set up1 up",
  "ip route add default via 203.0.113.1",
].join(" && ");

if (process.env.CUBE_CONSOLE_INSIDE !== "1") {
  const own = fileURLToPath(import.meta.url);
  const done = spawnSync("unshare", ["--net", "sh", "-c", `${NETWORK} && exec "$0" "$1"`, process.execPath, own], {
    stdio: "inherit",
    env: { ...process.env, CUBE_CONSOLE_INSIDE: "1" },
  });
  process.exit(done.status ?? 1);
}

const results = process.env.CUBE_CONSOLE_RESULTS ?? join(process.cwd(), "results");
mkdirSync(results, { recursive: true });
const only = process.env.CUBE_CONSOLE_ONLY ?? "";
const cases = [];
const started = Date.now();

async function run(list, world) {
  for (const [name, isNeeded, test] of list) {
    if (only && !isNeeded && !new RegExp(only).test(name)) continue;
    // Nothing after a first step that failed says anything.
    if (world.isLost) break;
    const begun = Date.now();
    let why = "";
    try {
      await test(world);
      world.browser.assertClean();
    } catch (error) {
      why = String(error?.stack ?? error);
      await world.browser.shot(join(results, `failed-${cases.length}.png`)).catch(() => undefined);
      world.browser.forget();
    }
    const seconds = ((Date.now() - begun) / 1000).toFixed(1);
    cases.push({ name, is_good: why === "", seconds: Number(seconds), why });
    if (why && isNeeded) world.isLost = true;
    console.log(`${why ? "FAIL" : "pass"} ${name}: ${seconds} s${why && `\n${why}`}`);
  }
}

const server = await Server.start();
let browser;
try {
  browser = await Browser.open(server.url);
  const world = { server, browser, page: browser.page, results, kept: {} };
  for (const part of [strings, access, sandboxes, terminal, files, hostile, builds, lists, looks]) await run(part.cases, world);
} catch (error) {
  cases.push({ name: "setup", is_good: false, seconds: 0, why: String(error?.stack ?? error) });
  console.error(error);
} finally {
  await browser?.close().catch(() => undefined);
  await server.end();
}
writeFileSync(join(results, "cases.json"), JSON.stringify(cases, null, 2));
const failed = cases.filter((one) => !one.is_good).length;
console.log(`console: ${cases.length - failed} passed, ${failed} failed in ${Math.round((Date.now() - started) / 1000)} s; screenshots in ${results}`);
process.exit(failed || cases.length === 0 ? 1 : 0);
