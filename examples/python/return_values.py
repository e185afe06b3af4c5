"""Results of cells: the last value, printed output, errors, and tables as data."""

from e2b_code_interpreter import Sandbox

with Sandbox.create(timeout=300) as sandbox:
    cell = sandbox.run_code("print('working')\n6 * 7")
    print("value", cell.text, "printed", cell.logs.stdout)

    shape = sandbox.run_code("{'rows': 2, 'columns': ['a', 'b']}")
    print("columns", shape.results[0].json["columns"])

    failed = sandbox.run_code("int('many')")
    print(failed.error.name, "-", failed.error.value)

    table = sandbox.run_code("import pandas\npandas.DataFrame({'a': [1, 2], 'b': [3.5, 4.5]})")
    print("table", table.results[0].data)

    chart = sandbox.run_code("import matplotlib.pyplot as plt\nplt.plot([1, 2, 3], [2, 4, 8])\nplt.title('growth')\nplt.show()")
    print("chart", chart.results[0].chart.title, "as an image:", len(chart.results[0].png) > 1000)

# Prints:
# value 42 printed ['working\n']
# columns ['a', 'b']
# ValueError - invalid literal for int() with base 10: 'many'
# table {'a': [1, 2], 'b': [3.5, 4.5]}
# chart growth as an image: True
