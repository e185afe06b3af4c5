"""Many tasks at once, as reinforcement learning and SWE-bench have them: a template for each task, built from its Dockerfile, and
forks of a prepared sandbox for its rollouts. All rollouts of all tasks run at the same time.

    python tasks.py --tasks 100 --rollouts 1

The tasks are made here: a repository with a wrong function and a hidden test. A rollout is a policy with a list of patches, of
which the last is right; its reward is the test's result. Figures go to standard error, as one line of JSON. `memory_mib` is what
the host had less of at the worst moment, if the server is on this host.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import statistics
import sys
import tempfile
import threading
import time

# Before the import, which prints otherwise.
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")

from cube_environment import CubeEnvironment
from e2b import Template
from e2b.exceptions import BuildException

DOCKERFILE = """FROM e2bdev/base
WORKDIR /home/user/repo
COPY repo /home/user/repo
RUN git init -q . && git config user.email a@b.test && git config user.name a && git add . && git commit -qm begin
# Steps run as root, commands in sandboxes as `user`.
RUN chown -R user /home/user/repo
"""
# The operator of the task, and what the repository has instead.
OPERATORS = [("+", "-"), ("*", "+"), ("-", "*"), ("//", "/"), ("%", "//")]


class Task:
    def __init__(self, number: int):
        self.number = number
        self.name = f"swe-task-{number}"
        self.right, self.wrong = OPERATORS[number % len(OPERATORS)]

    def files(self) -> dict[str, str]:
        return {"compute.py": f"def compute(a, b):\n    return a {self.wrong} b\n"}

    def test(self) -> str:
        """Not in the template: the agent must not see it."""
        a, b = 17 + self.number, 5
        return f"from compute import compute\nassert compute({a}, {b}) == {eval(f'{a} {self.right} {b}')}\n"

    def attempts(self) -> list[str]:
        """What the policy writes, in its order."""
        # Neither is what the repository has: an attempt is a commit.
        others = [right for right, _ in OPERATORS if right not in (self.right, self.wrong)]
        return [f"def compute(a, b):\n    return a {operator} b\n" for operator in [others[0], self.right]]

    def build(self, failures: list[str]) -> float:
        """A build that fails because the host is too busy is tried again, and its cause noted."""
        began = time.monotonic()
        for left in (2, 1, 0):
            try:
                self.build_once()
                break
            except BuildException as error:
                failures.append(str(error)[:200])
                if left == 0:
                    raise
        return time.monotonic() - began

    def build_once(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            repository = pathlib.Path(directory) / "repo"
            repository.mkdir()
            for name, text in self.files().items():
                (repository / name).write_text(text)
            template = Template(file_context_path=directory).from_dockerfile(DOCKERFILE)
            Template.build(template, self.name, memory_mb=256)


def timed(results: list, work, *arguments):
    began = time.monotonic()
    value = work(*arguments)
    results.append(time.monotonic() - began)
    return value


class Memory:
    """The most memory that the host has had less than at the beginning."""

    def __enter__(self):
        self.begin = self.least = self.available()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

    def watch(self) -> None:
        while not self.over.wait(0.2):
            self.least = min(self.least, self.available())

    def available(self) -> int:
        """In MiB. See proc(5)."""
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) >> 10


def prepare(task: Task) -> CubeEnvironment:
    environment = CubeEnvironment(template=task.name, cwd="/home/user/repo", timeout=120)
    # Whatever is slow and the same for all rollouts belongs here.
    environment.execute("python3 -c 'import compute' && git status --short")
    return environment


def rollout(task: Task, environment: CubeEnvironment, number: int) -> float:
    """An episode. Every other one gives up after its first attempt, so that there are rewards of both kinds."""
    attempts = task.attempts()[: 1 + (number + task.number) % 2]
    for text in attempts:
        done = environment.execute(f"cat > compute.py <<'END'\n{text}END\ngit commit -qam attempt")
        if done["returncode"] != 0:
            raise RuntimeError(done["output"])
    environment.sandbox.files.write("/home/user/repo/hidden_test.py", task.test())
    return float(environment.execute("python3 hidden_test.py")["returncode"] == 0)


def guarded(causes: list[str], work, *arguments):
    """What `work` returns; `None`, and the cause in the list, if it fails."""
    try:
        return work(*arguments)
    except Exception as error:
        causes.append(f"{type(error).__name__}: {error}"[:200])
        return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", type=int, default=12)
    parser.add_argument("--rollouts", type=int, default=2)
    parser.add_argument("--builders", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="keep the templates")
    options = parser.parse_args()
    tasks = [Task(number) for number in range(options.tasks)]
    count = options.tasks * options.rollouts
    figures: dict[str, object] = {"tasks": options.tasks, "rollouts": count}

    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(options.builders) as pool:
        failed_builds: list[str] = []
        builds = list(pool.map(lambda task: task.build(failed_builds), tasks))
    figures["build_all_s"] = round(time.monotonic() - began, 1)
    figures["build_median_s"] = round(statistics.median(builds), 2)
    figures["builds_tried_again"] = len(failed_builds)

    failures: list[str] = []
    with Memory() as memory:
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            prepared = list(pool.map(prepare, tasks))
            figures["create_and_prepare_all_s"] = round(time.monotonic() - began, 2)
            forking: list[float] = []
            fork = lambda environment: timed(forking, environment.fork, options.rollouts)
            began = time.monotonic()
            forks = list(pool.map(fork, prepared))
            figures["fork_all_s"] = round(time.monotonic() - began, 2)
            figures["fork_median_s"] = round(statistics.median(forking), 3)
        running = [(task, environment, n) for task, all in zip(tasks, forks) for n, environment in enumerate(all)]

        episodes: list[float] = []
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(min(count, 128)) as pool:
            episode = lambda one: guarded(failures, timed, episodes, rollout, *one)
            rewards = list(pool.map(episode, running))
        took = time.monotonic() - began
    figures["sandboxes_at_once"] = len(prepared) + len(running)
    figures["episodes_all_s"] = round(took, 2)
    figures["episode_median_s"] = round(statistics.median(episodes), 2) if episodes else None
    figures["episodes_per_s"] = round(len(episodes) / took, 1)
    figures["failures"] = len(failures)
    figures["memory_mib"] = memory.begin - memory.least if "127.0.0.1" in os.environ["E2B_API_URL"] else None

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(CubeEnvironment.stop, [*prepared, *(environment for _, environment, _ in running)]))
        if not options.keep:
            list(pool.map(remove, tasks))
    expected = [float((n + task.number) % 2) for task, _, n in running]
    print(f"{options.tasks} templates, {count} rollouts at once")
    print("rewards as expected:", rewards == expected)
    for cause in failures:
        print("failure:", cause)
    print(json.dumps(figures), file=sys.stderr)


def remove(task: Task) -> None:
    """The SDK for Python has no call for this route of E2B's."""
    import urllib.request

    url = f"{os.environ['E2B_API_URL']}/templates/{task.name}"
    headers = {"X-API-Key": os.environ["E2B_API_KEY"]}
    urllib.request.urlopen(urllib.request.Request(url, method="DELETE", headers=headers)).close()


if __name__ == "__main__":
    main()

# Prints:
# … templates, … rollouts at once
# rewards as expected: True
