"""Runs cases of the conformance suite against the API that environment variables name.

Each line of standard output is a JSON object: {"begin": NAME}, then {"end": NAME, "verdict", "why", "seconds"}.
The verdict is "pass", "fail" (the API does not behave as the SDK's documentation says) or "absent" (this SDK lacks
the feature). The caller reads these lines and limits the time of each case.
"""

import importlib
import json
import os
import sys
import time
import traceback

from cases import Absent, Case

AREAS = ("guide", "examples", "sandboxes", "commands", "terminals", "files", "watching", "network", "lifecycle", "interpreter", "templates", "dockerfiles", "document")


def known() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for area in AREAS:
        for case in importlib.import_module(f"cases.{area}").CASES.all:
            if case.name in cases:
                raise SystemExit(f"two cases are called {case.name}")
            cases[case.name] = case
    return cases


def emit(line: dict) -> None:
    os.write(OUTPUT, (json.dumps(line) + "\n").encode())


def run(case: Case) -> tuple[str, str]:
    try:
        case.run()
        return "pass", ""
    except Absent as absent:
        return "absent", str(absent)
    except BaseException as error:  # noqa: BLE001 - any exception of an SDK fails the case
        frames = traceback.extract_tb(error.__traceback__)
        here = [f for f in frames if "/cases/" in f.filename]
        line = f"{os.path.basename(here[-1].filename)}:{here[-1].lineno}" if here else ""
        text = f"{type(error).__name__}: {error}"
        return "fail", f"{line} {text}".strip()[:800]


def main() -> None:
    cases = known()
    if sys.argv[1:] == ["--list"]:
        for name in cases:
            emit({"case": name})
        return
    for name in sys.argv[1:]:
        emit({"begin": name})
        began = time.monotonic()
        case = cases.get(name)
        verdict, why = run(case) if case else ("fail", "the suite has no such case")
        emit({"end": name, "verdict": verdict, "why": why, "seconds": time.monotonic() - began})


if __name__ == "__main__":
    # Output of SDKs and cases goes to standard error, so that it cannot be mistaken for a verdict.
    OUTPUT = os.dup(1)
    os.dup2(2, 1)
    main()
    sys.stderr.flush()
    # Exit even if threads of an open stream still run.
    os._exit(0)
