"""The control socket: requests in, events out, each one line of JSON."""

import fcntl
import os
import socket
import sys
from _thread import allocate_lock
from json import JSONDecoder
from json.encoder import encode_basestring_ascii as quote

# Bytes read from the socket at once, into a permanent buffer: a large allocation would make the C library consolidate
# its heap, which touches a thousand pages in a clone's first cell.
CHUNK = 1 << 14
# The core of the decoder. `json.loads` would first check for other encodings and white space.
scan = JSONDecoder().scan_once


def take_standard_input():
    """Moves the socket away from descriptor 0, which becomes /dev/null."""
    fd = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return socket.socket(fileno=fd)


class Control:
    """The control socket. Events are collected until a flush, so that a short cell takes one write."""

    def __init__(self, sock):
        self._sock = sock
        self._input = b""
        self._buffer = bytearray(CHUNK)
        self._output = []
        self._lock = allocate_lock()
        # Interrupts are deferred during a write: an incomplete line would corrupt the following ones.
        self.sending = False
        self.interrupted = False
        # Whether this process is a child that a cell has forked; it must not write to the socket.
        self.forked = False
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self):
        self.forked = True

    def next_request(self):
        """The next request; None if the server has closed the socket."""
        while b"\n" not in self._input:
            size = self._sock.recv_into(self._buffer)
            if size == 0:
                return None
            self._input += self._buffer[:size]
        line, self._input = self._input.split(b"\n", 1)
        request, _ = scan(line.decode(), 0)
        return request

    def push(self, line):
        """Queues a line, given without its end."""
        self._output.append(line)

    def flush(self):
        """Sends the queue, after flushing standard output and error."""
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
        """Queues a result that is only text, the common case."""
        self.push('{"type":"result","text":%s,"is_main_result":true}' % quote(text))

    def error(self, name, value, traceback):
        """Queues the error that ended a cell."""
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
    """Discards all events, for the warm-up."""

    def __init__(self):
        super().__init__(None)

    def flush(self):
        self._output.clear()
