// Distributes work over ten concurrent sandboxes.

import { Sandbox } from 'e2b'

async function countPrimes(part) {
  const sandbox = await Sandbox.create('base', { timeoutMs: 300_000 })
  try {
    const code =
      `low = ${part} * 100\n` +
      'print(sum(all(n % d for d in range(2, n)) for n in range(max(low, 2), low + 100)))'
    await sandbox.files.write('count.py', code)
    const result = await sandbox.commands.run('python3 count.py')
    return Number(result.stdout)
  } finally {
    await sandbox.kill()
  }
}

const counts = await Promise.all(Array.from({ length: 10 }, (_, part) => countPrimes(part)))
console.log(counts.join(' '))
console.log('primes below 1000:', counts.reduce((a, b) => a + b))

// Prints:
// 25 21 16 16 17 14 16 14 15 14
// primes below 1000: 168
