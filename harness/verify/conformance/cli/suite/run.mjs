// Runs cases of the conformance suite through the command line client. Its output has the same lines as the output
// of python/suite/run.py.

import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import crypto from 'node:crypto'
import fs from 'node:fs'
import os from 'node:os'
import path from 'node:path'

const CLIENT = path.join(import.meta.dirname, '../node_modules/@e2b/cli/dist/index.js')
const TEMPLATE = process.env.CONFORMANCE_TEMPLATE ?? 'base'

/** Runs the client, and returns its exit status and output. */
function e2b(...words) {
  return new Promise((resolve, reject) => {
    const child = spawn(process.execPath, [CLIENT, ...words], { stdio: ['ignore', 'pipe', 'pipe'] })
    const output = { stdout: '', stderr: '' }
    for (const name of ['stdout', 'stderr']) child[name].on('data', (data) => (output[name] += data))
    child.on('error', reject)
    child.on('close', (status) => resolve({ status, ...output }))
  })
}

async function succeed(...words) {
  const answer = await e2b(...words)
  assert.equal(answer.status, 0, `${words.join(' ')}: ${answer.stdout}${answer.stderr}`)
  return answer.stdout
}

const all = async (state = 'running') => JSON.parse(await succeed('sandbox', 'list', '--state', state, '--format', 'json'))

async function withSandbox(use) {
  const before = new Set((await all()).map((s) => s.sandboxId))
  const output = await succeed('sandbox', 'create', '--detach', '--timeout', '120', TEMPLATE)
  const made = (await all()).map((s) => s.sandboxId).filter((id) => !before.has(id) && output.includes(id))
  assert.equal(made.length, 1, output)
  try {
    await use(made[0])
  } finally {
    await e2b('sandbox', 'kill', made[0])
  }
}

const cases = {
  async 'create-and-kill'() {
    await withSandbox(async (id) => {
      await succeed('sandbox', 'kill', id)
      assert.ok(!(await all()).some((s) => s.sandboxId === id))
    })
  },
  async 'run-foreground'() {
    await withSandbox(async (id) => {
      assert.equal(await succeed('sandbox', 'exec', id, 'echo', 'hello', 'there'), 'hello there\n')
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
      const info = JSON.parse(await succeed('sandbox', 'info', '--format', 'json', id))
      assert.equal(info.sandboxId, id)
    })
  },
  async metrics() {
    await withSandbox(async (id) => {
      await succeed('sandbox', 'metrics', '--format', 'json', id)
    })
  },
  async logs() {
    await withSandbox(async (id) => {
      await succeed('sandbox', 'logs', '--format', 'json', id)
    })
  },
  async 'pause-and-resume'() {
    await withSandbox(async (id) => {
      await succeed('sandbox', 'pause', id)
      assert.ok((await all('paused')).some((s) => s.sandboxId === id))
      await succeed('sandbox', 'resume', id)
      assert.equal(await succeed('sandbox', 'exec', id, 'echo', 'back'), 'back\n')
    })
  },
  async 'template-build-dockerfile'() {
    const name = `conformance-${crypto.randomBytes(6).toString('hex')}`
    const context = fs.mkdtempSync(path.join(os.tmpdir(), 'conformance-'))
    try {
      const lines = ['FROM e2bdev/base', 'ENV WORD=built', 'WORKDIR /srv/app', 'COPY a.txt texts/', 'RUN echo $WORD > word']
      fs.writeFileSync(path.join(context, 'e2b.Dockerfile'), lines.join('\n') + '\n')
      fs.writeFileSync(path.join(context, 'a.txt'), 'a')
      await succeed('template', 'create', name, '--path', context, '--dockerfile', 'e2b.Dockerfile', '--memory-mb', '512')
    } finally {
      fs.rmSync(context, { recursive: true })
    }
    const output = await succeed('sandbox', 'create', '--detach', '--timeout', '120', name)
    const made = (await all()).map((s) => s.sandboxId).find((id) => output.includes(id))
    try {
      assert.equal(await succeed('sandbox', 'exec', made, 'cat', '/srv/app/word', '/srv/app/texts/a.txt'), 'built\na')
    } finally {
      await e2b('sandbox', 'kill', made)
    }
  },
  async 'template-delete-installed'() {
    const answer = await e2b('template', 'delete', '--yes', TEMPLATE)
    assert.notEqual(answer.status, 0, answer.stdout)
    assert.ok(`${answer.stdout}${answer.stderr}`.includes('cannot be deleted by clients'), `${answer.stdout}${answer.stderr}`)
    await withSandbox(async () => {})
  },
  async 'list-templates'() {
    const templates = JSON.parse(await succeed('template', 'list', '--format', 'json'))
    assert.ok(JSON.stringify(templates).includes(TEMPLATE), JSON.stringify(templates))
  },
}

const emit = (line) => fs.writeSync(1, JSON.stringify(line) + '\n')
const wanted = process.argv.slice(2)
if (wanted.length === 1 && wanted[0] === '--list') {
  for (const name of Object.keys(cases)) emit({ case: name })
} else {
  for (const name of wanted) {
    emit({ begin: name })
    const began = performance.now()
    let [verdict, why] = ['pass', '']
    try {
      if (!cases[name]) throw new Error('the suite has no such case')
      await cases[name]()
    } catch (error) {
      ;[verdict, why] = ['fail', `${error.name}: ${error.message}`.slice(0, 800)]
    }
    emit({ end: name, verdict, why, seconds: (performance.now() - began) / 1000 })
  }
}
process.exit(0)
