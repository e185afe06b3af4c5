// Installs a package that is not in any registry: uploads its files and installs them without network.

import { Sandbox } from 'e2b'

const sandbox = await Sandbox.create('base', { timeoutMs: 300_000 })
try {
  await sandbox.files.write([
    { path: 'packages/greeting/package.json', data: '{"name": "greeting", "version": "1.0.0", "main": "index.js"}' },
    { path: 'packages/greeting/index.js', data: 'exports.greet = (name) => `hello, ${name}`\n' },
  ])
  // Installers may exceed the default command timeout of one minute; 0 turns the timeout off.
  const install = 'npm install --silent --offline --no-audit --install-links ./packages/greeting'
  await sandbox.commands.run(install, { timeoutMs: 0 })
  const used = await sandbox.commands.run(`node -e "console.log(require('greeting').greet('sandbox'))"`)
  console.log(used.stdout.trim())
} finally {
  await sandbox.kill()
}

// Prints:
// hello, sandbox
