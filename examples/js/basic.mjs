// Creates a sandbox, runs a command in it, and kills it.

import { Sandbox } from 'e2b'

const sandbox = await Sandbox.create('base', { timeoutMs: 300_000 })
try {
  const result = await sandbox.commands.run("echo 'hello from' $(whoami); uname -s")
  console.log(result.stdout.trim())
  console.log('status', result.exitCode)
} finally {
  await sandbox.kill()
}
console.log('still running:', await sandbox.isRunning())

// Prints:
// hello from user
// Linux
// status 0
// still running: false
