// Files, both ways, and names that a guest chose.
import { createHash, randomBytes } from "node:crypto";
import { readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { assert, same } from "../until.mjs";

const SIZE = 10 * 1000 * 1000;
const sum = (bytes) => createHash("sha256").update(bytes).digest("hex");

async function bothWays({ browser, page, kept, server, results }) {
  const content = randomBytes(SIZE);
  const local = join(results, "ten-megabytes.bin");
  writeFileSync(local, content);
  await browser.go(`#/sandboxes/${kept.sandbox.sandboxID}/files`);
  await page.getByRole("button", { name: "Upload" }).waitFor();
  await page.getByLabel("Files to upload").setInputFiles(local);
  await page.getByText("Uploaded ten-megabytes.bin.").waitFor({ timeout: 60_000 });
  const inside = await server.exec(kept.sandbox, "sha256sum < /home/user/ten-megabytes.bin; stat -c %U /home/user/ten-megabytes.bin");
  same(inside.split(/\s+/)[0], sum(content), "the file in the sandbox");
  assert(inside.includes("user"), `owner: ${inside}`);
  const coming = page.waitForEvent("download");
  await page.getByRole("button", { name: "Download ten-megabytes.bin" }).click();
  const download = await coming;
  same(download.suggestedFilename(), "ten-megabytes.bin", "name of the download");
  same(sum(readFileSync(await download.path())), sum(content), "the file that came back");
  rmSync(local);
}

const NAMES = [
  "<img src=x onerror=document.title='pwned'>.txt",
  "\u202egpj.exe",
  "two\nlines",
  "e\u0301\u0301\u0301\u0301\u0301\u0301\u0301\u0301\u0301\u0301.txt",
  `${"w".repeat(240)}.txt`,
  "javascript:alert(1)",
  "..hidden",
];

async function names({ browser, page, kept, server }) {
  const quoted = NAMES.map((name) => `'/tmp/names/${name.replace(/'/g, "'\\''")}'`).join(" ");
  await server.exec(kept.sandbox, `mkdir -p /tmp/names && touch ${quoted} && ln -s 'javascript:alert(2)' /tmp/names/link && chmod -R a+rwX /tmp/names`);
  await browser.go(`#/sandboxes/${kept.sandbox.sandboxID}/files`);
  await page.getByRole("button", { name: "Root directory" }).click();
  await page.getByRole("button", { name: "tmp/" }).click();
  await page.getByRole("button", { name: "names/" }).click();
  await page.getByText("<img src=x onerror=").waitFor();
  const table = page.getByRole("group", { name: "Entries" });
  const text = await table.innerText();
  assert(!/[\u202e\u0000-\u0008\u200b]/.test(text), "a character that changes direction or hides is shown");
  same(await table.locator("img, a, script").count(), 0, "elements made of names");
  same(await browser.overflow(), 0, "pixels beyond the window");
  const coming = page.waitForEvent("download");
  await page.getByRole("button", { name: "Download ..hidden" }).click();
  assert(!(await coming).suggestedFilename().startsWith("."), "a hidden file is stored under its name");
}

async function changes({ page }) {
  await page.getByRole("button", { name: "New directory" }).click();
  await page.getByLabel("Name", { exact: true }).fill("made here");
  await page.getByRole("button", { name: "Make" }).click();
  await page.getByRole("button", { name: "made here/" }).waitFor();
  await page.getByRole("button", { name: "Remove made here" }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Remove" }).click();
  await page.getByRole("button", { name: "made here/" }).waitFor({ state: "detached" });
}

export const cases = [
  ["10 MB go in and come back", false, bothWays],
  ["names of files are text", false, names],
  ["directories are made and removed", false, changes],
];
