// Dockerfiles as people write them. python/suite/cases/dockerfiles.py describes their directories.

import { execFileSync } from 'node:child_process'
import fs from 'node:fs'
import os from 'node:os'
import path from 'node:path'
import { Template } from 'e2b'
import { raises, same, withSandbox } from './case.mjs'
import { build, output, unique } from './templates.mjs'

const DIRECTORY = path.join(import.meta.dirname, 'dockerfiles')
const OWN = ['prepare.sh', 'check.sh', 'expected']

async function dockerfile(kind) {
  const name = unique()
  const read = (file) => fs.readFileSync(path.join(DIRECTORY, kind, file), 'utf8')
  const context = fs.mkdtempSync(path.join(os.tmpdir(), 'conformance-'))
  try {
    const filter = (file) => !OWN.includes(path.basename(file))
    fs.cpSync(path.join(DIRECTORY, kind), context, { recursive: true, filter })
    const prepare = path.join(DIRECTORY, kind, 'prepare.sh')
    if (fs.existsSync(prepare)) execFileSync('sh', ['-e', prepare], { cwd: context })
    // With a unique step, because suites of other SDKs run at the same time and share the cache.
    const text = read('Dockerfile').replace(/^FROM .*$/m, `$&\nARG SUITE=${name}`)
    await build(Template({ fileContextPath: context }).fromDockerfile(text), name)
  } finally {
    fs.rmSync(context, { recursive: true })
  }
  await withSandbox(async (s) => same(await output(s, read('check.sh')), read('expected')), { template: name })
}

export const cases = {
  async 'dockerfile-multi-stage'() {
    const stages = 'FROM e2bdev/base AS build\nRUN true\nFROM e2bdev/base\nCOPY --from=build /etc/hostname /\n'
    const parsed = (async () => Template().fromDockerfile(stages))()
    same((await raises(Error, parsed)).message, 'Multi-stage Dockerfiles are not supported')
  },
}
for (const kind of fs.readdirSync(DIRECTORY)) cases[`dockerfile-${kind}`] = () => dockerfile(kind)
