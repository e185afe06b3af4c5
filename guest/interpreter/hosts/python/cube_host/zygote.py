"""The zygote: forks itself by orders of the server. Each fork becomes the host of a context.

The server refers to hosts by numbers that it assigns. Only this process uses their PIDs; it reaps a host only after the
order to end it, so that the PID cannot be reused before.
"""

import ctypes
import json
import os
import signal
import socket

# Longest order in bytes: the path of a directory and some words.
MAX_ORDER = 1 << 15
# `PR_SET_PDEATHSIG` of prctl(2).
SET_PARENT_DEATH_SIGNAL = 1


class Parameters:
    """The parameters of a new host."""

    def __init__(self, control, warm):
        self.control = control
        self.warm = warm


class Zygote:
    """Carries out orders until the server closes the socket."""

    def __init__(self, orders):
        self.orders = orders
        # PIDs by the server's numbers.
        self.hosts = {}
        # PIDs of killed hosts that are not yet reaped.
        self.ended = []
        # A child that was forked before the snapshot, so that the first new context of a clone needs no fork; and the
        # socket to it.
        self.spare = None
        # Looked up here once for all hosts.
        self.prctl = ctypes.CDLL(None).prctl

    def run(self):
        """Carries out orders. Returns None once the server has closed the socket; in a host, returns its parameters."""
        signal.signal(signal.SIGCHLD, self.bury)
        while True:
            packet, ends = receive(self.orders)
            if not packet:
                return None
            order = json.loads(packet)
            number = order["host"]
            if order["order"] == "fork":
                if parameters := self.make_host(order, ends):
                    return parameters
            elif order["order"] == "interrupt":
                send(signal.SIGINT, self.hosts.get(number))
            elif order["order"] == "end":
                self.end(self.hosts.pop(number, None))

    def make_host(self, order, ends):
        """Returns None here; in the host, returns its parameters."""
        pid = None if order.get("warm") else self.use_spare(order, ends)
        if pid is None and (pid := self.fork()) == 0:
            return become_host(order, ends)
        for end in ends:
            os.close(end)
        # If the fork failed, the server notices that the host's socket closes.
        if pid is not None:
            self.hosts[order["host"]] = pid
        return None

    def make_spare(self, rehearse):
        """Forks a spare host and waits until it is ready. Returns None here; in the spare, returns its parameters once
        it is used."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = self.fork()
        if pid == 0:
            ours.close()
            rehearse()
            theirs.send(b"ready")
            packet, ends = receive(theirs)
            theirs.close()
            return become_host(json.loads(packet), ends)
        theirs.close()
        if pid is not None and ours.recv(16):
            self.spare = (pid, ours)
        return None

    def use_spare(self, order, ends):
        """Uses the spare host. Returns its PID; None if there is no spare."""
        if self.spare is None:
            return None
        (pid, way), self.spare = self.spare, None
        with way:
            try:
                socket.send_fds(way, [json.dumps(order).encode()], ends)
            except OSError:
                self.end(pid)
                return None
        return pid

    def fork(self):
        """Like `os.fork`, but the child ends with this process and leads a new process group. Returns None if the fork
        failed."""
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            return None
        if pid == 0:
            self.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
            if os.getppid() != parent:
                # The parent ended before the death signal was set.
                os._exit(1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.orders.close()
            if self.spare is not None:
                self.spare[1].close()
        try:
            # In both processes, so that the group exists whichever runs first.
            os.setpgid(pid, pid)
        except OSError:
            # The child has ended.
            pass
        return pid

    def end(self, pid):
        if pid is not None:
            send(signal.SIGKILL, pid)
            self.ended.append(pid)
            self.bury()

    def bury(self, signum=None, frame=None):
        self.ended = [pid for pid in self.ended if is_there(pid)]


def is_there(pid):
    """Reaps a child that has ended."""
    try:
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        # A signal handler has reaped it in the meantime.
        return False


def receive(orders):
    """Receives a packet, which is empty at the end, and its descriptors."""
    packet, ends, _, _ = socket.recv_fds(orders, MAX_ORDER, 3, socket.MSG_CMSG_CLOEXEC)
    return packet, ends


def become_host(order, ends):
    control, stdout, stderr = ends
    for end, standard in ((stdout, 1), (stderr, 2)):
        os.dup2(end, standard)
        os.close(end)
    try:
        os.chdir(order["cwd"])
    except OSError:
        os._exit(1)
    return Parameters(socket.socket(fileno=control), order.get("warm", False))


def send(number, pid):
    """Signals a host's process group."""
    if pid is None:
        return
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, number)
        except ProcessLookupError:
            # Only its zombie is left, or it has left its group.
            pass
