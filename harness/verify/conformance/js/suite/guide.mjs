// The programs in docs/use/quickstart.md, or in another guide for another area, exactly as printed there.

import { execFile } from 'node:child_process'
import fs from 'node:fs'
import path from 'node:path'
import { ok, same } from './case.mjs'

function program(guide) {
  const text = fs.readFileSync(path.join(import.meta.dirname, guide), 'utf8')
  const found = text.match(/```js[^\n]*\n([\s\S]*?)```[\s\S]*?```text\n([\s\S]*?)```/)
  ok(found, 'there is no program')
  return found.slice(1)
}

export function run(environment = {}, guide = 'quickstart.md') {
  const [code, wanted] = program(guide)
  const options = { cwd: import.meta.dirname, env: { ...process.env, ...environment } }
  return new Promise((resolve, reject) => {
    const child = execFile(process.execPath, ['--input-type=module', '-'], options, (error, stdout, stderr) => {
      try {
        same([stdout, error?.code ?? 0, stderr], [wanted, 0, ''])
        resolve()
      } catch (difference) {
        reject(difference)
      }
    })
    child.stdin.end(code)
  })
}

export const cases = {
  quickstart: () => run(),
  'quickstart-https': () =>
    run({
      E2B_API_URL: process.env.CONFORMANCE_HTTPS_URL,
      E2B_SANDBOX_URL: process.env.CONFORMANCE_HTTPS_URL,
      E2B_API_KEY: process.env.CONFORMANCE_HTTPS_KEY,
      NODE_EXTRA_CA_CERTS: process.env.CONFORMANCE_HTTPS_CA,
    }),
}
