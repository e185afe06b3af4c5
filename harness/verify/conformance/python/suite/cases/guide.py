"""The programs in docs/use/quickstart.md, or in another guide for another area, exactly as printed there."""

import os
import pathlib
import re
import subprocess
import sys

from . import Cases, same

CASES = Cases()
case = CASES
GUIDES = pathlib.Path(__file__).parent.parent


def program(guide: str) -> tuple[str, str]:
    """The program in a guide, and its documented output."""
    found = re.search(r"```python[^\n]*\n(.*?)```.*?```text\n(.*?)```", (GUIDES / guide).read_text(), re.DOTALL)
    assert found, f"{guide} has no program"
    return found[1], found[2]


def run(guide: str = "quickstart.md", **environment: str) -> None:
    code, wanted = program(guide)
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True)
    same((done.stdout, done.returncode, done.stderr[-500:]), (wanted, 0, ""))


@case
def quickstart():
    run()


@case
def quickstart_https():
    url = os.environ["CONFORMANCE_HTTPS_URL"]
    run(
        E2B_API_URL=url,
        E2B_SANDBOX_URL=url,
        E2B_API_KEY=os.environ["CONFORMANCE_HTTPS_KEY"],
        SSL_CERT_FILE=os.environ["CONFORMANCE_HTTPS_CA"],
    )
