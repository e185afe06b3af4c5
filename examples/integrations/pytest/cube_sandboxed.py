"""A pytest plugin: tests with the mark `sandboxed` run in a sandbox each.

    @pytest.mark.sandboxed
    def test_something(): ...

    @pytest.mark.sandboxed(template="mine", network={"deny_out": [ALL_TRAFFIC], "allow_out": ["pypi.org"]})

A prepared sandbox for each set of options gets this pytest and the project; each test runs in a fork of it, so a test sees neither
what another one has left nor anything of the host. Fixtures run in the sandbox too. Reports are pytest's own: tracebacks, captured
output, durations and skips look as usual. Load it with `-p cube_sandboxed`, or as `pytest_plugins = ["cube_sandboxed"]`.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import pathlib
import tarfile

import pytest

INSIDE = "CUBE_SANDBOXED"
REPORTS = "/tmp/cube-reports.jsonl"
LIBRARY, PROJECT = "/opt/cube-pytest", "/home/user/project"
# pytest and what it imports: no compiled code.
PACKAGES = ["pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments", "cube_sandboxed"]
# Not part of a project.
LEFT_OUT = {"node_modules", "__pycache__", "venv", "target", "build", "dist"}
MOST_BYTES = 32 << 20


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sandboxed(template, timeout, **options): run the test in a sandbox")


# --- In the sandbox: reports become lines of a file.


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if INSIDE in os.environ:
        data = report._to_json()
        with open(REPORTS, "a") as file:
            file.write(json.dumps(data, default=str) + "\n")


# --- On the host.


def packed(root: pathlib.Path, names: list[pathlib.Path]) -> bytes:
    buffer, size = io.BytesIO(), 0
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for path in names:
            if path.is_symlink() or not path.is_file():
                continue
            size += path.stat().st_size
            if size > MOST_BYTES:
                raise pytest.UsageError(f"{root} has more than {MOST_BYTES >> 20} MiB for the sandbox")
            archive.add(path, str(path.relative_to(root)))
    return buffer.getvalue()


def library() -> bytes:
    found = []
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for name in PACKAGES:
            source = pathlib.Path(importlib.import_module(name).__file__)
            top = source.parent if source.name == "__init__.py" else source
            files = top.rglob("*.py") if top.is_dir() else [top]
            for path in files:
                archive.add(path, str(path.relative_to(top.parent)))
            found.append(name)
    return buffer.getvalue()


def project(root: pathlib.Path) -> bytes:
    names = []
    for directory, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in LEFT_OUT and not name.startswith(".")]
        names += [pathlib.Path(directory) / name for name in files if not name.startswith(".")]
    return packed(root, sorted(names))


class Sandboxes:
    """The prepared sandboxes of a run, by their options."""

    def __init__(self, root: pathlib.Path):
        self.root, self.prepared = root, {}

    def fork(self, options: dict):
        from e2b import Sandbox

        key = json.dumps(options, sort_keys=True, default=str)
        if key not in self.prepared:
            sandbox = Sandbox.create(options.get("template", "base"), timeout=3600, **{
                name: value for name, value in options.items() if name not in ("template", "timeout")
            })
            self.prepared[key] = sandbox
            for place, content in [(LIBRARY, library()), (PROJECT, project(self.root))]:
                sandbox.files.write("/tmp/files.tar.gz", content)
                unpack = f"mkdir -p {place} && tar -xzf /tmp/files.tar.gz -C {place}"
                sandbox.commands.run(unpack, user="root")
            sandbox.commands.run(f"chown -R user {PROJECT}", user="root")
            # Imported once: forks begin with warm files in the page cache.
            sandbox.commands.run(f"PYTHONPATH={LIBRARY} python3 -c 'import pytest'")
        [fork] = self.prepared[key].fork(count=1, timeout=600)
        if isinstance(fork, Exception):
            raise fork
        return fork

    def end(self) -> None:
        for sandbox in self.prepared.values():
            sandbox.kill()


def run(item: pytest.Item, options: dict) -> list[pytest.TestReport]:
    from e2b import CommandExitException, TimeoutException

    sandboxes = item.config.stash.setdefault(STASH, None) or Sandboxes(item.config.rootpath)
    item.config.stash[STASH] = sandboxes
    sandbox = sandboxes.fork(options)
    limit = options.get("timeout", 300)
    words = ["python3", "-m", "pytest", "-q", "-p", "cube_sandboxed", "-p", "no:cacheprovider", item.nodeid]
    environment = {INSIDE: "1", "PYTHONPATH": LIBRARY, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        import shlex

        said = sandbox.commands.run(shlex.join(words), cwd=PROJECT, envs=environment, timeout=limit).stdout
    except CommandExitException as error:
        said = error.stdout + error.stderr
    except TimeoutException:
        said = f"the test did not end within {limit} s"
    try:
        lines = sandbox.files.read(REPORTS).splitlines()
    except Exception:
        lines = []
    sandbox.kill()
    reports = [pytest.TestReport._from_json(json.loads(line)) for line in lines]
    if not any(report.when == "teardown" for report in reports):
        reports.append(
            pytest.TestReport(
                nodeid=item.nodeid, location=item.location, keywords={}, outcome="failed", when="call",
                longrepr=f"the test did not end in its sandbox:\n{said}",
            )
        )  # fmt: skip
    return reports


STASH: pytest.StashKey = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    marker = item.get_closest_marker("sandboxed")
    if marker is None or INSIDE in os.environ:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in run(item, marker.kwargs):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    sandboxes = config.stash.get(STASH, None)
    if sandboxes:
        sandboxes.end()
