// A real server with keys, its own state directory, and calls of its API that the cases prepare sandboxes with.
import { execFileSync, spawn } from "node:child_process";
import { chmodSync, mkdirSync, mkdtempSync, rmSync } from "node:fs";
import { join } from "node:path";
import { Registry } from "./registry.mjs";
import { until } from "./until.mjs";

const PORT = 3900;
/** Where the test receives events of webhooks. */
export const RECEIVER = "127.0.0.1:3901";
const AGENT = 49983;

export class Server {
  constructor() {
    this.state = mkdtempSync("/tmp/console");
    chmodSync(this.state, 0o700);
    this.reports = join(this.state, "reports");
    mkdirSync(this.reports);
    this.url = `http://127.0.0.1:${PORT}`;
    this.program = join(process.env.CUBE_BIN, "cube-api");
    const scopes = ["sandboxes:read", "sandboxes:write", "templates:read", "templates:write", "secrets:read", "secrets:write", "metrics:read", "nodes:admin"];
    this.key = this.newKey("console", scopes);
    this.narrowKey = this.newKey("narrow", ["sandboxes:read"]);
  }

  newKey(name, scopes) {
    const options = scopes.flatMap((scope) => ["--scope", scope]);
    return execFileSync(this.program, ["key", "new", name, "--state", this.state, ...options], { encoding: "utf8" }).trim();
  }

  static async start() {
    const server = new Server();
    try {
      await server.begin();
    } catch (error) {
      await server.end();
      throw error;
    }
    return server;
  }

  async begin() {
    this.registry ??= await Registry.start();
    const artifacts = process.env.CUBE_ARTIFACTS;
    const options = ["--listen", `127.0.0.1:${PORT}`, "--state", this.state, "--warm", "0:1", "--uplink", "up0"];
    options.push("--templates", join(artifacts, "templates"), "--vmm", join(process.env.CUBE_BIN, "cube-vmm"));
    options.push("--images", join(artifacts, "guest"), "--images", join(artifacts, "stages"), "--image-userland", join(artifacts, "guest"));
    options.push("--image-mirror", `registry.test=${this.registry.url}`, "--reports", this.reports, "--webhook-exception", "127.0.0.0/8");
    // Lines of the log are shown if a case fails.
    this.log = "";
    this.child = spawn(this.program, ["serve", ...options], { stdio: ["ignore", "ignore", "pipe"] });
    this.child.stderr.on("data", (data) => (this.log = (this.log + data).slice(-20_000)));
    await until("the server answers", async () => {
      if (this.child.exitCode !== null) throw new Error(`the server ended:\n${this.log}`);
      return (await fetch(`${this.url}/health`).catch(() => undefined))?.ok;
    });
  }

  async kill() {
    const gone = new Promise((done) => this.child.once("exit", done));
    this.child.kill("SIGKILL");
    await gone;
  }

  async end() {
    if (this.child?.exitCode === null && this.child.signalCode === null) {
      const gone = new Promise((done) => this.child.once("exit", done));
      this.child.kill("SIGTERM");
      await gone;
    }
    try {
      execFileSync(this.program, ["end", "--state", this.state], { stdio: "ignore" });
    } catch {
      // No sandbox was left.
    }
    this.registry?.end();
    rmSync(this.state, { recursive: true, force: true });
  }

  async call(method, path, body) {
    const headers = { "X-API-KEY": this.key, "Content-Type": "application/json" };
    const response = await fetch(this.url + path, { method, headers, body: body && JSON.stringify(body) });
    const text = await response.text();
    if (!response.ok) throw new Error(`${method} ${path}: ${response.status} ${text}`);
    return text ? JSON.parse(text) : undefined;
  }

  create(options = {}) {
    return this.call("POST", "/v2/sandboxes", { templateID: "base", timeout: 3600, ...options });
  }

  /** Runs a command in a sandbox; returns its output. */
  async exec(sandbox, command, user = "root") {
    const message = Buffer.from(JSON.stringify({ process: { cmd: "/bin/bash", args: ["-c", command] }, stdin: false }));
    const head = Buffer.alloc(5);
    head.writeUInt32BE(message.length, 1);
    const headers = {
      ...this.route(sandbox, AGENT),
      "Content-Type": "application/connect+json",
      "Connect-Protocol-Version": "1",
      Authorization: `Basic ${Buffer.from(`${user}:`).toString("base64")}`,
    };
    const response = await fetch(`${this.url}/process.Process/Start`, { method: "POST", headers, body: Buffer.concat([head, message]) });
    let rest = Buffer.from(await response.arrayBuffer());
    let output = "";
    while (rest.length >= 5) {
      const length = rest.readUInt32BE(1);
      const event = JSON.parse(rest.subarray(5, 5 + length).toString()).event;
      for (const text of [event?.data?.stdout, event?.data?.stderr]) if (text) output += Buffer.from(text, "base64");
      rest = rest.subarray(5 + length);
    }
    return output;
  }

  route(sandbox, port) {
    return { "E2b-Sandbox-Id": sandbox.sandboxID, "E2b-Sandbox-Port": String(port), "X-Access-Token": sandbox.envdAccessToken };
  }

  async write(sandbox, path, text) {
    const headers = { ...this.route(sandbox, AGENT), "Content-Type": "application/octet-stream" };
    const response = await fetch(`${this.url}/files?path=${encodeURIComponent(path)}&username=root`, { method: "POST", headers, body: text });
    if (!response.ok) throw new Error(`cannot write ${path}: ${response.status}`);
  }
}
