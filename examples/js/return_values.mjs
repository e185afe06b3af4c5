// Results of cells: the last value, printed output, errors, and tables as data.

import { Sandbox } from '@e2b/code-interpreter'

const sandbox = await Sandbox.create({ timeoutMs: 300_000 })
try {
  const cell = await sandbox.runCode("print('working')\n6 * 7")
  console.log('value', cell.text, 'printed', cell.logs.stdout.join('').trim())

  const shape = await sandbox.runCode("{'rows': 2, 'columns': ['a', 'b']}")
  console.log('columns', shape.results[0].json.columns.join(' '))

  const failed = await sandbox.runCode("int('many')")
  console.log(failed.error.name, '-', failed.error.value)

  const table = await sandbox.runCode("import pandas\npandas.DataFrame({'a': [1, 2], 'b': [3.5, 4.5]})")
  console.log('table', JSON.stringify(table.results[0].data))

  const script = await sandbox.runCode('[1, 2, 3].map((n) => n * n).join()', { language: 'js' })
  console.log('squares', script.text)
} finally {
  await sandbox.kill()
}

// Prints:
// value 42 printed working
// columns a b
// ValueError - invalid literal for int() with base 10: 'many'
// table {"a":[1,2],"b":[3.5,4.5]}
// squares 1,4,9
