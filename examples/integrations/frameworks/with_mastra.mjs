// Mastra: the sandbox of a workspace. Without `template`, @mastra/e2b builds one with apt for its mounts.
import { Workspace } from "@mastra/core/workspace";
import { E2BSandbox } from "@mastra/e2b";

const workspace = new Workspace({ sandbox: new E2BSandbox({ template: "base", timeout: 300_000 }) });
await workspace.init();
try {
  const done = await workspace.sandbox.executeCommand("uname", ["-s"]);
  console.log(done.exitCode, done.stdout.trim());
} finally {
  await workspace.destroy();
}

// Prints:
// 0 Linux
