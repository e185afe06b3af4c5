// Every page in both themes and on a narrow screen: axe, width, a screenshot.
import { join } from "node:path";
import { assert, same, until } from "../until.mjs";

const PAGES = (id) => [
  ["overview", "#/", "Start ladder"],
  ["sandboxes", "#/sandboxes", "All sandboxes"],
  ["sandbox", `#/sandboxes/${id}`, "Last start"],
  ["terminal", `#/sandboxes/${id}/terminal`, "Terminal"],
  ["files", `#/sandboxes/${id}/files`, "Files"],
  ["logs", `#/sandboxes/${id}/logs`, "Log"],
  ["network", `#/sandboxes/${id}/network`, "Policy in force"],
  ["cells", `#/sandboxes/${id}/cells`, "Cells"],
  ["gone", "#/sandboxes/iaaaaaaaaaaaaaaaaaaa", "This sandbox does not exist"],
  ["templates", "#/templates", "All templates"],
  ["build", "#/templates/new", "What to build"],
  ["builds", "#/builds", "Builds of all templates"],
  ["snapshots", "#/snapshots", "Snapshots by origin"],
  ["events", "#/events", "Events of sandboxes"],
  ["webhooks", "#/webhooks", "All webhooks"],
  ["secrets", "#/secrets", "Names"],
  ["keys", "#/keys", "Keys of this server"],
  ["reports", "#/reports", "Runs"],
  ["nodes", "#/nodes", "This host"],
  ["nowhere", "#/nowhere", "No such page"],
];

async function settled(page, heading) {
  await page.getByRole("heading", { name: heading, exact: true }).waitFor();
  await until("the data of the page", async () => (await page.locator(".waiting").count()) === 0);
}

/** Starts from which the overview has quantiles. */
async function starts({ browser, page, server }) {
  await browser.go("#/");
  for (let at = 0; at < 12; at += 1) {
    const made = await server.create();
    await server.call("DELETE", `/sandboxes/${made.sandboxID}`);
  }
  await until("a median of starts", async () => /[≤>] [\d.]+ m?s/.test(await page.locator(".figures").innerText()));
  await page.getByRole("group", { name: "Start ladder" }).getByText("Agent ready").first().waitFor();
  await page.getByRole("img", { name: /^Starts a second\. starts: now/ }).waitFor();
}

function inTheme(theme) {
  return async ({ browser, page, kept, results }) => {
    await browser.setTheme(theme);
    const wrong = [];
    for (const [name, hash, heading] of PAGES(kept.sandbox.sandboxID)) {
      await browser.go(hash);
      await settled(page, heading);
      for (const finding of await browser.axe()) wrong.push(`${name}: ${finding}`);
      await browser.shot(join(results, `${name}-${theme}.png`));
    }
    await browser.go("#/sandboxes");
    await page.getByRole("button", { name: "New sandbox" }).first().click();
    await page.getByRole("dialog").getByLabel("Template").waitFor();
    for (const finding of await browser.axe()) wrong.push(`dialog: ${finding}`);
    await browser.shot(join(results, `dialog-${theme}.png`));
    await page.getByRole("button", { name: "Cancel" }).click();
    await browser.go(`#/sandboxes/${kept.sandbox.sandboxID}/network`);
    await page.getByRole("button", { name: "Change", exact: true }).click();
    await page.getByRole("dialog").getByLabel("Allow", { exact: true }).fill("pypi.org");
    for (const finding of await browser.axe()) wrong.push(`policy: ${finding}`);
    await browser.shot(join(results, `policy-${theme}.png`));
    await page.getByRole("button", { name: "Cancel" }).click();
    await page.keyboard.press("Control+k");
    // Before letters are typed, pages may fill the list.
    await page.getByRole("combobox").fill("base");
    await page.getByRole("option", { name: "base" }).first().waitFor();
    for (const finding of await browser.axe()) wrong.push(`palette: ${finding}`);
    await browser.shot(join(results, `palette-${theme}.png`));
    await page.keyboard.press("Escape");
    await page.getByRole("dialog").waitFor({ state: "detached" });
    assert(wrong.length === 0, `axe in the theme ${theme}:\n${[...new Set(wrong)].join("\n")}`);
  };
}

async function narrow({ browser, page, kept, results }) {
  await page.setViewportSize({ width: 360, height: 740 });
  const wide = [];
  for (const [name, hash, heading] of PAGES(kept.sandbox.sandboxID)) {
    await browser.go(hash);
    await settled(page, heading);
    const over = await browser.overflow();
    if (over) wide.push(`${name}: ${over} px`);
    await browser.shot(join(results, `${name}-narrow.png`));
  }
  await page.setViewportSize({ width: 1280, height: 860 });
  assert(wide.length === 0, `wider than the screen: ${wide.join(", ")}`);
}

/** Text in English on a page in Chinese, apart from what programs and people wrote, and from code. */
function english(page) {
  return page.evaluate(() => {
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const found = [];
    while (walker.nextNode()) {
      const { parentElement, data } = walker.currentNode;
      if (/[a-z]{2,} [a-z]{2,}/i.test(data) && !parentElement.closest(".guest, .mono, .id, .name, .log, .xterm, .cell-code, .cell-out, .cell-chart, .small, code, pre, option, textarea, script, noscript")) found.push(data);
    }
    return found;
  });
}

/** The choice outlives a reload. */
async function chinese({ browser, page, kept, results }) {
  await page.getByRole("button", { name: "中文" }).click();
  const wrong = [];
  for (const [name, hash] of PAGES(kept.sandbox.sandboxID)) {
    await browser.go(hash);
    await until("the data of the page", async () => (await page.locator("main h1").count()) === 1 && (await page.locator(".waiting").count()) === 0);
    wrong.push(...(await english(page)).map((text) => `${name}: ${text}`), ...(await browser.axe()).map((finding) => `${name}: ${finding}`));
    await browser.shot(join(results, `${name}-zh.png`));
  }
  await page.reload();
  await page.getByRole("link", { name: "沙箱", exact: true }).waitFor();
  same(await page.evaluate(() => document.documentElement.lang), "zh-CN", "language of the page");
  await page.getByRole("button", { name: "English" }).click();
  await page.getByRole("link", { name: "Sandboxes", exact: true }).waitFor();
  assert(wrong.length === 0, `in Chinese:\n${[...new Set(wrong)].join("\n")}`);
}

async function signIn({ browser, page, results }) {
  const wrong = [];
  await page.getByRole("button", { name: "Forget key" }).click();
  await page.getByLabel("API key").waitFor();
  for (const theme of ["light", "dark"]) {
    await browser.setTheme(theme);
    for (const finding of await browser.axe()) wrong.push(finding);
    await browser.shot(join(results, `sign-in-${theme}.png`));
  }
  assert(wrong.length === 0, wrong.join("\n"));
}

export const cases = [
  ["the overview counts starts and has their quantiles", false, starts],
  ["axe finds nothing in the light theme", false, inTheme("light")],
  ["axe finds nothing in the dark theme", false, inTheme("dark")],
  ["no page is wider than a narrow screen", false, narrow],
  ["every page is in Chinese, if it is chosen", false, chinese],
  ["the page that asks for a key has no findings", false, signIn],
];
