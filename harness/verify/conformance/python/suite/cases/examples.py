"""The programs in examples/python. Each ends with a comment that contains its output."""

import os
import pathlib
import subprocess
import sys

from . import Absent, Cases, same

try:
    import e2b_code_interpreter as newest
except ImportError:
    newest = None

CASES = Cases()
PROGRAMS = pathlib.Path(__file__).parent.parent / "examples"


def wanted(text: str) -> str:
    _, found, comment = text.partition("# Prints:\n")
    assert found, "the program has no comment with its output"
    return "".join(line.removeprefix("# ") for line in comment.splitlines(keepends=True))


def run(program: pathlib.Path) -> None:
    if newest is None:
        raise Absent("the examples are for the newest SDK")
    command = [sys.executable, str(program)]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True)
    same((done.stdout, done.returncode, done.stderr[-500:]), (wanted(program.read_text()), 0, ""))


def register(program: pathlib.Path) -> None:
    def case():
        run(program)

    case.__name__ = f"example_{program.stem}"
    CASES(case)


for path in sorted(PROGRAMS.glob("*.py")):
    register(path)
