// The browser, and all that must never happen in it: requests elsewhere, violations of the policy, dialogs, windows, errors.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";

const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

export class Browser {
  static async open(url) {
    const self = new Browser();
    self.url = url;
    self.faults = [];
    /** Off while a case opens pages beyond the console. */
    self.watches = true;
    self.browser = await chromium.launch({
      executablePath: process.env.CUBE_CHROMIUM ?? "/usr/bin/chromium",
      // Chromium's own sandbox refuses to run as root.
      args: ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-proxy-server"],
    });
    self.context = await self.browser.newContext({ viewport: { width: 1280, height: 860 }, acceptDownloads: true, reducedMotion: "reduce" });
    await self.context.grantPermissions(["clipboard-read", "clipboard-write"]);
    self.page = await self.context.newPage();
    self.watch(self.page);
    return self;
  }

  watch(page) {
    page.setDefaultTimeout(15_000);
    page.on("request", (request) => {
      const target = request.url();
      const isOwn = target.startsWith(`${this.url}/`) || /^(data|blob):/.test(target);
      if (!isOwn) this.faults.push(`a request to ${target}`);
    });
    page.on("console", (message) => {
      const text = message.text();
      // The browser logs each refusal of the server and each time that it cannot be reached: those are expected.
      const isStatus = /^Failed to load resource: (the server responded with a status|net::ERR_(CONNECTION|EMPTY|INCOMPLETE|SOCKET|NETWORK))/.test(text);
      if (message.type() === "error" && !isStatus) this.faults.push(`console: ${text}`);
      if (/Content.Security.Policy|Trusted ?Type/i.test(text)) this.faults.push(`policy: ${text}`);
    });
    page.on("pageerror", (error) => this.faults.push(`error in the page: ${error.stack ?? error}`));
    page.on("dialog", (dialog) => {
      this.faults.push(`a dialog: ${dialog.message()}`);
      void dialog.dismiss();
    });
    page.on("popup", (popup) => this.faults.push(`a window: ${popup.url()}`));
    page.on("framenavigated", (frame) => {
      if (this.watches && !frame.url().startsWith(`${this.url}/ui`) && frame.url() !== "about:blank") this.faults.push(`a page: ${frame.url()}`);
    });
  }

  assertClean() {
    const found = this.forget();
    if (found.length) throw new Error(`the browser saw:\n${[...new Set(found)].join("\n")}`);
  }

  forget() {
    return this.faults.splice(0);
  }

  async go(hash) {
    await this.page.evaluate((to) => (location.hash = to), hash);
  }

  async setTheme(theme) {
    await this.page.evaluate((to) => (document.documentElement.dataset.theme = to), theme);
  }

  /** Findings of axe on what is shown now. */
  async axe() {
    await this.page.evaluate(AXE);
    const found = await this.page.evaluate(async () => {
      const result = await globalThis.axe.run(document, { resultTypes: ["violations"] });
      return result.violations.map((one) => `${one.id}: ${one.nodes.slice(0, 3).map((node) => `${node.target.join(" ")} (${node.failureSummary?.split("\n")[1]?.trim() ?? ""})`).join("; ")}`);
    });
    return found;
  }

  /** Whether something makes the page wider than the window. */
  overflow() {
    return this.page.evaluate(() => {
      const root = document.scrollingElement;
      return root.scrollWidth > root.clientWidth + 1 ? root.scrollWidth - root.clientWidth : 0;
    });
  }

  shot(path) {
    return this.page.screenshot({ path });
  }

  async close() {
    await this.browser.close();
  }
}
