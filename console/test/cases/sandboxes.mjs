// The life of a sandbox by the console's buttons.
import { assert, same, until } from "../until.mjs";

const idOf = (page) => page.evaluate(() => location.hash.split("/")[2]);

async function create({ browser, page, server, kept }) {
  await browser.go("#/sandboxes");
  await page.getByRole("button", { name: "New sandbox" }).first().click();
  await page.getByRole("dialog").getByLabel("Template").waitFor();
  await page.getByRole("dialog").getByLabel("Timeout, minutes").fill("60");
  await page.getByRole("dialog").getByLabel("Outbound network").selectOption("nothing");
  await page.getByRole("button", { name: "Start", exact: true }).click();
  await page.getByText("connected", { exact: true }).waitFor();
  const id = await idOf(page);
  const detail = await server.call("GET", `/sandboxes/${id}`);
  kept.sandbox = detail;
  same(detail.state, "running", "state");
}

/** All that can be asked for at the creation. */
async function withAll({ browser, page, server }) {
  await browser.go("#/sandboxes");
  await page.getByRole("button", { name: "New sandbox" }).first().click();
  const dialog = page.getByRole("dialog");
  await dialog.getByLabel("Template").waitFor();
  await dialog.getByLabel("At the timeout").selectOption("pause");
  await dialog.getByLabel("Outbound network").selectOption("nothing");
  await dialog.getByText("Exceptions and header rules").click();
  await dialog.getByLabel("Allow", { exact: true }).fill("api.test");
  await dialog.getByLabel("Added headers").fill("api.test");
  await dialog.getByText("Metadata and environment").click();
  await dialog.getByLabel("Metadata").fill("owner=me\npurpose=a=b");
  await dialog.getByLabel("Environment variables").fill("GREETING=hello there");
  const start = dialog.getByRole("button", { name: "Start", exact: true });
  await start.click();
  await dialog.locator(".notice", { hasText: "Line 1 is not HOST HEADER: VALUE." }).getByRole("button", { name: "Close the message" }).click();
  await dialog.getByLabel("Added headers").fill("api.test X-One: 1\napi.test X-Two: ${e2b.secrets.two}");
  await start.click();
  await page.getByText("connected", { exact: true }).waitFor();
  const made = await server.call("GET", `/sandboxes/${await idOf(page)}`);
  same(JSON.stringify(made.metadata), '{"owner":"me","purpose":"a=b"}', "metadata");
  same(made.lifecycle.onTimeout, "pause", "at the timeout");
  same(JSON.stringify([made.network.allowOut, made.network.denyOut]), '[["api.test"],["0.0.0.0/0"]]', "network");
  same(JSON.stringify(made.network.rules["api.test"][0].transform.headers), '{"X-One":"1","X-Two":"${e2b.secrets.two}"}', "headers");
  same(await server.exec(made, "echo $GREETING"), "hello there\n", "environment");
  await server.call("DELETE", `/sandboxes/${made.sandboxID}`);
}

async function details({ browser, page, kept }) {
  await browser.go(`#/sandboxes/${kept.sandbox.sandboxID}`);
  await page.getByText("Agent ready").waitFor();
  await page.getByText(/^\d+\.\d+ ms$/).first().waitFor();
  await page.getByRole("img", { name: /^CPU\. CPU: now/ }).waitFor();
}

async function search({ browser, page, kept }) {
  await browser.go("#/sandboxes");
  const row = page.getByRole("link", { name: kept.sandbox.sandboxID });
  await row.waitFor();
  await page.getByLabel("Search").fill("zzz");
  await page.getByText("Nothing matches").waitFor();
  await page.getByLabel("Search").fill(kept.sandbox.sandboxID.slice(3, 12));
  await row.click();
  await page.getByRole("heading", { name: kept.sandbox.sandboxID }).waitFor();
}

async function pauseAndResume({ browser, page, kept, server }) {
  await browser.go(`#/sandboxes/${kept.sandbox.sandboxID}`);
  await page.getByRole("button", { name: "Pause" }).click();
  await page.locator(".head .badge", { hasText: "paused" }).waitFor();
  await browser.go(`#/sandboxes/${kept.sandbox.sandboxID}/files`);
  await page.locator(".empty-title", { hasText: "The sandbox is paused" }).waitFor();
  await page.locator(".empty").getByRole("button", { name: "Resume" }).click();
  await page.locator(".head .badge", { hasText: "running" }).waitFor();
  same((await server.call("GET", `/sandboxes/${kept.sandbox.sandboxID}`)).state, "running", "state");
}

async function fork({ browser, page, kept, server }) {
  await server.exec(kept.sandbox, "echo before the fork > /tmp/mark");
  await browser.go(`#/sandboxes/${kept.sandbox.sandboxID}`);
  await page.getByRole("button", { name: "Fork" }).click();
  const id = await until("the page of the fork", async () => {
    const now = await idOf(page);
    return now !== kept.sandbox.sandboxID && now;
  });
  await page.getByRole("heading", { name: id }).waitFor();
  const made = await server.call("GET", `/sandboxes/${id}`);
  same((await server.exec(made, "cat /tmp/mark")).trim(), "before the fork", "a file of the source");
  kept.fork = made;
}

/** A page that is used while a task runs stays where it is. */
async function undisturbed({ browser, page, kept, server }) {
  await browser.go(`#/sandboxes/${kept.sandbox.sandboxID}`);
  let release;
  const held = new Promise((done) => (release = done));
  await page.route("**/fork", async (route) => {
    await held;
    await route.continue();
  });
  await page.getByRole("button", { name: "Fork" }).click();
  await page.getByRole("button", { name: "Timeout" }).click();
  release();
  await page.getByRole("dialog").getByText(/^Forked: /).waitFor({ timeout: 60_000 });
  await page.getByRole("dialog").getByRole("heading", { name: "Set the timeout" }).waitFor();
  same(await idOf(page), kept.sandbox.sandboxID, "the page");
  await page.unroute("**/fork");
  const href = await page.getByRole("dialog").getByRole("link", { name: "Open" }).getAttribute("href");
  await server.call("DELETE", `/sandboxes/${href.split("/").at(-1)}`);
  for (let left = await page.locator(".notice").count(); left > 0; left -= 1) await page.getByRole("button", { name: "Close the message" }).first().click();
  // Limits are in the units of the field.
  await page.getByRole("dialog").getByLabel("Minutes from now").fill("99999999");
  for (let times = 0; times < 2; times += 1) {
    await page.getByRole("button", { name: "Set", exact: true }).click();
    await page.getByText("The longest timeout on this server is 24 hr (1,440 minutes).").waitFor();
  }
  same(await page.locator(".notice").count(), 1, "messages");
  await page.getByRole("button", { name: "Close the message" }).click();
  await page.getByRole("button", { name: "Cancel" }).click();
}

async function ports({ browser, page, kept, server }) {
  await server.exec(kept.sandbox, "setsid -f python3 -m http.server 8123 > /dev/null 2>&1");
  await until("the program listens", async () => (await server.exec(kept.sandbox, "ss -ltn")).includes(":8123"));
  await browser.go(`#/sandboxes/${kept.sandbox.sandboxID}`);
  // The page may be open since before the program listened: it looks when it is opened, and when it is told to.
  await page.getByRole("button", { name: "Reload", exact: true }).click();
  const href = await page.getByRole("link", { name: "Open port 8123" }).getAttribute("href");
  assert((await (await fetch(new URL(href, browser.url))).text()).includes("Directory listing"), `nothing at ${href}`);
}

/** Ctrl-K finds pages, sandboxes and templates. */
async function palette({ browser, page, kept, server }) {
  const made = await server.create({ metadata: { owner: "palette-test" } });
  await browser.go("#/keys");
  await page.getByRole("heading", { name: "Keys", exact: true }).waitFor();
  for (const [typed, heading] of [
    ["snap", "Snapshots"],
    ["palette-test", made.sandboxID],
    [kept.sandbox.sandboxID.slice(4, 14), kept.sandbox.sandboxID],
    ["base template", "base"],
  ]) {
    await page.keyboard.press("Control+k");
    await page.getByRole("combobox").fill(typed);
    await page.getByRole("option", { name: heading }).first().waitFor();
    await page.keyboard.press("Enter");
    await page.getByRole("dialog").waitFor({ state: "detached" });
    await page.getByRole("heading", { name: heading, exact: true }).waitFor();
  }
  await server.call("DELETE", `/sandboxes/${made.sandboxID}`);
}

async function snippets({ browser, page, kept }) {
  await browser.go(`#/sandboxes/${kept.sandbox.sandboxID}`);
  await page.getByRole("button", { name: "Copy the id" }).click();
  const copied = () => page.evaluate(() => navigator.clipboard.readText());
  await until("the id in the clipboard", async () => (await copied()) === kept.sandbox.sandboxID);
  await page.getByRole("button", { name: "Copy the Python snippet" }).click();
  await until("the snippet", async () => (await copied()).endsWith(`Sandbox.connect("${kept.sandbox.sandboxID}")`));
}

async function snapshot({ browser, page, kept, server }) {
  await browser.go(`#/sandboxes/${kept.sandbox.sandboxID}`);
  await page.getByRole("heading", { name: kept.sandbox.sandboxID }).waitFor();
  await page.getByRole("button", { name: "Snapshot" }).click();
  await page.getByLabel("Name (optional)").fill("seen");
  await page.getByRole("button", { name: "Take" }).click();
  await page.getByText("Snapshot seen is ready.").waitFor({ timeout: 60_000 });
  const [made] = await server.call("GET", "/snapshots");
  same(made.sourceSandboxID, kept.sandbox.sandboxID, "source of the snapshot");
  assert(made.storedBytes > 0, "the snapshot has no size");
}

async function fromSnapshot({ browser, page, kept, server }) {
  await server.exec(kept.sandbox, "rm -f /tmp/mark");
  await browser.go("#/snapshots");
  await page.getByRole("button", { name: /^Start a sandbox from the snapshot seen/ }).click();
  await page.getByRole("dialog").getByLabel("Template").waitFor();
  await page.getByRole("button", { name: "Start", exact: true }).click();
  await page.getByText("connected", { exact: true }).waitFor({ timeout: 60_000 });
  const made = await server.call("GET", `/sandboxes/${await idOf(page)}`);
  same((await server.exec(made, "cat /tmp/mark")).trim(), "before the fork", "a file of the snapshot");
  await server.call("DELETE", `/sandboxes/${made.sandboxID}`);
  // Its last output stays readable.
  await page.getByRole("heading", { name: "Last output" }).waitFor();
}

async function kill({ browser, page, kept, server }) {
  await browser.go(`#/sandboxes/${kept.fork.sandboxID}`);
  await page.getByRole("button", { name: "Kill" }).click();
  await page.getByRole("dialog").getByRole("button", { name: /^Kill / }).click();
  await page.getByRole("heading", { name: "Sandboxes", exact: true }).waitFor();
  const left = await server.call("GET", "/v2/sandboxes");
  assert(!left.some((one) => one.sandboxID === kept.fork.sandboxID), "the fork lives");
  await browser.go(`#/sandboxes/${kept.fork.sandboxID}`);
  const events = page.getByRole("group", { name: "Events" });
  await events.getByText("ended", { exact: true }).waitFor();
  await events.getByText(/ran for /).waitFor();
  await browser.go("#/sandboxes");
  await page.getByLabel("State").selectOption("ended");
  await page.getByRole("link", { name: kept.fork.sandboxID }).waitFor();
}

export const cases = [
  ["a sandbox is created", true, create],
  ["a sandbox is created with metadata, variables and rules", false, withAll],
  ["its start and its figures are shown", false, details],
  ["it is found by a part of its id", false, search],
  ["it is paused and resumed", false, pauseAndResume],
  ["it is forked", false, fork],
  ["a task that ends late moves no page that is in use", false, undisturbed],
  ["open ports have links", false, ports],
  ["pages, sandboxes and templates are found by letters", false, palette],
  ["id and code to connect are copied", false, snippets],
  ["a snapshot is taken", false, snapshot],
  ["a sandbox is started from the snapshot", false, fromSnapshot],
  ["a sandbox is killed after a question, and its events stay", false, kill],
];
