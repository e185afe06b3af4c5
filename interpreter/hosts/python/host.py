"""Host of Python contexts: takes cells from its standard input, which is a socket, and answers there.

One thread. The messages are described in the server's `message` module. The order at start matters: the
control socket leaves descriptor 0 before anything of the user's can read it.
"""

import signal
import sys

signal.signal(signal.SIGINT, signal.SIG_IGN)

from cube_host import control, loop  # noqa: E402


def main():
    socket = control.take_standard_input()
    # Modules are looked for where the user is, not where this file is.
    sys.path[0] = ""
    sys.argv = [""]
    loop.Loop(control.Control(socket)).run(warm="--warm" in sys.orig_argv)


main()
