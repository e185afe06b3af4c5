// A package that no registry has: its files are uploaded and installed without network.

import { Sandbox } from 'e2b'

const sandbox = await Sandbox.create('base', { timeoutMs: 300_000 })
try {
  await sandbox.files.write([
    { path: 'packages/greeting/package.json', data: '{"name": "greeting", "version": "1.0.0", "main": "index.js"}' },
    { path: 'packages/greeting/index.js', data: 'exports.greet = (name) => `hello, ${name}`\n' },
  ])
  // Installers may take longer than the minute that a command has.
  const install = 'npm install --silent --offline --no-audit --install-links ./packages/greeting'
  await sandbox.commands.run(install, { timeoutMs: 0 })
  const used = await sandbox.commands.run(`node -e "console.log(require('greeting').greet('sandbox'))"`)
  console.log(used.stdout.trim())
} finally {
  await sandbox.kill()
}

// Prints:
// hello, sandbox
