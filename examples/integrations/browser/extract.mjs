// node extract.mjs DIR: writes the Chromium of the npm package @sparticuz/chromium and its libraries to DIR.
import { createReadStream, createWriteStream, mkdirSync, readdirSync, chmodSync } from 'node:fs'
import { spawnSync } from 'node:child_process'
import { pipeline } from 'node:stream/promises'
import { createBrotliDecompress } from 'node:zlib'
import path from 'node:path'

const target = process.argv[2]
const packages = path.join(process.cwd(), 'node_modules/@sparticuz/chromium/bin')
mkdirSync(target, { recursive: true })
for (const name of readdirSync(packages, { recursive: true }).filter((name) => name.endsWith('.br'))) {
  const out = path.join(target, path.basename(name, '.br'))
  await pipeline(createReadStream(path.join(packages, name)), createBrotliDecompress(), createWriteStream(out))
  if (out.endsWith('.tar')) spawnSync('tar', ['-xf', out, '-C', target], { stdio: 'inherit' })
  else chmodSync(out, 0o755)
}
