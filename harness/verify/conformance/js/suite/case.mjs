// Helpers of the cases: sandboxes, comparisons, waiting.

import assert from 'node:assert/strict'
import { Sandbox } from 'e2b'

export const TEMPLATE = process.env.CONFORMANCE_TEMPLATE ?? 'base'

/** This SDK lacks the feature. */
export class Absent extends Error {}

export const same = (got, want) => assert.deepEqual(got, want)
export const ok = (value, message) => assert.ok(value, message)
export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms))

/** Creates a sandbox, calls a function with it, and kills it. */
export async function withSandbox(use, { template = TEMPLATE, ...options } = {}) {
  const sandbox = await Sandbox.create(template, { timeoutMs: 120_000, ...options })
  try {
    return await use(sandbox)
  } finally {
    await Sandbox.kill(sandbox.sandboxId)
  }
}

/** Waits until the condition returns a true value, and returns it. */
export async function until(what, condition, withinMs = 10_000) {
  const deadline = Date.now() + withinMs
  for (;;) {
    const value = await condition()
    if (value) return value
    ok(Date.now() < deadline, `${what}: not within ${withinMs} ms`)
    await sleep(50)
  }
}

/** Returns the error of a promise, which must be of this kind. */
export async function raises(kind, promise) {
  let value
  try {
    value = await promise
  } catch (error) {
    if (error instanceof kind) return error
    throw error
  }
  throw new Error(`no ${kind.name} was thrown; the result was ${JSON.stringify(value)}`)
}
