// The live terminal: what is typed, what a guest may not do with it, and a restart of the server.
import { assert, same, until } from "../until.mjs";

/** The text of the terminal: the last lines, those before the screen included. */
export function screen(page) {
  return page.evaluate(() => {
    const { buffer } = document.querySelector(".terminal-box").cubeTerminal;
    const lines = [];
    for (let at = Math.max(buffer.active.length - 300, 0); at < buffer.active.length; at += 1) {
      const line = buffer.active.getLine(at);
      const text = line.translateToString(true);
      if (line.isWrapped && lines.length) lines[lines.length - 1] += text;
      else lines.push(text);
    }
    return lines;
  });
}

async function opened({ browser, page, kept }) {
  await browser.go(`#/sandboxes/${kept.sandbox.sandboxID}/terminal`);
  await page.getByText("connected", { exact: true }).waitFor();
  await until("a prompt", async () => (await screen(page)).some((line) => /[$#]\s*$/.test(line)));
}

/** Types a command; returns the lines that it put out, once `mark` has come. */
let turn = 0;
async function type(world, command) {
  turn += 1;
  const { page } = world;
  await page.locator(".xterm-helper-textarea").focus();
  await page.keyboard.type(`${command}; echo "end"-${turn}`);
  await page.keyboard.press("Enter");
  const mark = `end-${turn}`;
  const lines = await until(`the end of ${command}`, async () => {
    const all = await screen(page);
    // Output without an end of its own stands before the mark.
    return all.some((line) => line.endsWith(mark)) && all;
  });
  const from = lines.findLastIndex((line) => line.includes(`"end"-${turn}`));
  return lines.slice(from + 1, lines.findIndex((line) => line.endsWith(mark)));
}

async function answers(world) {
  await opened(world);
  same((await type(world, "echo $((6*7))")).join(), "42", "the answer");
}

async function left(world) {
  const { page } = world;
  await page.locator(".xterm-helper-textarea").focus();
  await page.keyboard.press("Shift+Escape");
  const inside = await page.evaluate(() => document.activeElement?.closest(".terminal-box") !== null);
  assert(!inside, "the keyboard cannot leave the terminal");
}

async function resized(world) {
  const { page } = world;
  const before = (await type(world, "stty size")).join();
  await page.setViewportSize({ width: 900, height: 700 });
  await until("another size", async () => (await type(world, "stty size")).join() !== before);
  await page.setViewportSize({ width: 1280, height: 860 });
}

async function flood(world) {
  const lines = await type(world, "seq 1 50000");
  same(lines.at(-1), "50000", "the last line of a flood");
}

async function colours(world) {
  await type(world, "printf '\\e[38;2;255;90;90mred%s\\e[0m\\n' 24");
  const shown = world.page.locator(".xterm-rows span", { hasText: "red24" }).last();
  same(await shown.evaluate((span) => span.style.color), "rgb(255, 90, 90)", "a 24-bit colour");
}

async function escapes(world) {
  const { page } = world;
  await page.evaluate(() => navigator.clipboard.writeText("mine"));
  const title = await page.title();
  const secret = Buffer.from("stolen").toString("base64");
  // Clipboard, titles, links, windows, notifications, files of iTerm, colours, mouse, images, and one that never ends.
  const all = [
    `\\e]52;c;${secret}\\a`,
    "\\e]0;pwned\\a\\e]1;pwned\\a\\e]2;pwned\\a\\e]l;pwned\\a",
    "\\e]8;;javascript:alert(1)\\alink\\e]8;;\\a",
    "\\e]8;;http://192.0.2.99/leak\\alink\\e]8;;\\a",
    "\\e[8;1;1t\\e[3;0;0t\\e[9;1t\\e[2t",
    "\\e]9;note\\a\\e]777;notify;a;b\\a\\e]99;;n\\a",
    "\\e]1337;File=name=eA==;inline=1:AAAA\\a",
    "\\e]4;0;#ffffff\\a\\e]10;#0b0e13\\a\\e]11;#0b0e13\\a",
    "\\ePq#0;2;0;0;0#0~~@@vv\\e\\\\",
    "\\e_Gf=24,s=1,v=1;AAAA\\e\\\\",
  ];
  await type(world, all.map((one) => `printf '${one}\\n'`).join(";"));
  same(await page.title(), title, "title of the page");
  same(await page.evaluate(() => navigator.clipboard.readText()), "mine", "clipboard");
  same(await page.locator(".terminal-box a").count(), 0, "links in the terminal");
  await page.locator(".terminal-box").click({ position: { x: 40, y: 40 }, modifiers: ["Control"] });
  // No sequence makes the terminal type what the guest chose.
  const typed = await type(world, "printf '\\e]0;rm -rf\\a\\e[21t\\e[20t\\eP$qm\\e\\\\\\e]52;c;?\\a\\e]10;?\\a\\e]4;1;?\\a'; IFS= read -rs -t 1 -n 200 got; echo \"got:${#got}\"");
  same(typed.at(-1), "got:0", "what the terminal typed by itself");
  const size = await page.locator(".terminal-box").boundingBox();
  assert(size.height > 250 && size.width > 500, `the terminal has shrunk to ${JSON.stringify(size)}`);
}

async function restart(world) {
  const { page, server } = world;
  await type(world, "MARK=still-here");
  await server.kill();
  await page.getByText("Reconnecting to the server").waitFor();
  await server.begin();
  await page.getByText("Reconnecting to the server").waitFor({ state: "detached" });
  await page.getByText("connected", { exact: true }).waitFor({ timeout: 30_000 });
  same((await type(world, "echo $MARK")).join(), "still-here", "the same shell after a restart of the server");
  assert((await screen(page)).some((line) => /Not connected from .* to .*: output of this time is missing/.test(line)), "the gap has no mark");
  // What the browser says about a server that is away is expected here.
  world.browser.forget();
}

const shells = (server, kept) => server.exec(kept.sandbox, "pgrep -c -u user -x bash; true").then(Number);

/** Neither another page of the console nor a reload ends a shell. */
async function elsewhere(world) {
  const { browser, page, kept, server } = world;
  await type(world, "PLACE=kept");
  const before = await shells(server, kept);
  await browser.go("#/templates");
  await page.getByRole("heading", { name: "Templates", exact: true }).waitFor();
  await browser.go(`#/sandboxes/${kept.sandbox.sandboxID}/terminal`);
  same((await type(world, "echo $PLACE")).join(), "kept", "the shell after another page");
  await page.reload();
  await page.getByText("connected", { exact: true }).waitFor();
  await until("a mark", async () => (await screen(page)).some((line) => /Attached at .*: output from before is not shown/.test(line)));
  same((await type(world, "echo $PLACE")).join(), "kept", "the shell after a reload");
  same(await shells(server, kept), before, "shells");
}

/** Another tab is offered the shell, and does not take it by itself. */
async function offered(world) {
  const { browser, page, kept, server } = world;
  const other = await browser.context.newPage();
  browser.watch(other);
  try {
    await other.goto(`${server.url}/ui/#/sandboxes/${kept.sandbox.sandboxID}/terminal`);
    await other.getByLabel("API key").fill(server.key);
    await other.keyboard.press("Enter");
    await other.getByText("Shell user 1 of another browser tab is still running.").waitFor();
    await other.getByRole("button", { name: "Attach" }).click();
    await other.getByText("connected", { exact: true }).waitFor();
    same((await type({ page: other }, "echo $PLACE")).join(), "kept", "the shell in another tab");
    await other.getByRole("button", { name: "End shell user 2" }).click();
    await other.getByRole("button", { name: "Shell user 2", exact: true }).waitFor({ state: "detached" });
  } finally {
    await other.close();
  }
  await page.bringToFront();
}

async function several(world) {
  const { page, kept, server } = world;
  await page.getByRole("button", { name: "New shell as root" }).click();
  await page.getByText("connected", { exact: true }).waitFor();
  await until("a prompt", async () => (await screen(page)).some((line) => /#\s*$/.test(line)));
  same((await type(world, "id -un")).join(), "root", "user of the second shell");
  await page.getByRole("button", { name: /^Shell user / }).click();
  same((await type(world, "id -un")).join(), "user", "user of the first shell");
  await page.getByRole("button", { name: /^End shell root / }).click();
  await until("the shell of root has ended", async () => (await server.exec(kept.sandbox, "pgrep -c -u root -f 'bash -[i] -l'; true")).trim() === "0");
}

/** Text size and the full window reach the shell as a size. */
async function sizes(world) {
  const { page, results } = world;
  const columns = async () => Number((await type(world, "stty size")).join().split(" ")[1]);
  const before = await columns();
  await page.getByRole("button", { name: "larger text" }).click();
  await until("fewer columns", async () => (await columns()) < before);
  await page.getByRole("button", { name: "smaller text" }).click();
  await page.getByRole("button", { name: "Fill the window" }).click();
  await until("more columns", async () => (await columns()) > before);
  await world.browser.shot(`${results}/terminal-full.png`);
  await page.locator(".xterm-helper-textarea").press("Shift+Escape");
  await page.getByRole("button", { name: "Fill the window", pressed: false }).waitFor();
}

/** What was in flight at an interrupt is dropped, and said to be. */
async function interrupted(world) {
  const { page } = world;
  await page.locator(".xterm-helper-textarea").focus();
  await page.keyboard.type("yes flood");
  await page.keyboard.press("Enter");
  await until("a flood", async () => (await screen(page)).filter((line) => line === "flood").length > 200);
  await page.keyboard.press("Control+C");
  await until("a prompt", async () => /[$#]\s*$/.test((await screen(page)).findLast((line) => line) ?? ""));
  same((await type(world, "echo after")).join(), "after", "the shell after an interrupt");
}

async function tabs(world) {
  const { browser, page, kept } = world;
  await type(world, "TAB=kept");
  await browser.go(`#/sandboxes/${kept.sandbox.sandboxID}/logs`);
  await page.getByRole("heading", { name: "Log", exact: true }).waitFor();
  await browser.go(`#/sandboxes/${kept.sandbox.sandboxID}/terminal`);
  same((await type(world, "echo $TAB")).join(), "kept", "the shell behind another tab");
}

export const cases = [
  ["the terminal answers 42", false, answers],
  ["the keyboard leaves the terminal", false, left],
  ["the terminal's size reaches the shell", false, resized],
  ["a flood of output ends", false, flood],
  ["24-bit colours are shown", false, colours],
  ["escape sequences reach nothing beyond the screen", false, escapes],
  ["the shell stays open behind other tabs", false, tabs],
  ["the terminal survives a restart of the server", false, restart],
  ["a shell survives other pages and a reload", false, elsewhere],
  ["another tab is offered the shell", false, offered],
  ["there can be several shells", false, several],
  ["text size and full window", false, sizes],
  ["an interrupt ends a flood", false, interrupted],
];
