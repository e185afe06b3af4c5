// Opening the console: its first paint, its headers, its key.
import { assert, same } from "../until.mjs";

async function firstPaint({ browser, page }) {
  let release;
  const held = new Promise((done) => (release = done));
  await page.route("**/teams", async (route) => {
    await held;
    await route.continue();
  });
  await page.goto(`${browser.url}/ui/`);
  await page.getByRole("link", { name: "Sandboxes" }).first().waitFor();
  const paint = await page.evaluate(() => performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? 0);
  assert(paint < 5000, `first paint after ${paint} ms`);
  release();
  await page.getByLabel("API key").waitFor();
  await page.unroute("**/teams");
}

async function wrongKey({ page }) {
  await page.getByLabel("API key").fill("e2b_0000");
  await page.getByRole("button", { name: "Open the console" }).click();
  await page.getByText("unknown or revoked").waitFor();
}

async function narrowKey({ server, page }) {
  await page.getByLabel("API key").fill(server.narrowKey);
  await page.getByRole("button", { name: "Open the console" }).click();
  await page.getByText("This key may not read the server's figures").waitFor();
  await page.getByRole("button", { name: "Forget key" }).click();
  await page.getByLabel("API key").waitFor();
}

async function rightKey({ server, page, browser }) {
  await page.getByLabel("API key").fill(server.key);
  await page.keyboard.press("Enter");
  await page.getByRole("button", { name: "Forget key" }).waitFor();
  await browser.go("#/");
  await page.getByRole("heading", { name: "Overview" }).waitFor();
  await page.getByRole("heading", { name: "Memory" }).waitFor();
}

/** A reload keeps the key, in two halves: neither storage nor the page has it. */
async function keyAfterReload({ server, page, browser }) {
  await browser.go("#/keys");
  await page.reload();
  await page.getByRole("heading", { name: "Keys of this server" }).waitFor();
  await hasNoKey({ server, page, browser });
  // Another page of this origin in the same tab, as pages of sandboxes by path are.
  browser.watches = false;
  await page.goto(`${server.url}/health`);
  const seen = await page.evaluate(() => JSON.stringify([history.state, { ...sessionStorage }, { ...localStorage }]));
  assert(seen.includes("cube-key-pad") && seen.startsWith("[null") && !seen.includes(server.key), `another page sees ${seen}`);
  await page.goBack();
  browser.watches = true;
  await page.getByRole("heading", { name: "Keys of this server" }).waitFor();
}

/** After "Forget key", no entry of the tab's history has it. */
async function forgotten({ server, page, browser }) {
  await browser.go("#/secrets");
  await page.getByRole("heading", { name: "Secrets", exact: true }).waitFor();
  await page.getByRole("button", { name: "Forget key" }).click();
  await page.getByLabel("API key").waitFor();
  await page.goBack();
  await page.reload();
  await page.getByLabel("API key").waitFor();
  await rightKey({ server, page, browser });
}

/** The key is neither in the address nor in storage. */
async function hasNoKey({ server, page, browser }) {
  const kept = await page.evaluate(() => JSON.stringify([location.href, document.cookie, { ...localStorage }, { ...sessionStorage }, document.documentElement.outerHTML]));
  assert(!kept.includes(server.key), "the key is stored or shown");
  same((await browser.context.cookies()).length, 0, "cookies");
}

async function headers({ server }) {
  const page = await fetch(`${server.url}/ui/`);
  const policy = page.headers.get("content-security-policy");
  for (const part of ["default-src 'none'", "script-src 'self'", "connect-src 'self'", "frame-ancestors 'none'", "require-trusted-types-for 'script'"]) {
    assert(policy.includes(part), `the policy lacks ${part}: ${policy}`);
  }
  assert(!/unsafe|\*|https?:|blob:/.test(policy), policy);
  same(page.headers.get("cross-origin-opener-policy"), "same-origin", "opener policy");
  const again = await fetch(`${server.url}/ui/`);
  assert(policy !== again.headers.get("content-security-policy"), "two answers have one nonce");
  same((await fetch(`${server.url}/ui/..%2fkeys.json`)).status, 404, "a path out of the console");
}

async function ofBrowser({ browser }) {
  const context = await browser.browser.newContext({ locale: "zh-CN" });
  try {
    const page = await context.newPage();
    await page.goto(`${browser.url}/ui/`);
    await page.getByRole("heading", { name: "登录此服务器" }).waitFor();
  } finally {
    await context.close();
  }
}

async function keyboard({ page }) {
  await page.locator("body").press("Tab");
  for (let steps = 0; steps < 3; steps += 1) {
    const first = await page.evaluate(() => document.activeElement?.textContent?.trim());
    if (first?.startsWith("Skip")) break;
    await page.keyboard.press("Shift+Tab");
  }
  await page.evaluate(() => document.querySelector(".skip").focus());
  await page.keyboard.press("Enter");
  same(await page.evaluate(() => document.activeElement?.id), "main", "focus after the skip link");
  await page.evaluate(() => (location.hash = "#/sandboxes"));
  await page.getByRole("button", { name: "New sandbox" }).first().focus();
  await page.keyboard.press("Enter");
  await page.getByRole("dialog").waitFor();
  const inside = await page.evaluate(() => document.activeElement?.closest("dialog") !== null);
  assert(inside, "the focus is not in the dialog");
  await page.keyboard.press("Escape");
  await page.getByRole("dialog").waitFor({ state: "detached" });
}

export const cases = [
  ["the first paint waits for no data", true, firstPaint],
  ["a wrong key is refused with the reason", false, wrongKey],
  ["a key without metrics:read says so", false, narrowKey],
  ["the right key opens the overview", true, rightKey],
  ["the key is in no storage", false, hasNoKey],
  ["a reload keeps the key, where no other page finds it", false, keyAfterReload],
  ["a forgotten key does not come back", true, forgotten],
  ["the page has a strict policy", false, headers],
  ["the console has the language of the browser", false, ofBrowser],
  ["everything is reached by keyboard", false, keyboard],
];
