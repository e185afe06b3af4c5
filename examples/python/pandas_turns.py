"""Works on one table in three cells: variables of a cell are available in the next one."""

from e2b_code_interpreter import Sandbox

CSV = "region,month,amount\nnorth,1,10\nsouth,1,5\nnorth,2,7\nsouth,2,9\n"

with Sandbox.create(timeout=300) as sandbox:
    sandbox.files.write("sales.csv", CSV)
    loaded = sandbox.run_code("import pandas as pd\nsales = pd.read_csv('sales.csv')\nlen(sales)")
    print("rows", loaded.text)
    totals = sandbox.run_code("totals = sales.groupby('region').amount.sum().reset_index()\ntotals")
    print("totals", totals.results[0].data)
    best = sandbox.run_code("totals.sort_values('amount').region.iloc[-1]")
    print("best", best.text)

# Prints:
# rows 4
# totals {'region': ['north', 'south'], 'amount': [17, 14]}
# best north
