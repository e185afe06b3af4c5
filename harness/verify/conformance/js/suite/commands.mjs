// Commands and pseudo-terminals.

import { createHash } from 'node:crypto'
import { CommandExitError, InvalidArgumentError, TimeoutError } from 'e2b'
import { Absent, ok, raises, same, until, withSandbox } from './case.mjs'

const text = (pieces) => Buffer.concat(pieces).toString()

export const cases = {
  async 'run-foreground'() {
    await withSandbox(async (s) => {
      const result = await s.commands.run('echo out; echo err >&2')
      same([result.stdout, result.stderr, result.exitCode], ['out\n', 'err\n', 0])
    })
  },
  async 'run-exit-code'() {
    await withSandbox(async (s) => {
      const error = await raises(CommandExitError, s.commands.run('echo before; echo why >&2; exit 7'))
      same([error.exitCode, error.stdout, error.stderr], [7, 'before\n', 'why\n'])
    })
  },
  async 'run-callbacks-stream'() {
    await withSandbox(async (s) => {
      const seen = []
      const note = (data) => seen.push([data, Date.now()])
      await s.commands.run('echo 1; sleep 1; echo 2; echo 3 >&2', { onStdout: note, onStderr: note })
      same(seen.map(([data]) => data), ['1\n', '2\n', '3\n'])
      ok(seen[1][1] - seen[0][1] > 500, 'not streamed')
    })
  },
  async 'run-background'() {
    await withSandbox(async (s) => {
      const handle = await s.commands.run('sleep 0.2; echo done', { background: true })
      ok(handle.pid > 0)
      same((await handle.wait()).stdout, 'done\n')
    })
  },
  async 'run-list-and-kill'() {
    await withSandbox(async (s) => {
      const handle = await s.commands.run('sleep 60', { background: true })
      const pids = async () => (await s.commands.list()).map((p) => p.pid)
      ok((await pids()).includes(handle.pid))
      same(await s.commands.kill(handle.pid), true)
      await raises(CommandExitError, handle.wait())
      await until('the end of the command', async () => !(await pids()).includes(handle.pid))
    })
  },
  async 'kill-unknown-process'() {
    await withSandbox(async (s) => same(await s.commands.kill(999_999), false))
  },
  async 'run-connect'() {
    await withSandbox(async (s) => {
      const handle = await s.commands.run('read line; echo got $line; exit 3', { background: true, stdin: true })
      await handle.disconnect()
      const again = await s.commands.connect(handle.pid)
      await s.commands.sendStdin(handle.pid, 'it\n')
      const error = await raises(CommandExitError, again.wait())
      same([error.exitCode, error.stdout], [3, 'got it\n'])
    })
  },
  async 'connect-unknown-process'() {
    await withSandbox(async (s) => void (await raises(Error, s.commands.connect(999_999))))
  },
  async 'run-stdin'() {
    await withSandbox(async (s) => {
      const handle = await s.commands.run('cat', { background: true, stdin: true })
      await s.commands.sendStdin(handle.pid, 'hello there\n')
      await s.commands.closeStdin(handle.pid)
      same((await handle.wait()).stdout, 'hello there\n')
    })
  },
  async 'run-without-stdin-ends'() {
    await withSandbox(async (s) => same((await s.commands.run('cat', { timeoutMs: 10_000 })).stdout, ''))
  },
  async 'run-timeout'() {
    await withSandbox(async (s) => {
      await raises(TimeoutError, s.commands.run('sleep 30', { timeoutMs: 1_000 }))
      await until('the end of the command', async () => !(await s.commands.list()).some((p) => String(p.args).includes('sleep 30')))
    })
  },
  async 'run-cwd'() {
    await withSandbox(async (s) => {
      same((await s.commands.run('pwd')).stdout, '/home/user\n')
      same((await s.commands.run('pwd', { cwd: '/tmp' })).stdout, '/tmp\n')
      const error = await raises(InvalidArgumentError, s.commands.run('pwd', { cwd: '/no/such' }))
      ok(error.message.includes('does not exist'), error.message)
    })
  },
  async 'run-user'() {
    await withSandbox(async (s) => {
      same((await s.commands.run('whoami; echo $HOME')).stdout, 'user\n/home/user\n')
      same((await s.commands.run('whoami; echo $HOME', { user: 'root' })).stdout, 'root\n/root\n')
    })
  },
  async 'run-unknown-user'() {
    await withSandbox(async (s) => {
      const error = await raises(Error, s.commands.run('true', { user: 'nobody-here' }))
      ok(error.message.includes('invalid username'), error.message)
    })
  },
  async 'run-envs'() {
    await withSandbox(async (s) =>
      same((await s.commands.run('echo $A-$B', { envs: { A: '1', B: 'two words' } })).stdout, '1-two words\n'))
  },
  async 'run-large-output'() {
    await withSandbox(async (s) => {
      const { stdout } = await s.commands.run("head -c 8000000 /dev/zero | tr '\\0' x")
      same(createHash('sha256').update(stdout).digest('hex'), createHash('sha256').update('x'.repeat(8_000_000)).digest('hex'))
    })
  },
  async 'run-unicode-output'() {
    await withSandbox(async (s) => {
      const { stdout } = await s.commands.run("for i in $(seq 20000); do printf 'žluť🐎'; done")
      ok(stdout === 'žluť🐎'.repeat(20000), 'other text came out')
    })
  },
  async 'run-many-in-one-sandbox'() {
    await withSandbox(async (s) => {
      const numbers = [...Array(20).keys()]
      const said = await Promise.all(numbers.map((n) => s.commands.run(`sleep 0.3; echo ${n}`)))
      same(said.map((r) => r.stdout), numbers.map((n) => `${n}\n`))
    })
  },
  async 'run-outlives-its-client'() {
    await withSandbox(async (s) => {
      const handle = await s.commands.run('sleep 1; echo alive > /tmp/mark; sleep 30', { background: true })
      await handle.disconnect()
      await until('the file', () => s.files.exists('/tmp/mark'))
    })
  },
  async 'killed-while-a-command-runs'() {
    await withSandbox(async (s) => {
      const handle = await s.commands.run('sleep 60', { background: true })
      const ended = raises(TimeoutError, handle.wait())
      await s.kill()
      const { message } = await ended
      ok(message.includes('sandbox was killed or reached its end of life'), message)
    })
  },
  async 'pty-create'() {
    await withSandbox(async (s) => {
      const said = []
      const handle = await s.pty.create({ cols: 80, rows: 24, envs: { ABC: '123' }, cwd: '/tmp', onData: (d) => said.push(d) })
      await s.pty.sendInput(handle.pid, new TextEncoder().encode('echo $ABC-$((40+2)); pwd; echo $TERM; exit\n'))
      await handle.wait()
      for (const wanted of ['123-42', '/tmp', 'xterm-256color']) ok(text(said).includes(wanted), text(said))
    })
  },
  async 'pty-resize'() {
    await withSandbox(async (s) => {
      const said = []
      const handle = await s.pty.create({ cols: 80, rows: 24, onData: (d) => said.push(d) })
      await s.pty.resize(handle.pid, { cols: 132, rows: 30 })
      await s.pty.sendInput(handle.pid, new TextEncoder().encode('stty size; exit\n'))
      await handle.wait()
      ok(text(said).includes('30 132'), text(said))
    })
  },
  async 'pty-kill'() {
    await withSandbox(async (s) => {
      const handle = await s.pty.create({ cols: 80, rows: 24, onData: () => {} })
      const ended = handle.wait().catch(() => {})
      same(await s.pty.kill(handle.pid), true)
      await ended
      same(await s.pty.kill(handle.pid), false)
    })
  },
  async 'pty-connect'() {
    await withSandbox(async (s) => {
      if (!s.pty.connect) throw new Absent('no pty.connect')
      const handle = await s.pty.create({ cols: 80, rows: 24, onData: () => {} })
      await handle.disconnect()
      const said = []
      const again = await s.pty.connect(handle.pid, { onData: (d) => said.push(d) })
      await s.pty.sendInput(handle.pid, new TextEncoder().encode('echo back-$((1+1)); exit\n'))
      await again.wait()
      ok(text(said).includes('back-2'), text(said))
    })
  },
}
