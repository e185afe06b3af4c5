// A package that no registry has: its files are uploaded and installed without network.

import { Sandbox } from 'e2b'

const sandbox = await Sandbox.create('base', { timeoutMs: 120_000 })
try {
  await sandbox.files.write([
    { path: 'packages/greeting/package.json', data: '{"name": "greeting", "version": "1.0.0", "main": "index.js"}' },
    { path: 'packages/greeting/index.js', data: 'exports.greet = (name) => `hello, ${name}`\n' },
  ])
  await sandbox.commands.run('cd packages && npm pack --silent ./greeting')
  await sandbox.commands.run('npm install --silent --offline --no-audit ./packages/greeting-1.0.0.tgz')
  const used = await sandbox.commands.run(`node -e "console.log(require('greeting').greet('sandbox'))"`)
  console.log(used.stdout.trim())
} finally {
  await sandbox.kill()
}

// Prints:
// hello, sandbox
