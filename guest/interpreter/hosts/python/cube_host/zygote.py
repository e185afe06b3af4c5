"""Forks of this process, at the orders of the server: each becomes the host of a context.

The server knows hosts by numbers that it gives them. Their process ids are known here alone, where none is free for
another process before its host was ended by an order.
"""

import ctypes
import json
import os
import signal
import socket

# Longest order: the path of a directory, and some words.
MAX_ORDER = 1 << 15
# `PR_SET_PDEATHSIG` of prctl(2).
SET_PARENT_DEATH_SIGNAL = 1


class Birth:
    """What a host is born with."""

    def __init__(self, control, warm):
        self.control = control
        self.warm = warm


class Zygote:
    """Takes orders until the server is gone."""

    def __init__(self, orders):
        self.orders = orders
        # Process ids by the server's numbers.
        self.hosts = {}
        # Told to end, and not yet out of the process table.
        self.ended = []
        # A child that was made before the snapshot, which saves the first new context of a clone the fork, and the
        # way to it.
        self.spare = None
        # Looked up here, so that no host has to.
        self.prctl = ctypes.CDLL(None).prctl

    def run(self):
        """Follows orders. None when the server is gone; in a host, its birth."""
        signal.signal(signal.SIGCHLD, self.bury)
        while True:
            packet, ends = receive(self.orders)
            if not packet:
                return None
            order = json.loads(packet)
            number = order["host"]
            if order["order"] == "fork":
                if birth := self.make_host(order, ends):
                    return birth
            elif order["order"] == "interrupt":
                send(signal.SIGINT, self.hosts.get(number))
            elif order["order"] == "end":
                self.end(self.hosts.pop(number, None))

    def make_host(self, order, ends):
        """None here; in the host, its birth."""
        pid = None if order.get("warm") else self.use_spare(order, ends)
        if pid is None and (pid := self.fork()) == 0:
            return become_host(order, ends)
        for end in ends:
            os.close(end)
        # Without a process the server sees that the host's socket closes.
        if pid is not None:
            self.hosts[order["host"]] = pid
        return None

    def make_spare(self, rehearse):
        """Comes back when there is one. None here; in the spare, when it is used, its birth."""
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
        """Its process id; None when there is none."""
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
        """As `os.fork`, and the child ends with this process and leads a group of its own. None when there can be
        no child."""
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            return None
        if pid == 0:
            self.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
            if os.getppid() != parent:
                # It died before it was asked to take this one along.
                os._exit(1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.orders.close()
            if self.spare is not None:
                self.spare[1].close()
        try:
            # In both, so that the group is there whoever comes first.
            os.setpgid(pid, pid)
        except OSError:
            # The child is gone.
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
    """Takes a child that has ended out of the process table."""
    try:
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        # A signal came while this was done, and did it.
        return False


def receive(orders):
    """A packet, empty at the end, and the descriptors that came with it."""
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
    return Birth(socket.socket(fileno=control), order.get("warm", False))


def send(number, pid):
    """Signals a host with all that it started."""
    if pid is None:
        return
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, number)
        except ProcessLookupError:
            # All that is left of it is its entry in the process table, or it has left its group.
            pass
