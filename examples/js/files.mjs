// Writes and reads files from outside of the sandbox, and uses them inside.

import { Sandbox } from 'e2b'

const sandbox = await Sandbox.create('base', { timeoutMs: 300_000 })
try {
  await sandbox.files.write('data/numbers.txt', '3\n1\n2\n')
  await sandbox.commands.run('sort data/numbers.txt > data/sorted.txt')
  console.log((await sandbox.files.read('data/sorted.txt')).trim().split('\n').join(' '))

  const image = Uint8Array.from({ length: 256 }, (_, index) => index)
  await sandbox.files.write('data/image.bin', new Blob([image]))
  const back = await sandbox.files.read('data/image.bin', { format: 'bytes' })
  console.log('unchanged:', Buffer.from(back).equals(Buffer.from(image)))

  const entries = await sandbox.files.list('data')
  for (const { name, size } of entries.sort((a, b) => a.name.localeCompare(b.name))) console.log(name, size)

  await sandbox.files.rename('data/sorted.txt', 'result.txt')
  await sandbox.files.remove('data')
  console.log(await sandbox.files.exists('data'), await sandbox.files.exists('result.txt'))
} finally {
  await sandbox.kill()
}

// Prints:
// 1 2 3
// unchanged: true
// image.bin 256
// numbers.txt 6
// sorted.txt 6
// false true
