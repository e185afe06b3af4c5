// Files and watching.

import { randomBytes } from 'node:crypto'
import { FileNotFoundError, FilesystemEventType, InvalidArgumentError } from 'e2b'
import { Absent, ok, raises, same, sleep, until, withSandbox } from './case.mjs'

export const cases = {
  async 'write-and-read'() {
    await withSandbox(async (s) => {
      const info = await s.files.write('greeting.txt', 'hello žluť\n')
      same([info.path, info.name], ['/home/user/greeting.txt', 'greeting.txt'])
      same(await s.files.read('greeting.txt'), 'hello žluť\n')
      same((await s.commands.run('stat -c %U:%G greeting.txt')).stdout, 'user:user\n')
    })
  },
  async 'write-makes-parents'() {
    await withSandbox(async (s) => {
      await s.files.write('/home/user/a/b/c.txt', 'x')
      same(await s.files.read('a/b/c.txt'), 'x')
    })
  },
  async 'write-many'() {
    await withSandbox(async (s) => {
      const infos = await s.files.write([
        { path: 'one.txt', data: '1' },
        { path: '/tmp/two.bin', data: new Uint8Array([0, 255]).buffer },
        { path: 'deep/er/three.txt', data: '3' },
      ])
      same(infos.map((i) => i.path), ['/home/user/one.txt', '/tmp/two.bin', '/home/user/deep/er/three.txt'])
      same([...(await s.files.read('/tmp/two.bin', { format: 'bytes' }))], [0, 255])
      same(await s.files.write([]), [])
    })
  },
  async 'read-formats'() {
    const data = randomBytes(300_000)
    await withSandbox(async (s) => {
      await s.files.write('raw', data.buffer.slice(data.byteOffset, data.byteOffset + data.length))
      ok(data.equals(Buffer.from(await s.files.read('raw', { format: 'bytes' }))), 'bytes differ')
      const blob = await s.files.read('raw', { format: 'blob' })
      ok(data.equals(Buffer.from(await blob.arrayBuffer())), 'blob differs')
      const pieces = []
      for await (const piece of await s.files.read('raw', { format: 'stream' })) pieces.push(piece)
      ok(data.equals(Buffer.concat(pieces)), 'stream differs')
    })
  },
  async 'write-stream'() {
    const data = randomBytes(5_000_000)
    await withSandbox(async (s) => {
      await s.files.write('raw', new Blob([data]).stream())
      ok(data.equals(Buffer.from(await s.files.read('raw', { format: 'bytes' }))), 'bytes differ')
    })
  },
  async 'gzip-both-ways'() {
    const data = 'compress me '.repeat(50_000)
    await withSandbox(async (s) => {
      await s.files.write('z', data, { gzip: true })
      ok((await s.files.read('z')) === data, 'plain read differs')
      ok((await s.files.read('z', { gzip: true })) === data, 'compressed read differs')
      same((await s.commands.run('stat -c %s z')).stdout, `${data.length}\n`)
    })
  },
  async 'large-file'() {
    const data = randomBytes(32 << 20)
    await withSandbox(async (s) => {
      await s.files.write('big', new Blob([data]))
      ok(data.equals(Buffer.from(await s.files.read('big', { format: 'bytes' }))), 'bytes differ')
    })
  },
  async 'empty-file'() {
    await withSandbox(async (s) => {
      await s.files.write('empty', '')
      same(await s.files.read('empty'), '')
    })
  },
  async 'read-missing'() {
    await withSandbox(async (s) => void (await raises(FileNotFoundError, s.files.read('/no/such'))))
  },
  async 'read-directory'() {
    await withSandbox(async (s) => void (await raises(InvalidArgumentError, s.files.read('/home/user'))))
  },
  async exists() {
    await withSandbox(async (s) => {
      await s.files.write('here', 'x')
      same([await s.files.exists('here'), await s.files.exists('there')], [true, false])
    })
  },
  async 'get-info'() {
    await withSandbox(async (s) => {
      await s.files.write('f.txt', '12345')
      const info = await s.files.getInfo('f.txt')
      same([info.name, info.path, info.type, info.size, info.mode, info.permissions, info.owner, info.group],
        ['f.txt', '/home/user/f.txt', 'file', 5, 0o644, '-rw-r--r--', 'user', 'user'])
      ok(Math.abs(info.modifiedTime - Date.now()) < 60_000, String(info.modifiedTime))
      await raises(FileNotFoundError, s.files.getInfo('nowhere'))
    })
  },
  async symlinks() {
    await withSandbox(async (s) => {
      await s.commands.run('echo x > target; ln -s target link')
      same((await s.files.getInfo('link')).symlinkTarget, '/home/user/target')
      same(await s.files.read('link'), 'x\n')
    })
  },
  async 'make-dir'() {
    await withSandbox(async (s) => {
      same(await s.files.makeDir('a/b/c'), true)
      same(await s.files.makeDir('a/b/c'), false)
    })
  },
  async 'list-depth'() {
    await withSandbox(async (s) => {
      await s.commands.run('mkdir -p tree/one/two/three; touch tree/f tree/one/g')
      const names = async (opts) => (await s.files.list('tree', opts)).map((e) => e.path.replace('/home/user/tree/', '')).sort()
      same(await names(), ['f', 'one'])
      same(await names({ depth: 2 }), ['f', 'one', 'one/g', 'one/two'])
    })
  },
  async 'list-errors'() {
    await withSandbox(async (s) => {
      await s.files.write('f', 'x')
      await raises(FileNotFoundError, s.files.list('nowhere'))
      await raises(InvalidArgumentError, s.files.list('f'))
    })
  },
  async rename() {
    await withSandbox(async (s) => {
      await s.files.write('old', 'x')
      same((await s.files.rename('old', 'new')).path, '/home/user/new')
      same([await s.files.exists('old'), await s.files.read('new')], [false, 'x'])
      await raises(FileNotFoundError, s.files.rename('old', 'other'))
    })
  },
  async remove() {
    await withSandbox(async (s) => {
      await s.commands.run('mkdir -p d/e; touch d/e/f')
      await s.files.remove('d')
      same(await s.files.exists('d'), false)
    })
  },
  async 'other-users'() {
    await withSandbox(async (s) => {
      await s.files.write('/root/secret', 'x', { user: 'root' })
      same(await s.files.read('/root/secret', { user: 'root' }), 'x')
    })
  },
  async 'odd-names'() {
    await withSandbox(async (s) => {
      for (const name of ['with blank', 'žluť 🐎', 'a&b=c?d#e%20', 'plus+plus']) {
        await s.files.write(name, name)
        same(await s.files.read(name), name)
        ok((await s.files.list('.')).some((e) => e.name === name), name)
      }
    })
  },
  async 'file-metadata'() {
    await withSandbox(async (s) => {
      await s.files.write('m', 'x', { metadata: { author: 'me' } })
      const info = await s.files.getInfo('m')
      if (!('metadata' in info)) throw new Absent('no metadata in EntryInfo')
      same(info.metadata, { author: 'me' })
    })
  },
  async 'signed-download'() {
    await withSandbox(async (s) => {
      await s.files.write('f.txt', 'signed')
      const answer = await fetch(await s.downloadUrl('f.txt', { user: 'user', useSignatureExpiration: 60 }))
      same([answer.status, await answer.text()], [200, 'signed'])
    })
  },
  async 'signed-download-expires'() {
    await withSandbox(async (s) => {
      await s.files.write('f.txt', 'signed')
      const url = await s.downloadUrl('f.txt', { user: 'user', useSignatureExpiration: 1 })
      await sleep(2_500)
      const answer = await fetch(url)
      same(answer.status, 401)
      ok((await answer.text()).includes('signature is already expired'))
    })
  },
  async 'signed-upload'() {
    await withSandbox(async (s) => {
      const form = new FormData()
      form.append('file', new Blob(['uploaded']), 'up.txt')
      const answer = await fetch(await s.uploadUrl('up.txt', { user: 'user' }), { method: 'POST', body: form })
      same(answer.status, 200)
      same(await s.files.read('up.txt'), 'uploaded')
    })
  },
  async 'watch-async'() {
    await withSandbox(async (s) => {
      await s.files.makeDir('w')
      const seen = []
      const handle = await s.files.watchDir('w', (event) => void seen.push([event.name, event.type]))
      await s.files.write('w/f.txt', 'x')
      await until('the write', () => seen.some(([name, type]) => name === 'f.txt' && type === FilesystemEventType.WRITE))
      same(seen, [['f.txt', FilesystemEventType.CREATE], ['f.txt', FilesystemEventType.CHMOD], ['f.txt', FilesystemEventType.WRITE]])
      await handle.stop()
    })
  },
  async 'watch-recursive'() {
    await withSandbox(async (s) => {
      await s.files.makeDir('w/a/b')
      const seen = []
      const handle = await s.files.watchDir('w', (event) => void seen.push(event.name), { recursive: true })
      await s.files.write('w/a/b/deep.txt', 'x')
      await until('the event', () => seen.includes('a/b/deep.txt'))
      await handle.stop()
    })
  },
  async 'watch-errors'() {
    await withSandbox(async (s) => {
      await s.files.write('f', 'x')
      await raises(Error, s.files.watchDir('nowhere', () => {}))
      await raises(Error, s.files.watchDir('f', () => {}))
    })
  },
}
