// Building templates. Built templates stay on the server, under unique names.

import crypto from 'node:crypto'
import fs from 'node:fs'
import os from 'node:os'
import path from 'node:path'
import { BuildError, Template, waitForFile, waitForURL } from 'e2b'
import { TEMPLATE, ok, raises, same, until, withSandbox } from './case.mjs'

const SIZE = { cpuCount: 2, memoryMB: 512 }
export const unique = () => `conformance-${crypto.randomBytes(6).toString('hex')}`
const base = (options) => Template(options).fromTemplate(TEMPLATE)

/** Builds a template and returns the messages of its log. */
export async function build(template, name, options = {}) {
  const log = []
  await Template.build(template, name, { onBuildLogs: (entry) => log.push(entry.message), ...SIZE, ...options })
  return log
}

export const output = async (s, command, options) => (await s.commands.run(command, options)).stdout

// The steps are those of one suite: the last word of the first variable is different in each.
const DOCKERFILE = `
FROM e2bdev/base
ARG GREETING=hello
ENV WORD=$GREETING-NAME \\
    PORT=8124
WORKDIR /srv/app
COPY a.txt src texts/
COPY --chown=user:user a.txt .
RUN echo $WORD > word && \\
    id -un > who
USER user
RUN id -un > /tmp/who
CMD ["python3", "-m", "http.server", "8124"]
`

export const cases = {
  async 'template-build'() {
    const name = unique()
    const context = fs.mkdtempSync(path.join(os.tmpdir(), 'conformance-'))
    try {
      fs.mkdirSync(path.join(context, 'src/below'), { recursive: true })
      for (const [file, text] of Object.entries({ 'src/a.txt': 'a', 'src/b.txt': 'b', 'src/below/c': 'c', 'tool.sh': '#!/bin/sh\necho tool\n' })) {
        fs.writeFileSync(path.join(context, file), text)
      }
      fs.symlinkSync('a.txt', path.join(context, 'src/link'))
      const template = base({ fileContextPath: context })
        .setEnvs({ WORD: 'built', PLACE: '$HOME/place' })
        .setWorkdir('/srv/app')
        .copy('src', 'src')
        .copy('src/*.txt', 'texts/')
        .copy('tool.sh', '/usr/local/bin/tool', { user: 'root', mode: 0o755 })
        .runCmd(['echo $WORD > word', 'echo $PLACE > place'])
        .runCmd('id -un > /root/who', { user: 'root' })
        .makeSymlink('word', 'alias')
      const log = await build(template, name)
      ok(log.some((line) => line.includes('eady')), log.join('\n'))
    } finally {
      fs.rmSync(context, { recursive: true })
    }
    await withSandbox(
      async (s) => {
        same(await s.files.read('/srv/app/word'), 'built\n')
        same(await s.files.read('/srv/app/place'), '/root/place\n')
        same(await output(s, 'cat src/link src/below/c texts/b.txt alias'), 'acbbuilt\n')
        same(await output(s, 'tool; pwd; stat -c %U word'), 'tool\n/srv/app\nuser\n')
        same(await output(s, 'cat /root/who', { user: 'root' }), 'root\n')
        same(await output(s, 'echo ${WORD-none}'), 'none\n')
      },
      { template: name }
    )
  },
  async 'template-from-image'() {
    const name = unique()
    const log = await build(Template().fromImage('e2bdev/base').runCmd(`echo ${name} > it`), name)
    ok(log.some((line) => line.includes('FROM e2bdev/base')), log.join('\n'))
    await withSandbox(async (s) => same(await s.files.read('/home/user/it'), `${name}\n`), { template: name })
  },
  async 'template-from-dockerfile'() {
    const name = unique()
    const context = fs.mkdtempSync(path.join(os.tmpdir(), 'conformance-'))
    try {
      fs.mkdirSync(path.join(context, 'src'))
      for (const file of ['a.txt', 'src/b.txt']) fs.writeFileSync(path.join(context, file), file)
      await build(Template({ fileContextPath: context }).fromDockerfile(DOCKERFILE.replace('NAME', name)), name)
    } finally {
      fs.rmSync(context, { recursive: true })
    }
    await withSandbox(
      async (s) => {
        same(await output(s, 'pwd; cat word who /tmp/who'), `/srv/app\nhello-${name}\nroot\nuser\n`)
        same(await output(s, 'cat texts/a.txt texts/b.txt'), 'a.txtsrc/b.txt')
        same(await output(s, 'stat -c %U a.txt texts/a.txt word'), 'user\nroot\nroot\n')
        same(await output(s, 'curl -s localhost:8124/word'), `hello-${name}\n`)
      },
      { template: name }
    )
  },
  async 'template-from-registry'() {
    const [image, locked] = [process.env.CONFORMANCE_IMAGE, process.env.CONFORMANCE_LOCKED_IMAGE]
    const text = 'hello from a registry\n'
    const credentials = { username: 'user', password: 'secret' }
    for (const template of [Template().fromImage(image), Template().fromImage(locked, credentials)]) {
      const name = unique()
      await build(template.runCmd(`(cat /greeting; echo $WORD; echo ${name}) > it`), name)
      const show = async (s) => same(await output(s, 'cat it; id -un; echo ${WORD-none}'), `${text}${text}${name}\nuser\nnone\n`)
      await withSandbox(show, { template: name })
    }
    const wrong = { username: 'user', password: 'wrong' }
    for (const refused of [Template().fromImage(locked), Template().fromImage(locked, wrong)]) {
      const error = await raises(BuildError, build(refused, unique()))
      ok(error.message.includes('denies access') && !error.message.includes('wrong'), error.message)
    }
  },
  async 'template-start-command'() {
    const name = unique()
    const template = base()
      .runCmd('echo served > index.html')
      .setStartCmd('python3 -m http.server 8123', waitForURL('http://localhost:8123/'))
    await build(template, name)
    for (let clone = 0; clone < 2; clone++) {
      await withSandbox(async (s) => same(await output(s, 'curl -s localhost:8123/index.html'), 'served\n'), {
        template: name,
      })
    }
  },
  async 'template-cache'() {
    const name = unique()
    // With a unique step, because suites of other SDKs run at the same time and share the cache.
    const drawing = `cat /proc/sys/kernel/random/uuid > drawn  # ${name}`
    const template = (last) => base().runCmd(drawing).runCmd(last)
    const drawn = () => withSandbox((s) => s.files.read('/home/user/drawn'), { template: name })
    await build(template('echo 1 > last'), name)
    const first = await drawn()
    const log = await build(template('echo 2 > last'), name)
    ok(log.some((line) => line.includes('CACHED')), log.join('\n'))
    same(await drawn(), first)
    await build(template('echo 2 > last'), name, { skipCache: true })
    ok((await drawn()) !== first, 'the step was not done again')
  },
  async 'template-failures'() {
    const failing = base().runCmd('echo before').runCmd('exit 7')
    const error = await raises(BuildError, build(failing, unique()))
    ok(error.message.includes("failed to run command 'exit 7': exit status 7"), error.message)
    ok(error.stack.includes('templates.mjs'), error.stack)
    const unknown = base().runCmd('true', { user: 'root123' })
    const text = "failed to run command 'true': command failed: unauthenticated: invalid username: 'root123'"
    const refused = await raises(BuildError, build(unknown, unique()))
    ok(refused.message.includes(text), refused.message)
    const started = base().setStartCmd('exit 3', waitForFile('/never'))
    const ended = await raises(BuildError, build(started, unique()))
    ok(ended.message.includes('start command failed'), ended.message)
    await raises(BuildError, build(Template().fromTemplate(`no-${unique()}`), unique()))
  },
  async 'template-in-background-and-tags'() {
    const name = unique()
    const template = base().runCmd('sleep 1; echo built > it')
    const info = await Template.buildInBackground(template, `${name}:v1`, SIZE)
    const status = await until(
      'the end of the build',
      async () => {
        const { status } = await Template.getBuildStatus(info)
        return ['waiting', 'building'].includes(status) ? undefined : status
      },
      100_000
    )
    same(status, 'ready')
    const tags = async () => (await Template.getTags(name)).map((tag) => tag.tag).sort()
    await Template.assignTags(`${name}:v1`, ['stable', 'next'])
    same(await tags(), ['next', 'stable', 'v1'])
    await Template.removeTags(name, 'next')
    same(await tags(), ['stable', 'v1'])
    await withSandbox(async (s) => same(await s.files.read('/home/user/it'), 'built\n'), { template: `${name}:stable` })
    same(await Template.exists(unique()), false)
  },
}
