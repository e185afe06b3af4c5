// Runs cases of the conformance suite. Its output has the same lines as that of python/suite/run.py.

import fs from 'node:fs'
import { Absent } from './case.mjs'
import * as guide from './guide.mjs'
import * as examples from './examples.mjs'
import * as sandboxes from './sandboxes.mjs'
import * as commands from './commands.mjs'
import * as files from './files.mjs'
import * as network from './network.mjs'
import * as lifecycle from './lifecycle.mjs'
import * as interpreter from './interpreter.mjs'
import * as templates from './templates.mjs'
import * as dockerfiles from './dockerfiles.mjs'

const cases = new Map()
for (const area of [guide, examples, sandboxes, commands, files, network, lifecycle, interpreter, templates, dockerfiles]) {
  for (const [name, run] of Object.entries(area.cases)) {
    if (cases.has(name)) throw new Error(`two cases are called ${name}`)
    cases.set(name, run)
  }
}

const emit = (line) => fs.writeSync(1, JSON.stringify(line) + '\n')
// Output of SDKs and cases goes to standard error, so that it cannot be mistaken for a verdict.
console.log = console.info = console.debug = console.error

// A stream that fails while no code awaits it fails the case, but does not end the suite.
let stray = null
process.on('unhandledRejection', (error) => (stray ??= error))

const describe = (error) => {
  const frame = String(error?.stack ?? '').split('\n').find((l) => l.includes('/suite/') && !l.includes('case.mjs'))
  const place = frame?.match(/suite\/(\w+\.mjs:\d+)/)?.[1] ?? ''
  return `${place} ${error?.name ?? 'Error'}: ${error?.message ?? error}`.trim().slice(0, 800)
}

const run = async (name) => {
  stray = null
  try {
    if (!cases.has(name)) throw new Error('the suite has no such case')
    await cases.get(name)()
    if (stray) throw stray
    return ['pass', '']
  } catch (error) {
    return error instanceof Absent ? ['absent', error.message] : ['fail', describe(error)]
  }
}

const wanted = process.argv.slice(2)
if (wanted.length === 1 && wanted[0] === '--list') {
  for (const name of cases.keys()) emit({ case: name })
} else {
  for (const name of wanted) {
    emit({ begin: name })
    const began = performance.now()
    const [verdict, why] = await run(name)
    emit({ end: name, verdict, why, seconds: (performance.now() - began) / 1000 })
  }
}
// Exit even if connections are still open.
process.exit(0)
