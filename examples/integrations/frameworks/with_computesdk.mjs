// ComputeSDK with its provider for E2B. It keeps no address of its own: E2B's SDK reads the variables.
import { compute } from "computesdk";
import { e2b } from "@computesdk/e2b";

compute.setConfig({ provider: e2b({}) });
const sandbox = await compute.sandbox.create({ timeout: 300_000 });
try {
  await sandbox.filesystem.writeFile("/home/user/rows.txt", "3\n5\n10\n");
  const done = await sandbox.runCommand("awk '{ sum += $1 } END { print sum / NR }' rows.txt");
  console.log(done.exitCode, done.stdout.trim());
} finally {
  await sandbox.destroy();
}

// Prints:
// 0 6
