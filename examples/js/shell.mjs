// Shell commands: pipes, variables, streamed output, failures, and a server in the background.

import { CommandExitError, Sandbox } from 'e2b'

const sandbox = await Sandbox.create('base', { timeoutMs: 300_000 })
try {
  const words = await sandbox.commands.run("printf 'pear\\napple\\nfig\\n' | sort | head -n 2")
  console.log(words.stdout.trim().split('\n').join(' '))

  const greeting = await sandbox.commands.run('echo $GREETING from $PWD', { envs: { GREETING: 'hi' }, cwd: '/tmp' })
  console.log(greeting.stdout.trim())

  let heard = ''
  await sandbox.commands.run('for i in 1 2 3; do echo line $i; done', { onStdout: (text) => (heard += text) })
  console.log(heard.trim().split('\n').join(', '))

  try {
    await sandbox.commands.run('ls /nowhere')
  } catch (error) {
    if (!(error instanceof CommandExitError)) throw error
    console.log('failed with', error.exitCode, 'and said why:', error.stderr.includes('/nowhere'))
  }

  const server = await sandbox.commands.run('python3 -m http.server 8000', { background: true })
  const page = await sandbox.commands.run(
    "curl -s --retry 20 --retry-connrefused --retry-delay 1 -o /dev/null -w '%{http_code}' localhost:8000",
  )
  console.log('server answers', page.stdout)
  console.log('server ended:', await server.kill())
} finally {
  await sandbox.kill()
}

// Prints:
// apple fig
// hi from /tmp
// line 1, line 2, line 3
// failed with 2 and said why: true
// server answers 200
// server ended: true
