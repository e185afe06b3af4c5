#!/usr/bin/env python3
"""Counts the lines of Rust code of each crate, without blank lines, comments, tests, fuzz and simulation modules.

    dev/count_code.py [--files N] [ROOT]

Not counted: comments, doc comments, items under #[cfg(test)] or #[cfg(any(test, fuzzing))] and the files of modules
declared so, `tests/`, `benches/`, `examples/`, `fuzz/`, files named tests.rs, and modules named `simulation` or `explore`.
--files N lists the N longest files by non-blank lines, comments included.
"""

import argparse
import pathlib
import re
import subprocess

SKIPPED_DIRS = {"tests", "benches", "examples", "fuzz", "simulation", "explore"}
TEST_ATTRIBUTE = re.compile(r"#\[cfg\((?:any\()?test\b[^\]]*\]")


def blanked(text: str) -> str:
    """The text with comments removed, and with strings and character literals emptied. Line breaks are kept."""
    out, at, end = [], 0, len(text)
    while at < end:
        if text.startswith("//", at):
            at = text.find("\n", at) if "\n" in text[at:] else end
        elif text.startswith("/*", at):
            depth, start, at = 1, at, at + 2
            while at < end and depth:
                if text.startswith("/*", at):
                    depth, at = depth + 1, at + 2
                elif text.startswith("*/", at):
                    depth, at = depth - 1, at + 2
                else:
                    at += 1
            out.append("\n" * text.count("\n", start, at))
        elif raw := re.compile(r'b?r(#*)"').match(text, at):
            close = text.find('"' + raw[1], raw.end())
            close = end if close < 0 else close + 1 + len(raw[1])
            # Every line of a literal counts as code.
            out.append("s" + "\ns" * text.count("\n", at, close))
            at = close
        elif text[at] == '"':
            start, at = at, at + 1
            while at < end and text[at] != '"':
                at += 2 if text[at] == "\\" else 1
            at += 1
            out.append("s" + "\ns" * text.count("\n", start, at))
        elif char := re.compile(r"'(?:\\.[^']*|[^\\'])'").match(text, at):
            out.append("c")
            at = char.end()
        else:
            out.append(text[at])
            at += 1
    return "".join(out)


def without_tests(code: str) -> tuple[str, set[str]]:
    """The code without items for tests, and the names of the modules that are declared for tests only."""
    modules = set()
    while found := TEST_ATTRIBUTE.search(code):
        at = found.end()
        item = re.compile(r"[^;{]*").match(code, at)
        stop = item.end()
        if named := re.search(r"\bmod\s+(\w+)\s*$", item[0]):
            if code[stop : stop + 1] == ";":
                modules.add(named[1])
        if code[stop : stop + 1] == "{":
            depth = 0
            while stop < len(code):
                depth += {"{": 1, "}": -1}.get(code[stop], 0)
                stop += 1
                if depth == 0:
                    break
        else:
            stop += 1
        code = code[: found.start()] + code[stop:]
    return code, modules


def crate_of(path: pathlib.Path, root: pathlib.Path) -> str:
    for parent in path.parents:
        if (root / parent / "Cargo.toml").exists():
            return str(parent)
    return "."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=0, metavar="N")
    parser.add_argument("root", nargs="?", default=".", type=pathlib.Path)
    options = parser.parse_args()
    root = options.root
    listed = subprocess.run(["git", "-C", root, "ls-files", "*.rs"], check=True, capture_output=True, text=True)
    paths = [pathlib.Path(line) for line in listed.stdout.splitlines()]
    sources, test_files = {}, set()
    for path in paths:
        if SKIPPED_DIRS & set(path.parts) or path.name in {"tests.rs", "fuzz.rs", "simulation.rs", "explore.rs"}:
            continue
        text = (root / path).read_text()
        code, modules = without_tests(blanked(text))
        sources[path] = (code, sum(1 for line in text.splitlines() if line.strip()))
        home = path.parent if path.name in {"lib.rs", "main.rs", "mod.rs"} else path.with_suffix("")
        for module in modules:
            test_files |= {home / f"{module}.rs", home / module}
    crates: dict[str, list[int]] = {}
    lengths = []
    for path, (code, length) in sources.items():
        if path in test_files or test_files & set(path.parents):
            continue
        lines = sum(1 for line in code.splitlines() if line.strip())
        crates.setdefault(crate_of(path, root), []).append(lines)
        lengths.append((length, str(path)))
    for crate, counts in sorted(crates.items(), key=lambda item: -sum(item[1])):
        print(f"{sum(counts):8} {len(counts):5} files  {crate}")
    print(f"{sum(map(sum, crates.values())):8} {sum(map(len, crates.values())):5} files  all")
    for length, name in sorted(lengths, reverse=True)[: options.files]:
        print(f"{length:8} {name}")


if __name__ == "__main__":
    main()
