#!/usr/bin/env python3
"""Draws sentences by a seed, for a reader who marks them: python3 dev/draw_sentences.py SEED

Prints `file:line<TAB>sentence`: 100 sentences of the documents, 30 of the help texts and 40 of comments in 12 source
files. A sentence has five words or more besides code spans; cells of tables, list items and promises count too.
"""

import random
import re
import subprocess
import sys

SPLIT = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[A-Z`*\[(\"'…])")
TOP = ["README.md", "ARCHITECTURE.md", "SPECIFICATION.md", "CONTRIBUTING.md", "SECURITY.md"]
HELP = ("cli/src/", "api/src/cli", "harness/src/cli")


def tracked(*patterns):
    return subprocess.run(["git", "ls-files", *patterns], capture_output=True, text=True, check=True).stdout.split()


def sentences(path, blocks):
    for line, text in blocks:
        for sentence in SPLIT.split(" ".join(text.replace("**", "").split())):
            words = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", sentence)
            if len(re.findall(r"[A-Za-z][\w'’-]*", words)) >= 5:
                yield f"{path}:{line}\t{sentence}"


def blocks(lines, strip, ends):
    """Adjacent lines of prose as (number of the first, text)."""
    start, text = 0, []
    for number, line in enumerate([*lines, ""], 1):
        prose = strip(line)
        if text and (prose is None or not prose.strip() or ends(prose)):
            yield start, " ".join(text)
            text = []
        if prose and prose.strip():
            start, text = (start, [*text, prose]) if text else (number, [prose])


def document(path):
    lines, code = [], False
    for line in open(path):
        code ^= line.lstrip().startswith("```")
        lines.append("" if code or line.lstrip().startswith(("```", "#", "<!--", "|--")) else line)
    for number, line in enumerate(lines, 1):
        if line.startswith("|"):
            yield from sentences(path, ((number, cell) for cell in re.split(r"(?<!\\)\|", line)))
    prose = blocks(lines, lambda line: None if line.startswith("|") else line, re.compile(r"\s*([-*]|\d+\.) ").match)
    yield from sentences(path, prose)


def comments(path, marker):
    strip = lambda line: m[1] if (m := re.match(rf"\s*(?:{marker})(?: (.*))?$", line)) else None
    yield from sentences(path, blocks(open(path), strip, lambda prose: prose.startswith(("- ", "```", "#"))))


draw = random.Random(int(sys.argv[1]))
documents = [s for p in [*TOP, *tracked("docs/*.md")] if not p.endswith(".zh.md") for s in document(p)]
helps = [s for p in tracked("*.rs") if p.startswith(HELP) and "clap" in open(p).read() for s in comments(p, "///")]
helps = [s for s in helps if not s.endswith(".")]  # the help of an option has no full stop; a comment on code has one
files = draw.sample([p for p in tracked("*.rs") if len(list(comments(p, "//[/!]?"))) >= 10], 12)
remarks = [s for p in files for s in comments(p, "//[/!]?")]
for name, pool, count in ("documents", documents, 100), ("help", helps, 30), ("comments", remarks, 40):
    print(f"# {name}: {count} of {len(pool)}")
    print("\n".join(draw.sample(pool, count)))
