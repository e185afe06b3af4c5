// Templates, snapshots, secrets, keys, reports.
import { createServer } from "node:http";
import { mkdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { RECEIVER } from "../server.mjs";
import { assert, same } from "../until.mjs";

async function dockerfile({ browser, page }) {
  await browser.go("#/templates");
  await page.getByRole("link", { name: "base" }).first().waitFor();
  await page.getByRole("button", { name: "Build a template" }).click();
  await page.getByLabel("Name", { exact: true }).fill("mine");
  await page.getByLabel("Dockerfile", { exact: true }).fill("FROM debian:12\nCOPY . /srv\n");
  await page.getByRole("button", { name: "Build", exact: true }).click();
  await page.locator(".notice", { hasText: "Line 2: COPY needs files" }).getByRole("button", { name: "Close the message" }).click();
}

/** What the form shows at first builds on this server, which has neither a registry nor the internet. */
async function shown({ browser, page, server }) {
  await browser.go("#/templates");
  await page.getByRole("heading", { name: "Templates", exact: true }).waitFor();
  await browser.go("#/templates/new");
  await page.getByLabel("Name", { exact: true }).fill("as-shown");
  await page.getByText("or an installed template (base").waitFor();
  await page.getByRole("button", { name: "Build", exact: true }).click();
  await page.getByRole("heading", { name: "Build of as-shown" }).waitFor();
  await page.locator(".head .badge", { hasText: "ready" }).waitFor({ timeout: 120_000 });
  const made = await server.create({ templateID: "as-shown" });
  same(await server.exec(made, "cat /home/user/app/greeting.txt"), "hello from the build\n", "file of the build");
  await server.call("DELETE", `/sandboxes/${made.sandboxID}`);
}

/** The plain name means the build of an earlier tag again; the build that it meant keeps one. */
async function rolledBack({ browser, page, server }) {
  const [one] = (await server.call("GET", "/templates")).filter((it) => it.aliases.includes("as-shown"));
  const tags = async () => Object.fromEntries((await server.call("GET", `/templates/${one.templateID}/tags`)).map((tag) => [tag.tag, tag.buildID]));
  await browser.go(`#/templates/${one.templateID}`);
  await page.getByLabel("New tag").fill("v1");
  await page.getByRole("button", { name: "Assign" }).click();
  await page.getByRole("group", { name: "Tags" }).getByText("v1").waitFor();
  const first = (await tags()).default;
  // A new build takes only the plain name. "Build again" would take over v1, too, because it replaces its build.
  await browser.go("#/templates/new");
  await page.getByLabel("Name", { exact: true }).fill("as-shown");
  await page.getByRole("button", { name: "Build", exact: true }).click();
  await page.getByRole("heading", { name: "Build of as-shown" }).waitFor();
  await page.locator(".head .badge", { hasText: "ready" }).waitFor({ timeout: 120_000 });
  const second = (await tags()).default;
  assert(first !== second, "the second build has not the plain name");
  await browser.go(`#/templates/${one.templateID}`);
  await page.getByRole("button", { name: "Roll back to v1" }).click();
  await page.getByLabel("Tag for the present build").fill("v2");
  await page.getByRole("dialog").getByRole("button", { name: "Roll back" }).click();
  await page.getByText("as-shown is now the build of v1.").waitFor();
  same(JSON.stringify(await tags()), JSON.stringify({ default: first, v1: first, v2: second }), "tags");
}

async function buildsOfAll({ browser, page }) {
  await browser.go("#/builds");
  await page.getByLabel("State").selectOption("error");
  const row = page.getByRole("row", { name: /fails/ });
  await row.getByRole("link").last().click();
  await page.getByRole("heading", { name: "Build of fails" }).waitFor();
  await page.locator(".log > div").first().waitFor();
}

async function failed({ browser, page }) {
  await browser.go("#/templates/new");
  await page.getByLabel("Name", { exact: true }).fill("fails");
  await page.getByLabel("Dockerfile", { exact: true }).fill("FROM base\nRUN exit 3\n");
  await page.getByRole("button", { name: "Build", exact: true }).click();
  await page.locator(".head .badge", { hasText: "error" }).waitFor({ timeout: 120_000 });
  await browser.go("#/templates");
  await page.getByRole("row", { name: /fails.*error/ }).waitFor();
}

async function build({ browser, page, server }) {
  await browser.go("#/templates/new");
  await page.getByLabel("Name", { exact: true }).fill("mine:v1");
  await page.getByLabel("Begins with").selectOption("template");
  await page.getByLabel("Template", { exact: true }).fill("base");
  await page.getByRole("button", { name: "Build", exact: true }).click();
  await page.locator(".log > div").first().waitFor();
  await page.locator(".head .badge", { hasText: "ready" }).waitFor({ timeout: 120_000 });
  const lines = await page.locator(".log > div").count();
  assert(lines >= 2, `${lines} lines of the build's log`);
  await page.getByRole("link", { name: "Template", exact: true }).click();
  await page.getByRole("group", { name: "Tags" }).getByText("v1").waitFor();
  const [mine] = (await server.call("GET", "/templates")).filter((one) => one.aliases.includes("mine"));
  assert(mine.storedBytes > 0, "the template has no size on disk");
}

/** A template of a build can be deleted, that of the operator cannot. */
async function deletions({ browser, page, server }) {
  const all = await server.call("GET", "/templates");
  for (const [name, buttons] of [
    ["mine", 1],
    ["base", 0],
  ]) {
    await browser.go(`#/templates/${all.find((one) => one.aliases.includes(name)).templateID}`);
    await page.getByRole("heading", { name: "Builds" }).waitFor();
    same(await page.getByRole("button", { name: "Delete", exact: true }).count(), buttons, `buttons that delete ${name}`);
  }
}

async function snapshots({ browser, page, kept }) {
  await browser.go("#/snapshots");
  const tree = page.getByRole("list", { name: "Snapshots by their origin" });
  const branch = tree.locator("li", { has: page.getByRole("link", { name: kept.sandbox.sandboxID }) }).last();
  await branch.getByText("seen").waitFor();
  await tree.getByRole("link", { name: "base" }).waitFor();
}

async function secrets({ browser, page, server }) {
  await browser.go("#/secrets");
  await page.getByText("No secrets").waitFor();
  await page.getByRole("button", { name: "New secret" }).click();
  const dialog = page.getByRole("dialog");
  const save = dialog.getByRole("button", { name: "Save" });
  await dialog.getByLabel("Name").fill("token-of-mine");
  await dialog.getByLabel("Value").fill("never-shown");
  await dialog.getByLabel("Hosts").fill("api.test, *.api.test");
  await dialog.getByLabel("Metadata").fill("no pair");
  await save.click();
  await dialog.locator(".notice", { hasText: "Line 1 is not NAME=value." }).getByRole("button", { name: "Close the message" }).click();
  await dialog.getByLabel("Metadata").fill("owner=me = us");
  await save.click();
  await page.getByText("Stored version 1 of token-of-mine.").waitFor();
  await page.getByRole("row", { name: /token-of-mine.*\*\.api\.test, api\.test.*owner=me = us/ }).waitFor();
  await page.getByRole("button", { name: "Edit token-of-mine" }).click();
  await dialog.getByLabel("Value").fill("second-value");
  await dialog.getByLabel("Hosts").fill("api.test");
  await save.click();
  await page.getByText("Stored version 2 of token-of-mine.").waitFor();
  const [made] = await server.call("GET", "/secrets");
  same(JSON.stringify([made.hosts, made.metadata]), '[["api.test"],{"owner":"me = us"}]', "hosts and metadata");
  assert(!/never-shown|second-value/.test(await page.content()), "a value is in the page");
  await page.getByRole("button", { name: "Delete token-of-mine" }).click();
  await dialog.getByRole("button", { name: "Delete" }).click();
  await page.getByText("No secrets").waitFor();
  await server.call("POST", "/secrets", { name: "token-of-mine", value: "never-shown" });
}

/** While the pointer is on the rows, none of them moves; newer ones are shown when it leaves. */
async function still({ browser, page, server }) {
  await browser.go("#/sandboxes");
  const first = page.getByRole("group", { name: "Sandboxes" }).locator("tbody tr").first();
  const id = await first.getByRole("link").innerText();
  await first.hover();
  const made = await server.create();
  await page.getByRole("button", { name: "Show newer" }).waitFor({ timeout: 20_000 });
  same(await first.getByRole("link").innerText(), id, "the row under the pointer");
  await page.mouse.move(0, 0);
  await page.getByRole("link", { name: made.sandboxID }).waitFor();
  await server.call("DELETE", `/sandboxes/${made.sandboxID}`);
}

/** Events arrive at a receiver of this test, which refuses the first. */
async function webhooks({ browser, page, server, kept }) {
  const receiver = createServer((request, response) => {
    receiver.taken = (receiver.taken ?? 0) + 1;
    response.statusCode = receiver.taken === 1 ? 500 : 204;
    request.resume().on("end", () => response.end());
  });
  const [host, port] = RECEIVER.split(":");
  await new Promise((done) => receiver.listen(Number(port), host, done));
  try {
    await browser.go("#/webhooks");
    await page.getByRole("button", { name: "New webhook" }).click();
    const dialog = page.getByRole("dialog");
    await dialog.getByLabel("Name").fill("mine");
    await dialog.getByLabel("URL").fill(`http://${RECEIVER}/cube`);
    await dialog.getByLabel("paused").uncheck();
    assert((await dialog.getByLabel("Secret for signatures").inputValue()).length === 48, "no secret is made");
    await dialog.getByRole("button", { name: "Save" }).click();
    await page.getByRole("row", { name: /mine.*enabled/ }).getByRole("link").click();
    await page.getByText("No deliveries").waitFor();
    await server.call("POST", `/sandboxes/${kept.sandbox.sandboxID}/timeout`, { timeout: 3600 });
    const shown = page.getByRole("group", { name: "Deliveries" });
    await shown.getByRole("link", { name: kept.sandbox.sandboxID }).first().waitFor({ timeout: 30_000 });
    await page.getByRole("button", { name: "Disable" }).click();
    await page.locator(".head .badge", { hasText: "disabled" }).waitFor();
    await page.getByRole("button", { name: "Edit" }).click();
    await dialog.getByLabel("Name").fill("renamed");
    await dialog.getByRole("button", { name: "Save" }).click();
    await page.getByRole("heading", { name: "renamed" }).waitFor();
    const [hook] = await server.call("GET", "/events/webhooks");
    same(JSON.stringify([hook.name, hook.enabled, hook.events.length]), '["renamed",false,6]', "the webhook");
  } finally {
    receiver.close();
  }
}

async function events({ browser, page, kept }) {
  await browser.go("#/events");
  const table = page.getByRole("group", { name: "Events" });
  await table.getByRole("link", { name: kept.sandbox.sandboxID }).first().waitFor();
  await page.getByLabel("Sandbox", { exact: true }).fill(kept.sandbox.sandboxID);
  await page.getByLabel("Event", { exact: true }).selectOption("paused");
  await table.getByText("created", { exact: true }).first().waitFor({ state: "detached" });
  await table.getByText("paused", { exact: true }).first().waitFor();
  same(await table.locator("tbody tr").filter({ hasNotText: kept.sandbox.sandboxID }).count(), 0, "events of other sandboxes");
}

async function keys({ browser, page, server }) {
  await browser.go("#/keys");
  await page.getByRole("cell", { name: "console", exact: true }).waitFor();
  await page.getByText("metrics:read").waitFor();
  const shown = await server.call("GET", "/api-keys");
  same(shown.length, 2, "keys");
  assert(!JSON.stringify(shown).includes(server.key) && !("sha256" in shown[0]), "a key or its hash is in the answer");
}

function report(p50, started) {
  const times = { n: 200, failed: 0, p50_ms: p50, p95_ms: p50 * 2, p99_ms: null, max_ms: p50 * 3 };
  return { format: 3, scenario: "fifty <b>", started_unix_ms: started, ended: "complete", exit_code: 0, host: { grade: "publishable", commit: "0123456789abcdef" }, phases: { first_exec: times }, gates: [] };
}

async function reports({ browser, page, results, server }) {
  for (const [name, p50] of [
    ["run-a", 10],
    ["run-b", 12],
  ]) {
    mkdirSync(join(server.reports, name));
    writeFileSync(join(server.reports, name, "report.json"), JSON.stringify(report(p50, 1.6e12 + p50)));
  }
  await browser.go("#/reports");
  await page.getByText("No report is open").waitFor();
  for (const name of ["run-a", "run-b"]) await page.getByRole("button", { name: `Compare ${name}` }).click();
  await page.getByText("× 1.20").waitFor();
  await page.getByRole("button", { name: "Compare run-a", pressed: true }).click();
  await page.getByText("× 1.20").waitFor({ state: "detached" });
  await page.getByRole("button", { name: "Close all" }).click();
  for (const [name, p50, at] of [
    ["one.json", 10, 1.7e12],
    ["two.json", 15, 1.8e12],
  ]) {
    const path = join(results, name);
    writeFileSync(path, JSON.stringify(report(p50, at)));
    await page.getByLabel("Reports", { exact: true }).setInputFiles(path);
  }
  await page.getByText("× 1.50").waitFor();
  const wrong = join(results, "wrong.json");
  writeFileSync(wrong, JSON.stringify({ format: 99 }));
  await page.getByLabel("Reports", { exact: true }).setInputFiles(wrong);
  await page.locator(".notice", { hasText: "wrong.json is no report of format 3." }).getByRole("button", { name: "Close the message" }).click();
}

export const cases = [
  ["a Dockerfile that needs files is refused with its line", false, dockerfile],
  ["the Dockerfile that is shown builds", false, shown],
  ["a template is rolled back to an earlier tag", false, rolledBack],
  ["a failed build has a name", false, failed],
  ["all builds are on one page, with a log", false, buildsOfAll],
  ["a template is built, its log read as it comes", false, build],
  ["only templates that clients made can be deleted", false, deletions],
  ["snapshots are a tree", false, snapshots],
  ["secrets are made, changed and deleted", false, secrets],
  ["webhooks are made and changed, and show their deliveries", false, webhooks],
  ["rows under the pointer stay where they are", false, still],
  ["events are filtered", false, events],
  ["keys are names and scopes", false, keys],
  ["reports are compared", false, reports],
];
