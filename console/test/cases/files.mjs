// Files, both ways, and names that a guest chose.
import { createHash, randomBytes } from "node:crypto";
import { readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { assert, same, until } from "../until.mjs";

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

/** Windows takes CON for a device; a long name keeps its ending. */
async function savedAs({ page, kept, server }) {
  await server.exec(kept.sandbox, `touch /tmp/names/con.txt "/tmp/names/dots. ." /tmp/names/$(printf 'l%.0s' $(seq 200)).tar`);
  await page.getByRole("button", { name: "Reload" }).click();
  for (const [shown, stored] of [
    ["Download con.txt", /^_con\.txt$/],
    ["Download dots. .", /^dots_$/],
    ["Download lll", /^l{100}\.tar$/],
    ["Download <img", /^_img src=x[^<>:"/\\|?*]*\.txt$/],
  ]) {
    const coming = page.waitForEvent("download");
    await page.getByRole("button", { name: shown }).click();
    const name = (await coming).suggestedFilename();
    assert(stored.test(name), `${shown} is stored as ${name}`);
  }
}

/** Text and pictures are shown, small text can be changed, and not over what the sandbox has changed meanwhile. */
async function viewed({ browser, page, kept, server, results }) {
  const png = "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAEUlEQVR4nGP4z8AARAxg8j8AG/ID/fPnS7EAAAAASUVORK5CYII=";
  const files = "mkdir -p /home/user/seen && cd /home/user/seen && printf '<b>one</b>\\n\\342\\200\\256two\\n' > a.txt && echo one > b.txt && head -c 64 /dev/zero > zero.bin";
  await server.exec(kept.sandbox, `${files} && echo ${png} | base64 -d > dot.png && chown -R user /home/user/seen`);
  await browser.go(`#/sandboxes/${kept.sandbox.sandboxID}/logs`);
  await browser.go(`#/sandboxes/${kept.sandbox.sandboxID}/files`);
  await page.getByRole("button", { name: "seen/" }).click();
  const dialog = page.getByRole("dialog");
  const content = dialog.getByLabel("Content of the file");
  const open = (name) => page.getByRole("button", { name, exact: true }).click();
  const close = () => dialog.getByRole("button", { name: "Close", exact: true }).click();
  await open("dot.png");
  await until("the picture is drawn", () => dialog.locator("img").evaluate((image) => image.naturalWidth === 2));
  await close();
  await open("zero.bin");
  await dialog.getByText("Neither text nor a picture").waitFor();
  await close();
  await open("a.txt");
  const text = await content.innerText();
  assert(text.includes("<b>one</b>") && !text.includes("\u202e"), `the text is ${text}`);
  same(await dialog.getByRole("button", { name: "Edit" }).count(), 0, "buttons that edit what is not shown as it is");
  await browser.shot(join(results, "file.png"));
  await close();
  const change = async () => {
    await open("b.txt");
    await dialog.getByRole("button", { name: "Edit" }).click();
    await content.fill("three\n");
  };
  await change();
  await server.exec(kept.sandbox, "echo other > /home/user/seen/b.txt");
  await dialog.getByRole("button", { name: "Save" }).click();
  await dialog.locator(".notice", { hasText: "changed in the sandbox meanwhile" }).getByRole("button", { name: "Close the message" }).click();
  await dialog.getByRole("button", { name: "Cancel" }).click();
  await change();
  await dialog.getByRole("button", { name: "Save" }).click();
  await page.getByText("Saved b.txt.").waitFor();
  same(await server.exec(kept.sandbox, "cat /home/user/seen/b.txt"), "three\n", "the file in the sandbox");
}

async function changes({ page }) {
  await page.getByRole("button", { name: "New directory" }).click();
  await page.getByLabel("Name", { exact: true }).fill("../out");
  await page.getByRole("button", { name: "Make" }).click();
  await page.locator(".notice", { hasText: "A name has no" }).getByRole("button", { name: "Close the message" }).click();
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
  ["downloads are stored under safe names", false, savedAs],
  ["text and pictures are shown, text is changed", false, viewed],
  ["directories are made and removed", false, changes],
];
