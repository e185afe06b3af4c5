"""Runs the notebook beside this file as Jupyter does, and prints the outputs of its cells."""

import pathlib

import nbformat
from nbclient import NotebookClient

HERE = pathlib.Path(__file__).parent
notebook = nbformat.read(HERE / "sandbox.ipynb", as_version=4)
NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(HERE)}}).execute()
for cell in notebook.cells:
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            print(output.text, end="")
        elif output.output_type == "error":
            print(output.ename, "with", output.evalue.strip().splitlines()[-1])

# Prints:
# in the sandbox: 6.0
# True
# in the notebook: 6.0
# SandboxError with ZeroDivisionError: float division by zero
