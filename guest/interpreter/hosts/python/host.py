"""Hosts of Python contexts. This program is their zygote: it loads all modules and then forks hosts, by orders of the
server on its standard input.

Zygote and hosts have one thread each. The server's modules `zygote` and `message` describe the messages. The order at
start matters: the socket is moved from descriptor 0 before user code can read it.
"""

import signal
import sys

signal.signal(signal.SIGINT, signal.SIG_IGN)

from cube_host import control, loop, zygote  # noqa: E402


def main():
    socket = control.take_standard_input()
    # Modules are imported from the user's working directory, not from that of this file.
    sys.path[0] = ""
    sys.argv = [""]
    warm = "--warm" in sys.orig_argv
    host = loop.Loop()
    host.prepare(warm)
    parent = zygote.Zygote(socket)
    parameters = parent.make_spare(host.rehearse) if warm else None
    # Returns in each host, and here once the server has closed the socket.
    if parameters := parameters or parent.run():
        host.run(control.Control(parameters.control), parameters.warm)


main()
