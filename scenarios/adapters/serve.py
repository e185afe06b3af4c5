"""What the adapters of this directory share: the protocol of docs/measure/adapters.md, and the root of their sandboxes."""

import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

# As in the guests of the template `base`.
ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
# Most requests at the same time; the threads are started when they are needed.
THREADS = 256


def serve(make):
    """Answers requests until the input ends, then removes all sandboxes. `make` returns a platform, which has `version`, `label`, and the
    functions `start(name, template)`, `exec(sandbox, argv, user)`, `stop(sandbox)` and `end()`. cube-bench itself keeps to
    the timeouts: a wait with a timeout polls in Python, which would count as time of the sandbox."""
    lock, platforms = threading.Lock(), []

    def answer(r):
        if r["op"] == "hello":
            platforms.append(make())
        platform = platforms[0]
        if r["op"] == "hello":
            return {"protocol": 1, "version": platform.version, "platform": platform.label}
        if r["op"] == "start":
            platform.start(r["name"], r["template"])
            return {"sandbox": r["name"]}
        if r["op"] == "exec":
            status, out, err = platform.exec(r["sandbox"], r["argv"], r["user"])
            return {"status": status, "stdout": out, "stderr": err}
        if r["op"] == "stop":
            platform.stop(r["sandbox"])
            return {}
        raise RuntimeError(f"unknown op {r['op']}")

    def reply(r):
        try:
            done = answer(r)
        except Exception as error:
            done = {"error": f"{type(error).__name__}: {error}".replace("\n", " ")[:900]}
        line = json.dumps({"id": r["id"], **done}) + "\n"
        with lock:
            sys.stdout.write(line)
            sys.stdout.flush()

    # Threads that live on are faster than one for each request, and the kernel kills a child with PR_SET_PDEATHSIG
    # when the thread ends that started it.
    with ThreadPoolExecutor(THREADS) as threads:
        for line in sys.stdin:
            threads.submit(reply, json.loads(line))
    for platform in platforms:
        platform.end()


def program(name, package):
    """Path of a program, and the first line that it prints for --version."""
    path = shutil.which(name)
    if path is None:
        raise RuntimeError(f"{name} is missing: install the Debian package {package}")
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    return path, done.stdout.splitlines()[0]


def run(argv, env=None):
    """Status, output and errors of a program. The status is None if a signal ended it."""
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, env=env)
    texts = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    return (done.returncode if done.returncode >= 0 else None, *texts)


class Roots:
    """The root images of templates as directories, so that these sandboxes run the same programs as microVMs."""

    def __init__(self, artifacts):
        self.artifacts, self.lock, self.found = artifacts, threading.Lock(), {}

    def of(self, template):
        """Extracts the image with fsck.erofs, unless its directory exists: ARTIFACTS/roots/SHA-256."""
        with self.lock:
            if template not in self.found:
                self.found[template] = self.extract(template)
            return self.found[template]

    def extract(self, template):
        with open(os.path.join(self.artifacts, "templates", template, "manifest.json")) as file:
            manifest = json.load(file)
        root = os.path.abspath(os.path.join(self.artifacts, "roots", manifest["root_sum"]["sha256"][:16]))
        if not os.path.isdir(root):
            draft = f"{root}.{os.getpid()}"
            os.makedirs(os.path.dirname(root), exist_ok=True)
            try:
                subprocess.run(["fsck.erofs", f"--extract={draft}", manifest["root"]], check=True, stdout=sys.stderr)
                # Only complete trees become visible.
                os.rename(draft, root)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        return root


def ids(root, user):
    """User and group id of a user in the root's /etc/passwd."""
    with open(os.path.join(root, "etc/passwd")) as file:
        for fields in (line.split(":") for line in file):
            if fields[0] == user:
                return fields[2], fields[3]
    raise RuntimeError(f"{root}/etc/passwd has no user {user!r}")
