"""The control socket: requests come in, events go out, one line of JSON each."""

import fcntl
import os
import socket
import sys
from _thread import allocate_lock
from json import JSONDecoder
from json.encoder import encode_basestring_ascii as quote

# Bytes read from the socket at once: into a buffer that stays, since a large allocation would have the C
# library tidy up its heap, a thousand pages of it in a clone's first cell.
CHUNK = 1 << 14
# The decoder's core: `json.loads` would look for other encodings and for white space first.
scan = JSONDecoder().scan_once


def take_standard_input():
    """Moves the socket away from descriptor 0, which then gives nothing to whoever reads it."""
    fd = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return socket.socket(fileno=fd)


class Control:
    """Both directions. Events wait until something makes them go, so that a short cell is one write."""

    def __init__(self, sock):
        self._sock = sock
        self._input = b""
        self._buffer = bytearray(CHUNK)
        self._output = []
        self._lock = allocate_lock()
        # While something is sent an interrupt waits: half a line would spoil all that follow.
        self.sending = False
        self.interrupted = False
        # Whether this is a child that a cell has forked: it has nothing to say here.
        self.forked = False
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self):
        self.forked = True

    def next_request(self):
        """The next request; None when the server is gone."""
        while b"\n" not in self._input:
            size = self._sock.recv_into(self._buffer)
            if size == 0:
                return None
            self._input += self._buffer[:size]
        line, self._input = self._input.split(b"\n", 1)
        request, _ = scan(line.decode(), 0)
        return request

    def push(self, line):
        """Adds a line, without its end, to what goes next."""
        self._output.append(line)

    def flush(self):
        """Sends what waits. What was printed before it goes first."""
        sys.stdout.flush()
        sys.stderr.flush()
        if self.forked:
            return
        with self._lock:
            self.sending = True
            lines, self._output = self._output, []
            lines.append("")
            self._sock.sendall("\n".join(lines).encode("utf-8", "backslashreplace"))
            self.sending = False
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt

    def text_result(self, text):
        """The result of a cell when it is nothing but text: the common case, kept short."""
        self.push('{"type":"result","text":%s,"is_main_result":true}' % quote(text))

    def error(self, name, value, traceback):
        """The error that ended a cell."""
        self.push(
            '{"type":"error","name":%s,"value":%s,"traceback":%s}'
            % (quote(name), quote(value), quote(traceback))
        )

    def ready(self):
        self.push('{"ready":true}')
        self.flush()

    def done(self):
        self.push('{"done":true}')
        self.flush()


class Sink(Control):
    """Takes everything and sends nothing: for warming up."""

    def __init__(self):
        super().__init__(None)

    def flush(self):
        self._output.clear()
