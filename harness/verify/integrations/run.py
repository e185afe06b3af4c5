"""Installs the pinned packages, and runs the programs in `examples/integrations` in order.

    run.py --binaries DIR --artifacts DIR [--only TEXT]…

A program passes if it exits with 0 and prints the text of the comment `Prints:` at its end, in which `…` matches any text
within a line. Programs in `frameworks` run in environments of uv, and their rows in `frameworks.md` must have the same
versions. The last line of output is the number of cases by result. With CUBE_LONG=1, `tasks.py` has 100 tasks. Needs
root, because it enters its own network namespace (`world.py`).
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import tomllib

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
EXAMPLES = ROOT / "examples" / "integrations"
FRAMEWORKS = sorted((EXAMPLES / "frameworks").glob("with_*"))
PAGE = ROOT / "docs/use/integrations/frameworks.md"
INSIDE = "CUBE_INTEGRATIONS_INSIDE"

IS_LONG = os.environ.get("CUBE_LONG") == "1"
TASKS = ["--tasks", "100", "--rollouts", "1"] if IS_LONG else ["--tasks", "3", "--rollouts", "6"]
# Timeout of a program in seconds.
PATIENCE = 3600 if IS_LONG else 900

# In this order, because later ones use templates of earlier ones. `{node}`: directory of Node; `{pi}` and others:
# npm packages.
CASES = [
    ("pi/template.py", ["--packages", "{pi}"]),
    ("pi/run_pi_agent.py", []),
    ("pi/resume_pi_agent.py", []),
    ("pi/network_policy.py", []),
    ("claude-code/template.py", ["--packages", "{claude-code}"]),
    ("claude-code/run_claude_code.py", []),
    *((f"frameworks/{program.name}", []) for program in FRAMEWORKS),
    ("mini-swe-agent/repair.py", []),
    ("mini-swe-agent/tasks.py", TASKS),
    ("pytest/run_tests.py", []),
    ("jupyter/notebook.py", []),
    ("browser/browse.py", ["--packages", "{browser}"]),
    (str(HERE / "monitoring.py"), ["{prometheus}"]),
    (str(HERE / "tracing.py"), []),
    (str(HERE / "reverse_proxies.py"), ["{reverse-proxies}"]),
    (str(HERE / "egress_speed.py"), ["--rounds", "40" if IS_LONG else "5"]),
]
# Node packages by example, from `package-lock.json` next to the program.
NPM = ["pi", "claude-code", "browser", "frameworks"]


def requirements(program: pathlib.Path) -> list[str]:
    """The packages that a program for a framework needs, from its header (PEP 723) or from `package.json`."""
    text = program.read_text()
    if program.suffix == ".mjs":
        versions = json.loads((program.parent / "package.json").read_text())["dependencies"]
        return [f"{name}=={version}" for name, version in versions.items() if f'"{name}' in text]
    header = text.partition("# /// script\n")[2].partition("# ///\n")[0]
    return tomllib.loads(header.replace("# ", ""))["dependencies"]


def frameworks_installed(packages: pathlib.Path, node: pathlib.Path, only: list[str]) -> dict[str, list[str]]:
    """Installs the packages of the programs for frameworks. Returns the words that start a program, by its stem."""
    commands = {}
    for program in FRAMEWORKS:
        if only and not any(text in f"frameworks/{program.name}" for text in only):
            continue
        if program.suffix == ".mjs":
            # Node looks for packages beside the program.
            copy = packages / "frameworks" / program.name
            shutil.copy(program, copy)
            commands[program.stem] = [str(node / "bin/node"), str(copy)]
            continue
        uv = str(packages / "venv/bin/uv")
        done = subprocess.run([uv, "sync", "--quiet", "--script", program], env={**os.environ, **uv_variables(packages)})
        # uv has printed why, such as a missing Python.
        if done.returncode == 0:
            commands[program.stem] = [uv, "run", "--quiet", "--offline", "--script", str(program)]
    return commands


def uv_variables(packages: pathlib.Path) -> dict[str, str]:
    """uv takes a Python from PATH or from pyenv, whose shims it cannot use."""
    versions = map(str, pathlib.Path.home().glob(".pyenv/versions/3.*/bin"))
    others = [entry for entry in os.environ["PATH"].split(":") if not entry.endswith("/.pyenv/shims")]
    return {
        "PATH": ":".join(["/usr/bin", *sorted(versions), *others]),
        "UV_CACHE_DIR": str(packages / "uv"),
        "UV_NO_BUILD": "1",
        "UV_PYTHON_DOWNLOADS": "never",
    }


def installed(packages: pathlib.Path, artifacts: pathlib.Path) -> dict[str, str]:
    """Installs what is missing, with the host's network. Returns the directories by name."""
    venv = packages / "venv"
    wanted = (HERE / "requirements.txt").read_text()
    stamp = venv / "installed.txt"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run(["/usr/bin/python3", "-m", "venv", venv], check=True)
        pip = [venv / "bin/python", "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
        subprocess.run([*pip, "--requirement", HERE / "requirements.txt"], check=True)
        stamp.write_text(wanted)
    node = artifacts / "sdk/node/node"
    places = {"node": str(node)}
    for name in NPM:
        source, place = EXAMPLES / name, packages / name
        if not (source / "package-lock.json").exists():
            continue
        places[name] = str(place)
        lock = (source / "package-lock.json").read_text()
        stamp = place / "installed.json"
        if stamp.exists() and stamp.read_text() == lock:
            continue
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        for file in ("package.json", "package-lock.json"):
            shutil.copy(source / file, place / file)
        npm = [node / "bin/node", node / "lib/node_modules/npm/bin/npm-cli.js", "ci", "--ignore-scripts"]
        subprocess.run([*npm, "--no-audit", "--no-fund"], cwd=place, check=True)
        shutil.copy(node / "bin/node", place / "node")
        stamp.write_text(lock)
    browser = packages / "browser"
    if "browser" in places and not (browser / "chromium").exists():
        extract = [node / "bin/node", EXAMPLES / "browser/extract.mjs", browser / "chromium"]
        subprocess.run(extract, cwd=browser, check=True)
    places["prometheus"] = str(unpacked(packages / "prometheus", ["prometheus"]) / "usr/bin")
    places["reverse-proxies"] = str(unpacked(packages / "reverse-proxies", ["nginx", "caddy", "haproxy"]))
    return places


def unpacked(place: pathlib.Path, debs: list[str]) -> pathlib.Path:
    """Debian packages, unpacked but not installed, so that nothing is started on the host."""
    stamp = place / "unpacked.txt"
    if not stamp.exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        subprocess.run(["apt-get", "download", "-q", *debs], cwd=place, check=True, stdout=sys.stderr)
        for deb in place.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", deb, place], check=True)
        stamp.touch()
    return place


def enter(arguments: list[str], environment: dict[str, str]) -> None:
    """Runs this program again, in its own namespaces and with its own bpffs, because pins have the names of devices."""
    script = 'mount -t bpf bpf /sys/fs/bpf && exec "$@"'
    words = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script, "sh"]
    os.execvpe(words[0], [*words, sys.executable, __file__, *arguments], environment)


def documented(program: pathlib.Path) -> str:
    mark = "// " if program.suffix == ".mjs" else "# "
    _, found, comment = program.read_text().partition(f"{mark}Prints:\n")
    if not found:
        raise ValueError(f"{program} has no comment with its output")
    return "".join(line.removeprefix(mark) for line in comment.splitlines(keepends=True))


def row_fault(program: pathlib.Path) -> str | None:
    """Why the row of a program for a framework is not as tested."""
    packages = ", ".join(re.sub(r"(\[.*\])?==", " ", pin) for pin in requirements(program))
    row = f"| `{program.name}` | {packages} |"
    return None if row in PAGE.read_text() else f"{PAGE} has no row that begins with: {row}"


def matches(wanted: str, printed: str) -> bool:
    pattern = "[^\n]*".join(re.escape(part) for part in wanted.split("…"))
    return re.fullmatch(pattern, printed) is not None


def fault(program: pathlib.Path, command: list, environment: dict[str, str], work: pathlib.Path) -> str | None:
    try:
        done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired as error:
        return f"did not end within {error.timeout} s"
    if done.returncode != 0:
        return f"exit code {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    wanted = documented(program)
    if not matches(wanted, done.stdout):
        return f"the program should print:\n{wanted}\nbut it printed:\n{done.stdout}{done.stderr[-2000:]}"
    # Figures printed by a program.
    for line in done.stderr.splitlines():
        if line.startswith("{"):
            print(f"{program.name}: {line}")
    return None


def keys_asked() -> set[str]:
    """The keys in the requests to the stand-in for Anthropic."""
    import ssl
    import urllib.request

    context = ssl._create_unverified_context()
    request = urllib.request.Request("https://192.0.2.1/asked", headers={"Host": "api.anthropic.com"})
    with urllib.request.urlopen(request, context=context) as answer:
        return {asked["key"] for asked in json.load(answer)}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--binaries", type=pathlib.Path, required=True)
    parser.add_argument("--artifacts", type=pathlib.Path, required=True)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--again", action="store_true", help="go on with the server's state of a run that was kept")
    parser.add_argument("--keep", action="store_true", help="keep the directory of the run")
    options = parser.parse_args()
    # Some programs have a different working directory.
    options.binaries, options.artifacts = options.binaries.resolve(), options.artifacts.resolve()
    packages = options.artifacts / "integrations"
    run = packages / "run"
    if INSIDE not in os.environ:
        packages.mkdir(parents=True, exist_ok=True)
        places = installed(packages, options.artifacts)
        commands = frameworks_installed(packages, pathlib.Path(places["node"]), options.only)
        if options.again:
            for name in ("work", "beyond"):
                subprocess.run(["rm", "-rf", run / name], check=True)
        else:
            shutil.rmtree(run, ignore_errors=True)
            run.mkdir(mode=0o700)
        variables = uv_variables(packages)
        environment = {
            **os.environ,
            **variables,
            INSIDE: json.dumps({"places": places, "commands": commands}),
            "PATH": f"{packages / 'venv/bin'}:{places['node']}/bin:{variables['PATH']}",
        }
        # From here on, the script runs in the packages' Python.
        sys.executable = str(packages / "venv/bin/python")
        enter(sys.argv[1:], environment)
    prepared = json.loads(os.environ.pop(INSIDE))
    places, commands = prepared["places"], prepared["commands"]
    import model
    from world import API, World

    passed = failed = skipped = 0
    with World(run, options.binaries, options.artifacts) as world:
        # The stand-in for OpenAI, for programs outside a sandbox.
        stand_in = model.serve("127.0.0.1", 0)
        environment = {
            **{key: value for key, value in os.environ.items() if not key.endswith(("_API_KEY", "_CERTS", "CA_BUNDLE"))},
            "E2B_API_URL": API,
            "E2B_SANDBOX_URL": API,
            "E2B_API_KEY": world.key(),
            "ANTHROPIC_API_KEY": model.KEY,
            "OPENAI_API_KEY": model.KEY,
            "OPENAI_BASE_URL": f"http://127.0.0.1:{stand_in.server_port}/v1",
            "HOME": str(run),
            # Compiled modules are kept, but not beside the programs.
            "PYTHONPYCACHEPREFIX": str(packages / "pycache"),
        }
        work = run / "work"
        work.mkdir()
        for name, words in CASES:
            if options.only and not any(text in name for text in options.only):
                continue
            program = EXAMPLES / name
            missing = [w for w in words if w.startswith("{") and w.strip("{}") not in places]
            if program in FRAMEWORKS and program.stem not in commands:
                missing = ["its packages"]
            if not program.exists() or missing:
                print(f"skip {name}: {missing or 'no such program'}")
                skipped += 1
                continue
            began = time.monotonic()
            filled = [places[w.strip("{}")] if w.startswith("{") else w for w in words]
            command = commands.get(program.stem) or [sys.executable, program, *filled]
            why = fault(program, command, environment, work) or (row_fault(program) if program in FRAMEWORKS else None)
            took = f"{time.monotonic() - began:.1f} s"
            print(f"pass {name}: {took}" if why is None else f"FAIL {name}: {took}: {why}", flush=True)
            passed, failed = passed + (why is None), failed + (why is not None)
        # If a file, a variable or a process of a sandbox had contained a key of the stand-in, the sandbox itself
        # could have sent it.
        asked = keys_asked()
        if asked - {model.KEY, ""}:
            print(f"FAIL keys: the model was asked with {asked - {model.KEY}}")
            failed += 1
    if not options.keep:
        shutil.rmtree(run, ignore_errors=True)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
