#!/usr/bin/env python3
"""Bubblewrap as an adapter of cube-bench (docs/measure/adapters.md): each sandbox is `bwrap` with namespaces and an idle
process. Commands enter the namespaces with nsenter.

    bubblewrap.py ARTIFACTS [BWRAP]

ARTIFACTS is the directory with templates/ (target/cube), whose root images the sandboxes mount read-only.
"""

import json
import os
import signal
import subprocess
import sys

from serve import ENV, Roots, ids, program, run, serve

# Reports that the namespaces are complete, and waits.
INIT = "echo ready; exec sleep infinity"


class Bubblewrap:
    label = "namespaces of the host's kernel"

    def __init__(self, artifacts, bwrap="bwrap"):
        self.roots, self.alive = Roots(artifacts), {}
        self.bwrap, self.version = program(bwrap, "bubblewrap")

    def start(self, name, template):
        root = self.roots.of(template)
        read, write = os.pipe()
        argv = [
            self.bwrap, "--unshare-all", "--die-with-parent", "--json-status-fd", str(write), "--hostname", "sandbox",
            "--ro-bind", root, "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--", "/bin/sh", "-c", INIT,
        ]
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[write],
            env=ENV,
        )
        os.close(write)
        with os.fdopen(read) as status:
            self.alive[name] = (process, root, None)
            if process.stdout.readline() != b"ready\n":
                process.wait()
                raise RuntimeError(process.stderr.read().decode(errors="replace").strip() or "bwrap has ended")
            self.alive[name] = (process, root, json.loads(status.readline())["child-pid"])

    def exec(self, name, argv, user):
        _, root, pid = self.alive[name]
        uid, gid = ids(root, user)
        enter = ["nsenter", "-t", str(pid), "-m", "-u", "-i", "-n", "-p", "-r", "-w", "-S", uid, "-G", gid, "--"]
        return run([*enter, *argv], ENV)

    def stop(self, name):
        process, _, pid = self.alive.pop(name)
        # The kernel kills the PID namespace with its first process; bwrap reaps that one and ends.
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()

    def end(self):
        for name in list(self.alive):
            self.stop(name)


serve(lambda: Bubblewrap(*sys.argv[1:]))
