// Ports of a sandbox, as clients reach them. All requests go to the API's address; the Host header selects the sandbox.

import http from 'node:http'
import { ok, raises, same, until, withSandbox } from './case.mjs'

function get(host, path = '/', headers = {}) {
  const url = new URL(process.env.E2B_SANDBOX_URL)
  return new Promise((resolve, reject) => {
    const options = { host: url.hostname, port: url.port, path, headers: { host, ...headers }, agent: false }
    http.get(options, async (answer) => {
      const pieces = []
      for await (const piece of answer) pieces.push(piece)
      resolve({ status: answer.statusCode, body: Buffer.concat(pieces).toString() })
    }).on('error', reject)
  })
}

const SERVER = `
const http = require('http')
http.createServer((q, a) => a.end(JSON.stringify({ path: q.url, host: q.headers.host }))).listen(8000, '127.0.0.1')
`

async function serve(s) {
  await s.files.write('/home/user/server.js', SERVER)
  await s.commands.run('node /home/user/server.js', { background: true, timeoutMs: 0 })
  await until('the server', async () =>
    (await s.commands.run('(exec 3<>/dev/tcp/127.0.0.1/8000) 2>/dev/null && echo up || true')).stdout)
}

const OUT = { allowOut: ['192.0.2.1', '198.51.100.0/24', '*.example.com'], denyOut: ['0.0.0.0/0'] }

async function outbound(s) {
  const { network = {} } = await s.getInfo()
  return [network.allowOut, network.denyOut]
}

/** Checks that a sandbox with these options is refused, with an error that contains the word. */
async function refused(word, options) {
  const error = await raises(Error, withSandbox(async () => {}, options))
  ok(error.message.includes(word), error.message)
}

export const cases = {
  async 'get-host'() {
    await withSandbox(async (s) => ok(s.getHost(8000).startsWith(`8000-${s.sandboxId}.`), s.getHost(8000)))
  },
  async 'http-service'() {
    await withSandbox(async (s) => {
      await serve(s)
      const host = s.getHost(8000)
      const answer = await get(host, '/a%20b?c=d')
      same([answer.status, JSON.parse(answer.body)], [200, { path: '/a%20b?c=d', host }])
    })
  },
  async 'closed-port'() {
    await withSandbox(async (s) => {
      const answer = await get(s.getHost(8123))
      same(answer.status, 502)
      ok(JSON.parse(answer.body).message.includes('port is not open'), answer.body)
    })
  },
  async 'traffic-token'() {
    await withSandbox(async (s) => {
      await serve(s)
      const host = s.getHost(8000)
      same((await get(host)).status, 403)
      same((await get(host, '/', { 'e2b-traffic-access-token': s.trafficAccessToken })).status, 200)
    }, { network: { allowPublicTraffic: false } })
  },
  async 'network-allow-out'() {
    await withSandbox(async (s) => same(await outbound(s), [OUT.allowOut, OUT.denyOut]), { network: OUT })
    await refused('ALL_TRAFFIC', { network: { allowOut: ['example.com'] } })
  },
  async 'network-deny'() {
    await withSandbox(async (s) => same((await s.getInfo()).allowInternetAccess, false), { allowInternetAccess: false })
    await refused('example.com', { network: { denyOut: ['example.com'] } })
  },
  async 'network-update'() {
    await withSandbox(async (s) => {
      await s.updateNetwork(OUT)
      same(await outbound(s), [OUT.allowOut, OUT.denyOut])
      await s.updateNetwork({})
      same(await outbound(s), [undefined, undefined])
    })
  },
}
