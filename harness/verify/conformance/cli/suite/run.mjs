// Runs cases of the conformance suite through the command line client; the protocol is that of run.py.

import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import fs from 'node:fs'
import path from 'node:path'

const CLIENT = path.join(import.meta.dirname, '../node_modules/@e2b/cli/dist/index.js')
const TEMPLATE = process.env.CONFORMANCE_TEMPLATE ?? 'base'

/** Runs the client; ends with its status and what it said. */
function e2b(...words) {
  return new Promise((resolve, reject) => {
    const child = spawn(process.execPath, [CLIENT, ...words], { stdio: ['ignore', 'pipe', 'pipe'] })
    const said = { stdout: '', stderr: '' }
    for (const name of ['stdout', 'stderr']) child[name].on('data', (data) => (said[name] += data))
    child.on('error', reject)
    child.on('close', (status) => resolve({ status, ...said }))
  })
}

async function good(...words) {
  const answer = await e2b(...words)
  assert.equal(answer.status, 0, `${words.join(' ')}: ${answer.stdout}${answer.stderr}`)
  return answer.stdout
}

const all = async (state = 'running') => JSON.parse(await good('sandbox', 'list', '--state', state, '--format', 'json'))

async function withSandbox(use) {
  const before = new Set((await all()).map((s) => s.sandboxId))
  const said = await good('sandbox', 'create', '--detach', '--timeout', '120', TEMPLATE)
  const made = (await all()).map((s) => s.sandboxId).filter((id) => !before.has(id) && said.includes(id))
  assert.equal(made.length, 1, said)
  try {
    await use(made[0])
  } finally {
    await e2b('sandbox', 'kill', made[0])
  }
}

const cases = {
  async 'create-and-kill'() {
    await withSandbox(async (id) => {
      await good('sandbox', 'kill', id)
      assert.ok(!(await all()).some((s) => s.sandboxId === id))
    })
  },
  async 'run-foreground'() {
    await withSandbox(async (id) => {
      assert.equal(await good('sandbox', 'exec', id, 'echo', 'hello', 'there'), 'hello there\n')
    })
  },
  async 'run-exit-code'() {
    await withSandbox(async (id) => {
      const answer = await e2b('sandbox', 'exec', id, 'sh', '-c', 'exit 7')
      assert.equal(answer.status, 7, answer.stderr)
    })
  },
  async info() {
    await withSandbox(async (id) => {
      const said = JSON.parse(await good('sandbox', 'info', '--format', 'json', id))
      assert.equal(said.sandboxId, id)
    })
  },
  async metrics() {
    await withSandbox(async (id) => {
      await good('sandbox', 'metrics', '--format', 'json', id)
    })
  },
  async logs() {
    await withSandbox(async (id) => {
      await good('sandbox', 'logs', '--format', 'json', id)
    })
  },
  async 'pause-and-resume'() {
    await withSandbox(async (id) => {
      await good('sandbox', 'pause', id)
      assert.ok((await all('paused')).some((s) => s.sandboxId === id))
      await good('sandbox', 'resume', id)
      assert.equal(await good('sandbox', 'exec', id, 'echo', 'back'), 'back\n')
    })
  },
  async 'list-templates'() {
    const said = JSON.parse(await good('template', 'list', '--format', 'json'))
    assert.ok(JSON.stringify(said).includes(TEMPLATE), JSON.stringify(said))
  },
}

const say = (line) => fs.writeSync(1, JSON.stringify(line) + '\n')
const wanted = process.argv.slice(2)
if (wanted.length === 1 && wanted[0] === '--list') {
  for (const name of Object.keys(cases)) say({ case: name })
} else {
  for (const name of wanted) {
    say({ begin: name })
    const began = performance.now()
    let [verdict, why] = ['pass', '']
    try {
      if (!cases[name]) throw new Error('the suite has no such case')
      await cases[name]()
    } catch (error) {
      ;[verdict, why] = ['fail', `${error.name}: ${error.message}`.slice(0, 800)]
    }
    say({ end: name, verdict, why, seconds: (performance.now() - began) / 1000 })
  }
}
process.exit(0)
