"""Dockerfiles as people write them, each in a directory with the files that it copies.

    Dockerfile  what the template is built from
    prepare.sh  makes more files, on this host; optional
    check.sh    runs in a sandbox of the template, and prints what `expected` contains
"""

import re
import shutil
import subprocess
import tempfile
from functools import partial
from pathlib import Path

from e2b import Template
from e2b.template import dockerfile_parser

from . import Absent, Case, Cases, lacks, raises, same, sandbox
from .templates import build, unique

CASES = Cases()
DIRECTORY = Path(__file__).parent.parent / "dockerfiles"
OWN = ("prepare.sh", "check.sh", "expected")


def dockerfile(kind: Path) -> None:
    if kind.name == "newer-syntax" and lacks(dockerfile_parser, "DockerfileSyntaxError"):
        raise Absent("its parser is an older one")
    name = unique()
    with tempfile.TemporaryDirectory() as temporary:
        context = Path(temporary) / "context"
        shutil.copytree(kind, context, ignore=shutil.ignore_patterns(*OWN))
        if (kind / "prepare.sh").exists():
            subprocess.run(["sh", "-e", kind / "prepare.sh"], cwd=context, check=True)
        # With a unique step, because suites of other SDKs run at the same time and share the cache.
        text = (context / "Dockerfile").read_text()
        text = re.sub("^FROM .*$", rf"\g<0>\nARG SUITE={name}", text, count=1, flags=re.MULTILINE)
        build(Template(file_context_path=context).from_dockerfile(text), name)
    with sandbox(template=name) as s:
        same(s.commands.run((kind / "check.sh").read_text()).stdout, (kind / "expected").read_text())


for kind in sorted(DIRECTORY.iterdir()):
    CASES.all.append(Case(f"dockerfile-{kind.name}", partial(dockerfile, kind)))


@CASES
def dockerfile_multi_stage():
    stages = "FROM e2bdev/base AS build\nRUN true\nFROM e2bdev/base\nCOPY --from=build /etc/hostname /\n"
    error = raises(Exception, Template().from_dockerfile, stages)
    assert "Multi-stage Dockerfiles are not supported" in str(error), error
