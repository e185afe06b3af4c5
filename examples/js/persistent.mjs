// Pauses a sandbox and connects to it again by its id: files, processes and memory are unchanged.

import { Sandbox } from 'e2b'

const sandbox = await Sandbox.create('base', { timeoutMs: 300_000 })
try {
  await sandbox.files.write('notes.txt', 'before the pause')
  const count = 'for i in $(seq 100000); do echo $i > count; sleep 0.1; done'
  const counter = await sandbox.commands.run(count, { background: true })
  // The pause ends the output stream, but not the process.
  counter.wait().catch(() => {})
  await sandbox.pause()
  console.log('running:', await sandbox.isRunning())

  // Any program with the API key can do this, even hours later.
  const again = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 300_000 })
  console.log('the same sandbox:', again.sandboxId === sandbox.sandboxId)
  console.log(await again.files.read('notes.txt'))
  const processes = await again.commands.list()
  console.log('still counting:', processes.some(({ pid }) => pid === counter.pid))
} finally {
  await Sandbox.kill(sandbox.sandboxId)
}

// Prints:
// running: false
// the same sandbox: true
// before the pause
// still counting: true
