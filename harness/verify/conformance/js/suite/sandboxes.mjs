// Creating, inspecting, listing and ending sandboxes.

import { randomUUID } from 'node:crypto'
import { AuthenticationError, Sandbox, SandboxNotFoundError, Template } from 'e2b'
import { Absent, TEMPLATE, ok, raises, same, sleep, until, withSandbox } from './case.mjs'

const UNKNOWN = 'i0123456789abcdefghi'

async function listed(query, options = {}) {
  const paginator = Sandbox.list({ query, ...options })
  const found = []
  while (paginator.hasNext) found.push(...(await paginator.nextItems()))
  return found
}

export const cases = {
  async 'create-and-kill'() {
    const s = await Sandbox.create(TEMPLATE, { timeoutMs: 60_000 })
    ok(/^[a-z0-9]+$/.test(s.sandboxId), s.sandboxId)
    same(await s.isRunning(), true)
    same(await s.kill(), true)
    same(await s.isRunning(), false)
  },
  async 'kill-unknown'() {
    same(await Sandbox.kill(UNKNOWN), false)
  },
  async 'kill-twice'() {
    await withSandbox(async (s) => {
      same(await s.kill(), true)
      same(await Sandbox.kill(s.sandboxId), false)
    })
  },
  async connect() {
    await withSandbox(async (s) => {
      await s.files.write('/home/user/kept', 'here')
      const other = await Sandbox.connect(s.sandboxId)
      same(await other.files.read('/home/user/kept'), 'here')
    })
  },
  async 'connect-unknown'() {
    await raises(Error, Sandbox.connect(UNKNOWN))
  },
  async 'connect-never-shortens'() {
    await withSandbox(async (s) => {
      const before = (await s.getInfo()).endAt
      await Sandbox.connect(s.sandboxId, { timeoutMs: 10_000 })
      const after = (await s.getInfo()).endAt
      ok(after >= before, `${before} became ${after}`)
    }, { timeoutMs: 300_000 })
  },
  async 'connect-extends'() {
    await withSandbox(async (s) => {
      await Sandbox.connect(s.sandboxId, { timeoutMs: 600_000 })
      const left = (await s.getInfo()).endAt - Date.now()
      ok(left > 500_000, `${left} ms are left`)
    }, { timeoutMs: 60_000 })
  },
  async info() {
    await withSandbox(async (s) => {
      const info = await s.getInfo()
      same(info.sandboxId, s.sandboxId)
      same(info.metadata, { a: '1' })
      same([info.state, info.name], ['running', TEMPLATE])
      const seconds = (info.endAt - info.startedAt) / 1000
      ok(seconds >= 98 && seconds <= 102, `${seconds} s`)
      ok(info.cpuCount >= 1 && info.memoryMB >= 128 && info.envdVersion)
    }, { metadata: { a: '1' }, timeoutMs: 100_000 })
  },
  async 'metadata-survives-any-text'() {
    const odd = { 'key with blank': 'a&b=c', unicode: 'žluťoučký 🐎', percent: '100%25', empty: '' }
    await withSandbox(async (s) => same((await s.getInfo()).metadata, odd), { metadata: odd })
  },
  async 'list-by-metadata'() {
    const mark = randomUUID()
    const metadata = { mark, odd: 'b c&d=e%' }
    await withSandbox(async (s) => {
      await withSandbox(async () => {
        same((await listed({ metadata })).map((f) => f.sandboxId), [s.sandboxId])
        same((await listed({ metadata: { mark } })).length, 2)
        same(await listed({ metadata: { mark: mark + 'x' } }), [])
      }, { metadata: { mark } })
    }, { metadata })
  },
  async 'list-pages'() {
    const mark = randomUUID()
    const made = []
    try {
      for (let n = 0; n < 3; n++) made.push(await Sandbox.create(TEMPLATE, { metadata: { mark } }))
      const paginator = Sandbox.list({ query: { metadata: { mark } }, limit: 2 })
      const first = await paginator.nextItems()
      ok(paginator.hasNext && paginator.nextToken)
      const second = await paginator.nextItems()
      ok(!paginator.hasNext)
      same([...first, ...second].map((f) => f.sandboxId), made.map((s) => s.sandboxId).reverse())
    } finally {
      for (const s of made) await s.kill()
    }
  },
  async 'list-by-state'() {
    const mark = randomUUID()
    const metadata = { mark }
    await withSandbox(async (s) => {
      await s.pause()
      same((await listed({ metadata, state: ['paused'] })).map((f) => f.sandboxId), [s.sandboxId])
      same(await listed({ metadata, state: ['running'] }), [])
    }, { metadata })
  },
  async 'set-timeout-shortens'() {
    await withSandbox(async (s) => {
      await s.setTimeout(2_000)
      const began = Date.now()
      await until('the end of the sandbox', async () => !(await s.isRunning()), 8_000)
      const took = Date.now() - began
      ok(took >= 1_000 && took <= 4_000, `it ended after ${took} ms`)
    }, { timeoutMs: 300_000 })
  },
  async 'timeout-ends-it'() {
    await withSandbox(async (s) => {
      await until('the end of the sandbox', async () => !(await s.isRunning()), 6_000)
      same(await Sandbox.kill(s.sandboxId), false)
    }, { timeoutMs: 2_000 })
  },
  async 'set-timeout-unknown'() {
    await raises(SandboxNotFoundError ?? Error, Sandbox.setTimeout(UNKNOWN, 10_000))
  },
  async 'envs-of-the-sandbox'() {
    await withSandbox(async (s) => {
      same((await s.commands.run('echo $PLACE')).stdout, 'all over\n')
      same((await s.commands.run('echo $OTHER', { envs: { OTHER: 'y' } })).stdout, 'y\n')
    }, { envs: { PLACE: 'all over', OTHER: 'x' } })
  },
  async 'template-unknown'() {
    await raises(Error, Sandbox.create('no-such-template-anywhere'))
  },
  async 'wrong-key'() {
    await raises(AuthenticationError, Sandbox.create(TEMPLATE, { apiKey: 'e2b_' + 'f'.repeat(40) }))
  },
  async 'killed-sandbox-says-so'() {
    await withSandbox(async (s) => {
      await s.kill()
      const error = await raises(Error, s.commands.run('true'))
      ok(/not found|not running/i.test(error.message), error.message)
    })
  },
  async 'twenty-at-once'() {
    await Promise.all([...Array(20).keys()].map((n) =>
      withSandbox(async (s) => same((await s.commands.run(`echo ${n}`)).stdout, `${n}\n`))))
  },
  async metrics() {
    await withSandbox(async (s) => {
      const found = await until('a sample', async () => {
        const samples = await s.getMetrics()
        return samples.length > 0 && samples
      }, 20_000)
      const sample = found.at(-1)
      ok(sample.memUsed > 0 && sample.memUsed < sample.memTotal, JSON.stringify(sample))
      ok(sample.diskUsed >= 0 && sample.diskUsed < sample.diskTotal, JSON.stringify(sample))
    })
  },
  async 'template-exists'() {
    if (!Template.exists && !Template.aliasExists) throw new Absent('no Template.exists')
    const exists = (name) => (Template.exists ?? Template.aliasExists)(name)
    same(await exists(TEMPLATE), true)
    same(await exists('no-such-template-anywhere'), false)
  },
}
