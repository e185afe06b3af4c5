"""Cells of a notebook that run in a sandbox: `%load_ext sandbox_magic`, then `%%sandbox`.

    %sandbox_start template=base timeout=600     another template, another timeout
    %%sandbox                                    runs the cell; variables stay from cell to cell
    %sandbox_put NAME                            a variable of the notebook becomes one of the sandbox (JSON)
    %sandbox_get NAME                            and the other way round
    %sandbox_stop

The kernel of the notebook stays where it is, with your keys and files. Only the marked cells run in the sandbox. With the template
`code-interpreter-v1`, `run_code` of `e2b-code-interpreter` gives charts and tables too (docs/use/interpreter.md).
"""

import json

from e2b import Sandbox
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

# Executes cells in one namespace. A line of JSON in, lines of JSON out; what cells print comes between.
DRIVER = r"""
import ast, json, sys, traceback
namespace = {"__name__": "__main__"}
for line in sys.stdin:
    order = json.loads(line)
    answer = {"end": True}
    try:
        if "put" in order:
            namespace.update(order["put"])
        elif "get" in order:
            answer["value"] = namespace[order["get"]]
        else:
            tree = ast.parse(order["code"])
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<cell>", "exec"), namespace)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
                if value is not None:
                    print(repr(value))
    except BaseException:
        answer["error"] = traceback.format_exc()
    try:
        text = json.dumps(answer)
    except TypeError as error:
        text = json.dumps({"end": True, "error": str(error)})
    print("\x00" + text, flush=True)
"""


class SandboxError(Exception):
    """A cell failed. Contains the traceback of the sandbox."""


@magics_class
class SandboxMagics(Magics):
    machine = None

    @line_magic
    def sandbox_start(self, line: str = "") -> None:
        options = dict(word.split("=", 1) for word in line.split())
        self.sandbox_stop()
        self.machine = Sandbox.create(options.get("template", "base"), timeout=int(options.get("timeout", 600)))
        self.machine.files.write("/tmp/driver.py", DRIVER)
        # A timeout of 0: for as long as the sandbox.
        self.process = self.machine.commands.run("python3 -u /tmp/driver.py", background=True, stdin=True, timeout=0)
        self.events = iter(self.process)
        self.rest = ""

    @line_magic
    def sandbox_stop(self, line: str = "") -> None:
        if self.machine is not None:
            self.machine.kill()
            self.machine = None

    @cell_magic
    def sandbox(self, line: str, cell: str) -> None:
        self.ask({"code": cell})

    @line_magic
    def sandbox_put(self, line: str) -> None:
        self.ask({"put": {name: self.shell.user_ns[name] for name in line.split()}})

    @line_magic
    def sandbox_get(self, line: str) -> None:
        for name in line.split():
            self.shell.user_ns[name] = self.ask({"get": name}).get("value")

    def ask(self, order: dict) -> dict:
        if self.machine is None:
            self.sandbox_start()
        self.machine.commands.send_stdin(self.process.pid, json.dumps(order) + "\n")
        while True:
            before, mark, after = self.rest.partition("\x00")
            if mark and "\n" in after:
                text, _, self.rest = after.partition("\n")
                print(before, end="")
                answer = json.loads(text)
                if "error" in answer:
                    raise SandboxError(answer["error"])
                return answer
            stdout, stderr, _ = next(self.events)
            self.rest += stdout or ""
            if stderr:
                print(stderr, end="")


def load_ipython_extension(shell) -> None:
    shell.register_magics(SandboxMagics)
