#!/usr/bin/env python3
"""QEMU as an adapter of cube-bench (docs/measure/adapters.md): each sandbox is a VM that boots the guest kernel.

    qemu.py GUEST [--machine microvm|pc] [--accel kvm|tcg]

GUEST is the directory with `vmlinux` and `busybox` (target/cube/guest). The VM has no disk: its initramfs is busybox, whose
shell reads commands from the serial port. Without options, the first of kvm and tcg, and of microvm and pc, with which a VM
boots is used. `hello` reports which: a VM of TCG is emulated, and its times say nothing about KVM.
"""

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time

QEMU = "qemu-system-x86_64"
READY = b"cube-ready"
BOOT_S = 60  # Longest boot while a machine and an accelerator are chosen.
# Without ACPI, as intended for this machine type; with ACPI, Linux finds no clock under TCG.
MICROVM = "microvm,acpi=off,isa-serial=on,pit=on,pic=on,rtc=on"
MOST_BYTES = 1 << 19  # Output of a command: the answer must fit into a line of 1 MiB.

# Reads a line of base64 for each command, runs it, and writes a line with its status, output and errors.
INIT = """#!/bin/busybox sh
b=/bin/busybox
$b mkdir -p /proc /sys /tmp /dev
$b mount -t proc proc /proc
$b mount -t devtmpfs dev /dev 2>/dev/null
exec </dev/ttyS0 >/dev/ttyS0 2>/dev/null
$b stty raw -echo
echo cube-ready
while read -r line; do
    echo "$line" | $b base64 -d >/tmp/command
    $b sh /tmp/command >/tmp/out 2>/tmp/err </dev/null
    status=$?
    echo "$status:$($b base64 /tmp/out | $b tr -d '\\n'):$($b base64 /tmp/err | $b tr -d '\\n')"
done
"""


def cpio(files):
    """An archive in the format newc. `files` are (name, mode, content)."""
    out = bytearray()
    for number, (name, mode, data) in enumerate(files + [("TRAILER!!!", 0, b"")], 1):
        rdev = (4, 64) if name == "dev/ttyS0" else (5, 1) if name == "dev/console" else (0, 0)
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, *rdev, len(name) + 1, 0)
        out += b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        out += b"\0" * (-len(out) % 4)
        out += data
        out += b"\0" * (-len(out) % 4)
    return bytes(out)


class Vm:
    """A VM; its serial port is its standard input and output."""

    def __init__(self, command, timeout_s):
        self.lock = threading.Lock()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            self.until(READY, timeout_s)
        except Exception:
            self.end()
            raise

    def until(self, mark, timeout_s):
        """The line that contains `mark`. A VM that is silent for too long is killed, which ends its output."""
        timer = threading.Timer(timeout_s, self.process.kill)
        timer.start()
        try:
            while True:
                line = self.process.stdout.readline(4 * MOST_BYTES)
                if not line:
                    why = self.process.stderr.read(400).decode(errors="replace").strip()
                    raise RuntimeError(f"the VM ended or did not answer within {timeout_s} s: {why}")
                if mark in line:
                    return line
        finally:
            timer.cancel()

    def run(self, argv, timeout_s):
        quoted = " ".join("'" + word.replace("'", "'\\''") + "'" for word in argv)
        with self.lock:
            self.process.stdin.write(base64.b64encode(quoted.encode()) + b"\n")
            self.process.stdin.flush()
            status, out, err = self.until(b":", timeout_s).strip().split(b":")
        out, err = (base64.b64decode(part)[:MOST_BYTES].decode(errors="replace") for part in (out, err))
        return {"status": int(status), "stdout": out, "stderr": err}

    def end(self):
        self.process.kill()
        self.process.wait()


class Platform:
    def __init__(self, arguments):
        self.guest, self.dir = arguments.guest, tempfile.mkdtemp(prefix="cube-qemu-")
        self.initrd = os.path.join(self.dir, "initrd")
        with open(os.path.join(self.guest, "busybox"), "rb") as file:
            busybox = file.read()
        files = [(name, 0o40755, b"") for name in ("bin", "dev", "proc", "sys", "tmp")]
        files += [("bin/busybox", 0o100755, busybox), ("init", 0o100755, INIT.encode())]
        files += [(f"bin/{name}", 0o120777, b"busybox") for name in ("sh", "echo", "cat", "true", "false")]
        files += [("dev/console", 0o20600, b""), ("dev/ttyS0", 0o20600, b"")]
        with open(self.initrd, "wb") as file:
            file.write(cpio(files))
        version = subprocess.run([QEMU, "--version"], capture_output=True, text=True, check=True).stdout
        self.version = version.splitlines()[0]
        self.choose(arguments)
        self.alive = {}

    def choose(self, arguments):
        """Boots a VM of each kind until one responds."""
        tried = []
        for accel in [arguments.accel] if arguments.accel else ["kvm", "tcg"]:
            for machine in [arguments.machine] if arguments.machine else ["microvm", "pc"]:
                self.accel, self.machine = accel, machine
                try:
                    vm = Vm(self.command(), BOOT_S if accel == "tcg" else 10)
                except Exception as error:
                    tried.append(f"{machine} with {accel}: {error}")
                    continue
                vm.end()
                return
        raise RuntimeError("no VM of QEMU boots here: " + "; ".join(tried))

    def command(self):
        machine = MICROVM if self.machine == "microvm" else "pc"
        return [
            QEMU, "-accel", self.accel, "-machine", machine, "-cpu", "host" if self.accel == "kvm" else "max",
            "-m", "256", "-smp", "1", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
            "-serial", "stdio", "-kernel", os.path.join(self.guest, "vmlinux"), "-initrd", self.initrd,
            "-append", "console=none quiet panic=-1 rdinit=/init mitigations=off",
        ]

    def label(self):
        how = "KVM" if self.accel == "kvm" else "TCG (emulated, without KVM)"
        return f"VM of QEMU, machine {self.machine}, {how}, booted from a kernel"

    def answer(self, r):
        timeout_s = r["timeout_ms"] / 1000
        if r["op"] == "hello":
            return {"protocol": 1, "version": self.version, "platform": self.label()}
        if r["op"] == "start":
            self.alive[r["name"]] = Vm(self.command(), timeout_s)
            return {"sandbox": r["name"]}
        if r["op"] == "exec":
            return self.alive[r["sandbox"]].run(r["argv"], timeout_s)
        if r["op"] == "stop":
            self.alive.pop(r["sandbox"]).end()
            return {}
        raise RuntimeError(f"unknown op {r['op']}")

    def end(self):
        for vm in list(self.alive.values()):
            vm.end()
        shutil.rmtree(self.dir, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("guest")
    parser.add_argument("--machine", choices=["microvm", "pc"])
    parser.add_argument("--accel", choices=["kvm", "tcg"])
    platform, lock = Platform(parser.parse_args()), threading.Lock()

    def reply(r):
        try:
            answer = platform.answer(r)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}".replace("\n", " ")[:900]}
        with lock:
            print(json.dumps({"id": r["id"], **answer}), flush=True)

    for line in sys.stdin:
        threading.Thread(target=reply, args=(json.loads(line),)).start()
    deadline = time.monotonic() + 10
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(max(0, deadline - time.monotonic()))
    platform.end()


main()
