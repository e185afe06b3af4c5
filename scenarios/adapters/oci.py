#!/usr/bin/env python3
"""An OCI runtime (runc, crun, runsc) as an adapter of cube-bench (docs/measure/adapters.md): each sandbox is a detached
container with an idle process, started, entered and ended through the runtime's command line.

    oci.py ARTIFACTS RUNTIME [GLOBAL OPTION]...

ARTIFACTS is the directory with templates/ (target/cube), whose root images the containers mount read-only. For runsc, the
default options are `--platform=ptrace --network=none`, which need neither KVM nor a recent release.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile

from serve import ENV, Roots, ids, program, run, serve

PR_SET_CHILD_SUBREAPER = 36
DEFAULTS = {"runsc": ["--platform=ptrace", "--network=none"]}


def config(root, name):
    """All namespaces except the user namespace, a read-only root, no limits. The cgroup is below the run's cgroup, so
    that its CPU time counts for the run; gVisor's default is below the root."""
    tmpfs = {"type": "tmpfs", "source": "tmpfs"}
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": ["/bin/sleep", "infinity"],
            "env": [f"{key}={value}" for key, value in ENV.items()],
            "cwd": "/",
            "noNewPrivileges": True,
        },
        "root": {"path": root, "readonly": True},
        "hostname": "sandbox",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", **tmpfs, "options": ["nosuid", "strictatime", "mode=755", "size=65536k"]},
            {"destination": "/tmp", **tmpfs, "options": ["nosuid", "nodev"]},
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")],
            "cgroupsPath": name,
        },
    }


class Runtime:
    def __init__(self, artifacts, name, *options):
        options = options or DEFAULTS.get(name, [])
        path, self.version = program(name, os.path.basename(name))
        self.roots, self.alive = Roots(artifacts), {}
        self.dir = tempfile.mkdtemp(prefix="cube-oci-")
        self.command = [path, *options, "--root", os.path.join(self.dir, "state")]
        self.label = "namespaces and cgroups of the host's kernel"
        if os.path.basename(name) == "runsc":
            platform = next((o.split("=")[1] for o in options if o.startswith("--platform=")), "default")
            self.label = f"gVisor's kernel, platform {platform}"
        # When the runtime exits, the processes of a container become children of this process, so that they are reaped
        # even where process 1 does not reap. A runtime waits for the processes that it has killed.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def runtime(self, *args):
        return run([*self.command, *args])

    def start(self, name, template):
        # Other runs may use the same cgroup hierarchy.
        container, bundle = f"cube-bench-{os.getpid()}-{name}", os.path.join(self.dir, name)
        root = self.roots.of(template)
        os.mkdir(bundle)
        with open(os.path.join(bundle, "config.json"), "w") as file:
            json.dump(config(root, container), file)
        self.alive[name] = (container, bundle, root)
        pid = os.path.join(bundle, "pid")
        log = os.path.join(bundle, "log")
        with open(log, "wb") as errors:
            # The container keeps these files open, so they must not be pipes.
            done = subprocess.run(
                [*self.command, "run", "--detach", "--pid-file", pid, "--bundle", bundle, container],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
            )
        if done.returncode != 0:
            with open(log, errors="replace") as errors:
                why = errors.read().strip() or "no message"
            self.stop(name)
            raise RuntimeError(why.splitlines()[-1])

    def exec(self, name, argv, user):
        container, _, root = self.alive[name]
        return self.runtime("exec", "--user", ":".join(ids(root, user)), container, *argv)

    def stop(self, name):
        container, bundle, _ = self.alive.pop(name)
        # `delete --force` alone takes longer with some runtimes, which poll for the end of the process.
        self.runtime("kill", container, "KILL")
        self.reap(os.path.join(bundle, "pid"))
        status, _, error = self.runtime("delete", container)
        if status != 0:
            status, _, error = self.runtime("delete", "--force", container)
        shutil.rmtree(bundle, ignore_errors=True)
        if status != 0:
            raise RuntimeError(f"cannot delete {container}: {error.strip()}")

    def reap(self, file):
        """Waits for the first process of a container."""
        try:
            with open(file) as text:
                pid = int(text.read())
        except (FileNotFoundError, ValueError):
            return
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:
            pass  # Another process is the subreaper.

    def end(self):
        for name in list(self.alive):
            self.stop(name)
        shutil.rmtree(self.dir, ignore_errors=True)


serve(lambda: Runtime(*sys.argv[1:]))
