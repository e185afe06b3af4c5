// The life of a sandbox by the console's buttons.
import { assert, same, until } from "../until.mjs";

const idOf = (page) => page.evaluate(() => location.hash.split("/")[2]);

async function create({ browser, page, server, kept }) {
  await browser.go("#/sandboxes");
  await page.getByRole("button", { name: "New sandbox" }).first().click();
  await page.getByRole("dialog").getByLabel("Template").waitFor();
  await page.getByRole("dialog").getByLabel("Timeout, minutes").fill("60");
  await page.getByRole("dialog").getByLabel("Outbound network").selectOption("none");
  await page.getByRole("button", { name: "Start", exact: true }).click();
  await page.getByText("connected", { exact: true }).waitFor();
  const id = await idOf(page);
  const detail = await server.call("GET", `/sandboxes/${id}`);
  kept.sandbox = detail;
  same(detail.state, "running", "state");
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

async function kill({ browser, page, kept, server }) {
  await browser.go(`#/sandboxes/${kept.fork.sandboxID}`);
  await page.getByRole("button", { name: "Kill" }).click();
  await page.getByRole("dialog").getByRole("button", { name: /^Kill / }).click();
  await page.getByRole("heading", { name: "Sandboxes", exact: true }).waitFor();
  const left = await server.call("GET", "/v2/sandboxes");
  assert(!left.some((one) => one.sandboxID === kept.fork.sandboxID), "the fork lives");
  await browser.go(`#/sandboxes/${kept.fork.sandboxID}`);
  await page.getByText("It has ended, or never was").waitFor();
}

export const cases = [
  ["a sandbox is created", true, create],
  ["its start and its figures are shown", false, details],
  ["it is found by a part of its id", false, search],
  ["it is paused and resumed", false, pauseAndResume],
  ["it is forked", false, fork],
  ["a snapshot is taken", false, snapshot],
  ["a sandbox is killed after a question", false, kill],
];
