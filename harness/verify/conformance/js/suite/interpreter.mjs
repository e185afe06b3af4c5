// runCode: the code interpreter package, on sandboxes of the template code-interpreter-v1.

import { run as runGuide } from './guide.mjs'
import { Absent, ok, raises, same } from './case.mjs'

const { Sandbox } = await import('@e2b/code-interpreter').catch(() => ({}))

async function withInterpreter(use, options = {}) {
  if (!Sandbox) throw new Absent('the code interpreter package needs the newest SDK')
  const sandbox = await Sandbox.create({ timeoutMs: 120_000, ...options })
  try {
    return await use(sandbox)
  } finally {
    await sandbox.kill()
  }
}

/** The value of a cell, which must not fail. */
function text(execution) {
  ok(!execution.error, JSON.stringify(execution.error))
  return execution.text
}

function printed(execution) {
  ok(!execution.error, JSON.stringify(execution.error))
  return execution.logs.stdout.join('')
}

export const cases = {
  'run-code': () =>
    withInterpreter(async (s) => {
      const first = await s.runCode('x = 1; x')
      same([text(first), first.executionCount], ['1', 1])
      const second = await s.runCode("x += 1\nprint('out')\nx")
      same([text(second), printed(second), second.executionCount], ['2', 'out\n', 2])
      same(second.toJSON().logs.stdout, ['out\n'])
    }),

  'run-code-guide': () => {
    if (!Sandbox) throw new Absent('the code interpreter package needs the newest SDK')
    return runGuide({}, 'interpreter.md')
  },

  'run-code-streams': () =>
    withInterpreter(async (s) => {
      const heard = []
      const code =
        "import sys\nprint('a', flush=True)\nprint('b', file=sys.stderr, flush=True)\ndisplay('c')\n1/0"
      await s.runCode(code, {
        onStdout: (m) => heard.push(['out', m.line, m.error]),
        onStderr: (m) => heard.push(['err', m.line, m.error]),
        onResult: (r) => heard.push(['result', r.text, r.isMainResult]),
        onError: (e) => heard.push(['error', e.name, e.value]),
      })
      const last = [['result', 'c', false], ['error', 'ZeroDivisionError', 'division by zero']]
      same(heard.slice(2), last)
      same(heard.slice(0, 2).sort(), [['err', 'b\n', true], ['out', 'a\n', false]])
    }),

  'run-code-errors': () =>
    withInterpreter(async (s) => {
      const { error } = await s.runCode("{}['k']")
      same([error.name, error.value], ['KeyError', "'k'"])
      ok(error.traceback.includes("{}['k']"), error.traceback)
      same((await s.runCode("throw new TypeError('t')", { language: 'js' })).error.name, 'TypeError')
      same(text(await s.runCode('3')), '3')
    }),

  'run-code-results': () =>
    withInterpreter(async (s) => {
      const code =
        "from IPython.display import *\n" +
        "display(HTML('<b>h</b>'), Markdown('# m'), Latex('$l$'), JSON({'k': [1]}))"
      const { results } = await s.runCode(code)
      same(results.map((r) => r.html ?? r.markdown ?? r.latex ?? r.json), ['<b>h</b>', '# m', '$l$', { k: [1] }])
    }),

  'run-code-data-frame': () =>
    withInterpreter(async (s) => {
      const done = await s.runCode("import pandas as pd\npd.DataFrame({'a': [1, 2], 'b': ['x', None]})")
      same(done.results[0].data, { a: [1, 2], b: ['x', null] })
      ok(done.results[0].html.includes('<table'))
    }),

  'run-code-charts': () =>
    withInterpreter(async (s) => {
      const draw = 'import matplotlib.pyplot as plt\n'
      const done = await s.runCode(draw + "plt.plot([1, 2], [3, 4], label='l'); plt.title('t'); plt.show()")
      const { chart, png } = done.results[0]
      ok(Buffer.from(png, 'base64').subarray(1, 4).equals(Buffer.from('PNG')))
      same([chart.type, chart.title, chart.elements[0].points], ['line', 't', [[1, 3], [2, 4]]])
      const bars = await s.runCode(draw + "plt.bar(['a', 'b'], [1, 2]); plt.show()")
      same(bars.results[0].chart.type, 'bar')
    }),

  'run-code-envs': () =>
    withInterpreter(
      async (s) => {
        for (const [language, code] of [
          ['python', "import os; print(os.environ.get('WIDE'), os.environ.get('BOTH'))"],
          ['js', 'console.log(process.env.WIDE, process.env.BOTH)'],
          ['ts', 'console.log(process.env.WIDE as string, process.env.BOTH)'],
          ['bash', 'echo $WIDE $BOTH'],
        ]) {
          const said = async (envs) => [language, printed(await s.runCode(code, { language, envs }))]
          same(await said(undefined), [language, 'wide wide\n'])
          same(await said({ BOTH: 'one' }), [language, 'wide one\n'])
          // The variables apply to one call only.
          same(await said(undefined), [language, 'wide wide\n'])
        }
      },
      { envs: { WIDE: 'wide', BOTH: 'wide' } },
    ),

  'run-code-languages': () =>
    withInterpreter(async (s) => {
      for (const [language, code, wanted] of [
        ['js', 'const p = await Promise.resolve(4); console.log(p)', '4\n'],
        ['javascript', 'console.log(p + 1)', '5\n'],
        ['ts', 'const n: number = 5; console.log(n)', '5\n'],
        ['typescript', 'console.log(n + 1)', '6\n'],
        ['bash', 'v=7; echo $v', '7\n'],
        ['bash', 'echo $((v + 1))', '8\n'],
      ]) {
        same([language, printed(await s.runCode(code, { language }))], [language, wanted])
      }
      same(text(await s.runCode('6 * 7', { language: 'js' })), '42')
      await raises(Error, s.runCode('1', { language: 'cobol' }))
    }),

  'run-code-r': () =>
    withInterpreter(
      async (s) => {
        const r = (code, options) => s.runCode(code, { language: 'r', ...options })
        same(printed(await r("x <- 6; cat('out\\n')")), 'out\n')
        // R's kernel displays values, and marks none of them as the main result.
        const { results } = await r('x * 7')
        same(results.map((v) => [v.text, v.isMainResult]), [['[1] 42', false]])
        ok((await r("stop('bad')")).error.value.includes('bad'))
        const said = "cat(Sys.getenv('WIDE'), Sys.getenv('ONE'))"
        same(printed(await r(said, { envs: { ONE: 'one' } })).trim(), 'wide one')
        same(printed(await r(said)).trim(), 'wide')
        const own = await s.createCodeContext({ language: 'r', cwd: '/tmp' })
        same(printed(await s.runCode("cat(exists('x'), getwd())", { context: own })), 'FALSE /tmp')
      },
      { envs: { WIDE: 'wide' } },
    ),

  'run-code-java': () =>
    withInterpreter(
      async (s) => {
        const java = (code, options) => s.runCode(code, { language: 'java', ...options })
        const first = await java('int x = 6;\nSystem.out.println("out");\nx * 7')
        same([printed(first), text(first)], ['out\n', '42'])
        same((await java('x / 0')).error.name, 'java.lang.ArithmeticException')
        const said = 'System.getProperty("WIDE") + System.getProperty("ONE")'
        same(text(await java(said, { envs: { ONE: 'one' } })), 'wideone')
        same(text(await java(said)), 'widenull')
        const own = await s.createCodeContext({ language: 'java', cwd: '/tmp' })
        same((await s.runCode('x', { context: own })).error.name, 'CompilationException')
        same(text(await java('x')), '6')
      },
      { envs: { WIDE: 'wide' } },
    ),

  'run-code-contexts': () =>
    withInterpreter(async (s) => {
      const before = await s.listCodeContexts()
      same(before.map((c) => c.language).sort(), ['javascript', 'python'])
      const own = await s.createCodeContext({ cwd: '/tmp', language: 'python' })
      same([own.language, own.cwd], ['python', '/tmp'])
      const ids = async () => (await s.listCodeContexts()).map((c) => c.id)
      same(await ids(), [...before.map((c) => c.id), own.id])
      await s.runCode("x = 'own'", { context: own })
      same(text(await s.runCode('x', { context: own })), 'own')
      same((await s.runCode('x')).error.name, 'NameError')
      await s.restartCodeContext(own)
      same((await s.runCode('x', { context: own })).error.name, 'NameError')
      await s.removeCodeContext(own)
      same(await ids(), before.map((c) => c.id))
      await raises(Error, s.runCode('1', { context: own }))
    }),

  'run-code-interrupts': () =>
    withInterpreter(async (s) => {
      same(text(await s.runCode('kept = 7; kept')), '7')
      await raises(Error, s.runCode('import time\nwhile True: time.sleep(0.1)', { timeoutMs: 1000 }))
      // After the client disconnected, the cell was interrupted and the state was kept.
      same(text(await s.runCode('kept', { timeoutMs: 20_000 })), '7')
    }),

  'run-code-ends-its-host': () =>
    withInterpreter(async (s) => {
      same((await s.runCode('import os; os._exit(1)')).error.name, 'UnexpectedEndOfExecution')
      same(text(await s.runCode('1+1')), '2')
    }),

  'run-code-paused': () =>
    withInterpreter(async (s) => {
      await s.runCode('x = [1, 2]')
      await s.runCode('globalThis.y = 3', { language: 'js' })
      await s.pause()
      const again = await Sandbox.connect(s.sandboxId)
      same(text(await again.runCode('x.append(3); x')), '[1, 2, 3]')
      same(text(await again.runCode('y + 1', { language: 'js' })), '4')
    }),
}
