// Pause, resume, snapshots, forks.

import { Sandbox } from 'e2b'
import { Absent, ok, raises, same, until, withSandbox } from './case.mjs'

const BOOT_ID = 'cat /proc/sys/kernel/random/boot_id'
const bootId = async (s) => (await s.commands.run(BOOT_ID)).stdout

export const cases = {
  async 'pause-and-resume'() {
    await withSandbox(async (s) => {
      await s.files.write('kept', 'here')
      const before = await bootId(s)
      const handle = await s.commands.run('sleep 600', { background: true, timeoutMs: 0 })
      const ended = handle.wait().catch(() => {})
      await s.pause()
      await ended
      same(await s.isRunning(), false)
      const again = await Sandbox.connect(s.sandboxId, { timeoutMs: 60_000 })
      same(await again.files.read('kept'), 'here')
      same(await bootId(again), before)
      ok((await again.commands.list()).some((p) => p.pid === handle.pid), 'the process is gone')
    })
  },
  async 'pause-twice'() {
    await withSandbox(async (s) => {
      await s.pause()
      same(await s.pause(), false)
    })
  },
  async 'pause-without-memory'() {
    await withSandbox(async (s) => {
      await s.files.write('kept', 'here')
      const before = await bootId(s)
      await s.pause({ keepMemory: false })
      const again = await Sandbox.connect(s.sandboxId, { timeoutMs: 60_000 })
      same(await again.files.read('kept'), 'here')
      ok((await bootId(again)) !== before, 'the boot id stayed')
    })
  },
  async 'kill-paused'() {
    await withSandbox(async (s) => {
      await s.pause()
      same(await Sandbox.kill(s.sandboxId), true)
      await raises(Error, Sandbox.connect(s.sandboxId))
    })
  },
  async 'pause-in-a-sleep'() {
    await withSandbox(async (s) => {
      await s.commands.run('touch /tmp/begun; sleep 2 && echo done > /tmp/done', { background: true })
      await until('the start of the program', () => s.files.exists('/tmp/begun'))
      await (s.pause ?? s.betaPause).call(s)
      ok(!(await s.isRunning()), 'it runs while it is paused')
      await s.connect()
      ok(await s.isRunning(), 'it does not run after it was resumed')
      await until('the end of the program', () => s.files.exists('/tmp/done'))
      await until('the content of the file', async () => (await s.files.read('/tmp/done')) === 'done\n')
    })
  },
  async 'auto-pause'() {
    await withSandbox(async (s) => {
      await s.files.write('kept', 'here')
      await until('paused', async () => (await s.getInfo()).state === 'paused', 10_000)
      const again = await Sandbox.connect(s.sandboxId, { timeoutMs: 60_000 })
      same(await again.files.read('kept'), 'here')
    }, { timeoutMs: 2_000, lifecycle: { onTimeout: 'pause' } })
  },
  async 'auto-pause-at-once'() {
    await withSandbox(async (s) => {
      const bootId = async () => (await s.commands.run('cat /proc/sys/kernel/random/boot_id')).stdout
      const before = await bootId()
      await s.setTimeout(0)
      await until('the end of the sandbox', async () => !(await s.isRunning()))
      await s.connect()
      same(await bootId(), before)
    }, { timeoutMs: 60_000, lifecycle: { onTimeout: 'pause' } })
  },
  async 'auto-resume'() {
    await withSandbox(async (s) => {
      await s.files.write('kept', 'here')
      await s.pause()
      same(await s.files.read('kept'), 'here')
    }, { timeoutMs: 60_000, lifecycle: { onTimeout: 'pause', autoResume: true } })
  },
  async 'snapshot-and-start-from-it'() {
    await withSandbox(async (s) => {
      if (!s.createSnapshot) throw new Absent('no createSnapshot')
      await s.files.write('kept', 'here')
      const snapshot = await s.createSnapshot()
      try {
        ok(await s.isRunning(), 'the source goes on')
        await withSandbox(async (clone) => same(await clone.files.read('kept'), 'here'), { template: snapshot.snapshotId })
      } finally {
        same(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
      }
    })
  },
  async 'snapshots-of-a-sandbox'() {
    await withSandbox((one) =>
      withSandbox(async (two) => {
        const made = await one.createSnapshot()
        try {
          const of = async (which) => (await Sandbox.listSnapshots(which).nextItems()).map((s) => s.snapshotId)
          same(await of({ sandboxId: one.sandboxId }), [made.snapshotId])
          same(await of({ sandboxId: two.sandboxId }), [])
          ok((await of({})).includes(made.snapshotId))
        } finally {
          await Sandbox.deleteSnapshot(made.snapshotId)
        }
      }),
    )
  },
  async fork() {
    await withSandbox(async (s) => {
      if (!s.fork) throw new Absent('no fork')
      await s.files.write('kept', 'here')
      const forks = await s.fork({ count: 2, timeoutMs: 60_000 })
      try {
        same(forks.length, 2)
        for (const made of forks) {
          if (made instanceof Error) throw made
          same(await made.files.read('kept'), 'here')
        }
      } finally {
        for (const made of forks) if (!(made instanceof Error)) await made.kill()
      }
    })
  },
}
