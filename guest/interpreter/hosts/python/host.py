"""Hosts of Python contexts. This program is their zygote: it loads everything and then makes hosts, as forks of
itself, at the orders of the server, which come from its standard input.

One thread, in zygote and hosts. The messages are described in the server's modules `zygote` and `message`. The order
at start matters: the socket leaves descriptor 0 before anything of the user's can read it.
"""

import signal
import sys

signal.signal(signal.SIGINT, signal.SIG_IGN)

from cube_host import control, loop, zygote  # noqa: E402


def main():
    socket = control.take_standard_input()
    # Modules are looked for where the user is, not where this file is.
    sys.path[0] = ""
    sys.argv = [""]
    warm = "--warm" in sys.orig_argv
    host = loop.Loop()
    host.prepare(warm)
    parent = zygote.Zygote(socket)
    birth = parent.make_spare(host.rehearse) if warm else None
    # Comes back in each host, and here when the server is gone.
    if birth := birth or parent.run():
        host.run(control.Control(birth.control), birth.warm)


main()
