// Builds from an image and from a Dockerfile, with their logs as they come, and cells on the real interpreter.
import { IMAGE } from "../registry.mjs";
import { assert, same } from "../until.mjs";
import { cell } from "./hostile.mjs";

async function begin({ browser, page }, name) {
  await browser.go("#/templates/new");
  await page.getByLabel("Name", { exact: true }).fill(name);
}

const ready = (page) => page.locator(".head .badge", { hasText: "ready" }).waitFor({ timeout: 120_000 });

async function image(world) {
  const { page } = world;
  await begin(world, "of-image");
  await page.getByLabel("Begins with").selectOption("image");
  await page.getByLabel("Image", { exact: true }).fill(IMAGE);
  await page.getByRole("button", { name: "Build", exact: true }).click();
  await page.getByText(IMAGE).first().waitFor();
  await ready(page);
}

async function dockerfile(world) {
  const { page, server } = world;
  await begin(world, "of-dockerfile");
  const text = `FROM ${IMAGE}\nUSER root\nENV GREETING="hello of the build"\nRUN echo begun: $GREETING && sleep 3 && echo over > /made && cat /made\nWORKDIR /srv\n`;
  await page.getByLabel("Dockerfile", { exact: true }).fill(text);
  await page.getByRole("button", { name: "Build", exact: true }).click();
  const log = page.locator(".log");
  await log.getByText("begun: hello of the build").last().waitFor({ timeout: 120_000 });
  // The step is not over: its lines come while it runs.
  await page.locator(".head .badge", { hasText: "building" }).waitFor({ timeout: 1000 });
  const last = log.getByText(/stdout\]: over$/);
  same(await last.count(), 0, "lines of a step before it has printed them");
  await last.waitFor({ timeout: 60_000 });
  await ready(page);
  const made = await server.create({ templateID: "of-dockerfile" });
  same(await server.exec(made, "cat /hello /made"), "hello from the image\nover\n", "files of the sandbox");
  await server.call("DELETE", `/sandboxes/${made.sandboxID}`);
}

async function cells(world) {
  const { browser, page, server } = world;
  const made = await server.create({ templateID: "code-interpreter-v1" });
  await browser.go(`#/sandboxes/${made.sandboxID}/cells`);
  await page.getByLabel("Cell", { exact: true }).waitFor();
  const said = async (code) => (await cell(world, code)).innerText();
  assert((await said("x = 6\nprint(x * 7)")).includes("42"), "the output of a cell");
  assert((await said("x + 1")).includes("7"), "the value of a cell that continues another");
  const table = await cell(world, "import pandas as pd\npd.DataFrame({'name': ['<b>a</b>', 'b'], 'value': [1, 2]})");
  await table.getByRole("cell", { name: "<b>a</b>" }).waitFor();
  same(await table.locator("tbody tr").count(), 2, "rows");
  const chart = await cell(world, "import matplotlib.pyplot as plt\nplt.bar(['a', 'b'], [3, 5])\nplt.title('of a cell')\nplt.show()");
  await chart.getByText("of a cell").first().waitFor();
  same(await chart.locator("svg rect").count(), 2, "bars");
  const error = await said("1 / 0");
  assert(error.includes("ZeroDivisionError"), `the error of a cell: ${error}`);
  for (const [language, code] of [
    ["javascript", "6 * 7"],
    ["bash", "echo $((6*7))"],
  ]) {
    await page.getByLabel("Language", { exact: true }).selectOption(language);
    assert((await said(code)).includes("42"), `a cell in ${language}`);
  }
  same(await browser.overflow(), 0, "pixels beyond the window");
  await server.call("DELETE", `/sandboxes/${made.sandboxID}`);
}

export const cases = [
  ["a template is built from an image", false, image],
  ["a Dockerfile is built, the lines of a step as it prints them", false, dockerfile],
  ["cells run on the real interpreter", false, cells],
];
