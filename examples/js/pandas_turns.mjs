// Works on one table in three cells: variables of a cell are available in the next one.

import { Sandbox } from '@e2b/code-interpreter'

const CSV = 'region,month,amount\nnorth,1,10\nsouth,1,5\nnorth,2,7\nsouth,2,9\n'

const sandbox = await Sandbox.create({ timeoutMs: 300_000 })
try {
  await sandbox.files.write('sales.csv', CSV)
  const loaded = await sandbox.runCode("import pandas as pd\nsales = pd.read_csv('sales.csv')\nlen(sales)")
  console.log('rows', loaded.text)
  const totals = await sandbox.runCode("totals = sales.groupby('region').amount.sum().reset_index()\ntotals")
  console.log('totals', JSON.stringify(totals.results[0].data))
  const best = await sandbox.runCode("totals.sort_values('amount').region.iloc[-1]")
  console.log('best', best.text)
} finally {
  await sandbox.kill()
}

// Prints:
// rows 4
// totals {"region":["north","south"],"amount":[17,14]}
// best north
