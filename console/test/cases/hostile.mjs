// Results, logs and traffic of a guest that tries to get into the page.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { assert, same, until } from "../until.mjs";

async function prepare(world) {
  const { server, kept } = world;
  const source = readFileSync(new URL("interpreter.py", import.meta.url), "utf8");
  await server.write(kept.sandbox, "/opt/interpreter.py", source);
  await server.exec(kept.sandbox, "setsid -f python3 /opt/interpreter.py 49999 > /tmp/interpreter.log 2>&1");
  await until("the interpreter listens", async () => (await server.exec(kept.sandbox, "ss -ltn")).includes(":49999"));
  await open(world);
}

async function open({ browser, page, kept }) {
  await browser.go(`#/sandboxes/${kept.sandbox.sandboxID}/cells`);
  await page.getByLabel("Cell", { exact: true }).waitFor();
}

/** Runs a cell; returns the element that shows it. */
export async function cell({ page }, code) {
  const before = await page.locator("div.cell").count();
  await page.getByLabel("Cell", { exact: true }).fill(code);
  await page.keyboard.press("Control+Enter");
  const shown = page.locator("div.cell").nth(before);
  await shown.locator(".badge", { hasText: /done|failed/ }).waitFor({ timeout: 60_000 });
  return shown;
}

async function cells(world) {
  const { page, browser } = world;
  await prepare(world);
  const title = await page.title();
  assert((await (await cell(world, "6*7")).innerText()).includes("42"), "the output of a cell");
  const html = await cell(world, "html");
  await html.locator("summary").click();
  assert((await html.innerText()).includes("onerror="), "HTML is shown as text");
  same(await html.locator("img, script, iframe, style, table").count(), 0, "elements of the guest's HTML");
  const svg = await cell(world, "svg");
  same(await svg.locator("img, svg").count(), 0, "drawings before they are asked for");
  await svg.getByRole("button").click();
  const drawing = svg.locator("img");
  await drawing.waitFor();
  assert((await drawing.getAttribute("src")).startsWith("data:image/svg+xml"), "the drawing is an image without an origin");
  const box = await drawing.boundingBox();
  assert(box.width < 1100 && box.height < 500, `the drawing takes ${JSON.stringify(box)}`);
  for (const code of ["javascript", "markdown", "nopng"]) {
    const shown = await cell(world, code);
    same(await shown.locator("img, script, a").count(), 0, `elements of ${code}`);
  }
  const noise = await cell(world, "output");
  const text = await noise.innerText();
  assert(text.includes("<b>bold</b>") && text.includes("Traceback <img"), `output is text: ${text}`);
  assert(!/[\u001b\u202e]/.test(text), "an escape or a mark of direction is shown");
  same(await page.title(), title, "title");
  same(await browser.overflow(), 0, "pixels beyond the window");
}

async function endless(world) {
  await open(world);
  const shown = await cell(world, "endless");
  assert((await shown.innerText()).includes("500"), "a refusal without an end is shown as one");
  const sent = async () => Number(await world.server.exec(world.kept.sandbox, "cat /tmp/sent 2> /dev/null || true"));
  await until("the page closes the connection", async () => (await sent()) > 0);
  assert((await sent()) < 64 * 2 ** 20, `${await sent()} bytes of a refusal were read`);
}

async function drawn(world) {
  const { page, browser, results } = world;
  await open(world);
  const table = await cell(world, "table");
  await table.getByRole("cell", { name: "<b>a</b>" }).waitFor();
  same(await table.locator("tbody tr").count(), 3, "rows");
  for (const [code, shape, number] of [
    ["line", "polyline", 2],
    ["bar", "rect", 2],
    ["pie", "path", 2],
    ["box", "rect", 1],
  ]) {
    const shown = await cell(world, code);
    same(await shown.locator(`svg ${shape}`).count(), number, `${shape}s of ${code}`);
    same(await shown.locator("script").count(), 0, "scripts");
  }
  await cell(world, "badchart");
  const image = await cell(world, "png");
  await until("the image is drawn", () => image.locator("img").evaluate((element) => element.naturalWidth === 40));
  await page.getByRole("heading", { name: "Chart <b>line</b>" }).first().scrollIntoViewIfNeeded();
  await browser.shot(join(results, "cells.png"));
}

async function logs({ browser, page, server, kept }) {
  const lines = "<script>document.title=1</script>\\n\\033]0;pwned\\007\\033[2Jcleared\\n\\342\\200\\256desrever\\n";
  await server.exec(kept.sandbox, `printf '${lines}' > /dev/console; python3 -c 'print(("w" * 300 + "\\n") * 100)' > /dev/console`);
  await browser.go(`#/sandboxes/${kept.sandbox.sandboxID}/logs`);
  await page.getByText("<script>document.title=1</script>").waitFor();
  same(await page.locator(".log script").count(), 0, "scripts in the log");
  const text = await page.locator(".log").innerText();
  assert(!/[\u001b\u202e]/.test(text), "an escape or a mark of direction is in the log");
  same(await browser.overflow(), 0, "pixels beyond the window");
  await page.getByLabel("Search").fill("no line has this");
  await page.getByText("No line has this text").waitFor();
}

async function refusal({ browser, page, server, kept, results }) {
  await browser.go(`#/sandboxes/${kept.sandbox.sandboxID}/network`);
  await page.getByText("set for this sandbox").waitFor();
  await page.getByText("Nothing was refused").waitFor();
  const loads = await page.evaluate(() => performance.getEntriesByType("navigation").length);
  await server.exec(kept.sandbox, "curl -s -m 1 http://198.51.100.7:8080/ ; true");
  await page.getByText("198.51.100.7:8080").waitFor({ timeout: 5000 });
  await page.getByText(/^refused: not allowed/).first().waitFor();
  same(await page.evaluate(() => performance.getEntriesByType("navigation").length), loads, "loads of the page");
  await browser.shot(join(results, "network.png"));
}

/** What was refused is allowed from its row, after a look at the new policy. */
async function allowed({ browser, page, server, kept }) {
  await browser.go(`#/sandboxes/${kept.sandbox.sandboxID}/network`);
  await page.getByRole("button", { name: "Allow 198.51.100.7" }).first().click();
  const preview = page.getByLabel("New policy");
  await preview.getByText("+ allow 198.51.100.7").waitFor();
  await page.getByRole("dialog").getByLabel("Deny").fill("not a block");
  await page.getByRole("button", { name: "Apply" }).click();
  // The message is in the dialog, where it can be read and closed.
  await page.getByRole("dialog").locator(".notice", { hasText: "invalid denied CIDR" }).getByRole("button", { name: "Close the message" }).click();
  await page.getByRole("dialog").getByLabel("Deny").fill("");
  await page.getByRole("button", { name: "Apply" }).click();
  await page.getByRole("definition").getByText("198.51.100.7").waitFor();
  const { network } = await server.call("GET", `/sandboxes/${kept.sandbox.sandboxID}`);
  same(JSON.stringify(network.allowOut), '["198.51.100.7"]', "allowed");
  same(JSON.stringify(network.denyOut), '["0.0.0.0/0"]', "denied");
}

/** A page of a sandbox has the console's origin; it can neither frame the console nor hold its window. */
async function pages({ browser, server, kept }) {
  const web = `
import http.server
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("cross-origin-opener-policy", "same-origin")
        self.end_headers()
        self.wfile.write(b"<p>guest")
http.server.HTTPServer(("127.0.0.1", 8000), H).serve_forever()`;
  await server.write(kept.sandbox, "/opt/web.py", web);
  await server.exec(kept.sandbox, "setsid -f python3 /opt/web.py > /dev/null 2>&1");
  await until("the page is served", async () => (await server.exec(kept.sandbox, "ss -ltn")).includes(":8000"));
  const context = await browser.browser.newContext();
  try {
    const guest = await context.newPage();
    await guest.goto(`${server.url}/sandbox/${kept.sandbox.sandboxID}/8000/`);
    await guest.getByText("guest").waitFor();
    const [opened, reach] = await Promise.all([
      context.waitForEvent("page"),
      guest.evaluate(async () => {
        const window_ = window.open("/ui/");
        await new Promise((wake) => setTimeout(wake, 1500));
        try {
          return window_.closed ? "closed" : (window_.document.body?.textContent ?? "nothing");
        } catch (error) {
          return `refused: ${error.name}`;
        }
      }),
    ]);
    await opened.getByText("cube").first().waitFor();
    assert(!reach.includes("Sandboxes") && !reach.includes("API key"), `a page of a sandbox reads the console: ${reach}`);
    same(await opened.evaluate(() => window.opener), null, "opener of the console");
    const framed = await guest.evaluate(async () => {
      const frame = document.createElement("iframe");
      frame.src = "/ui/";
      document.body.append(frame);
      await new Promise((done) => (frame.onload = done));
      return frame.contentDocument?.getElementById("app")?.textContent ?? "";
    });
    same(framed, "", "the console in a frame");
  } finally {
    await context.close();
  }
}

export const cases = [
  ["results of cells run nothing and reach nothing", false, cells],
  ["a refusal without an end is not read to its end", false, endless],
  ["tables, charts and images are drawn", false, drawn],
  ["lines of the log are text", false, logs],
  ["a refusal appears as it happens", false, refusal],
  ["a refused host is allowed from its row", false, allowed],
  ["pages of sandboxes cannot reach the console", false, pages],
];
