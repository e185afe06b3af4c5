// The programs in examples/js. Each ends with a comment that contains its output.

import { execFile } from 'node:child_process'
import fs from 'node:fs'
import path from 'node:path'
import { Absent, ok, same } from './case.mjs'

const PROGRAMS = path.join(import.meta.dirname, 'examples')
const newest = await import('@e2b/code-interpreter').catch(() => null)

function wanted(text) {
  const [, comment] = text.split('// Prints:\n')
  ok(comment, 'the program does not say what it prints')
  return comment.replaceAll(/^\/\/ /gm, '')
}

function run(program) {
  if (!newest) throw new Absent('the examples need the newest SDK')
  return new Promise((resolve, reject) => {
    execFile(process.execPath, [program], (error, stdout, stderr) => {
      try {
        same([stdout, error?.code ?? 0, stderr], [wanted(fs.readFileSync(program, 'utf8')), 0, ''])
        resolve()
      } catch (difference) {
        reject(difference)
      }
    })
  })
}

const programs = fs.readdirSync(PROGRAMS).filter((name) => name.endsWith('.mjs'))
const name = (program) => `example-${path.basename(program, '.mjs').replaceAll('_', '-')}`

export const cases = Object.fromEntries(programs.map((p) => [name(p), () => run(path.join(PROGRAMS, p))]))
