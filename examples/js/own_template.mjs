// Builds a template with a program of its own, and runs the program in a sandbox.

import { Sandbox, Template } from 'e2b'

const template = Template()
  .fromBaseImage()
  .setWorkdir('/home/user/app')
  .runCmd("echo 'print(6 * 7)' > answer.py")
const built = await Template.build(template, 'own-template-js', { cpuCount: 1, memoryMB: 512 })
console.log(built.name)
const sandbox = await Sandbox.create('own-template-js', { timeoutMs: 60_000 })
process.stdout.write((await sandbox.commands.run('pwd; python answer.py')).stdout)
await sandbox.kill()

// Prints:
// own-template-js
// /home/user/app
// 42
