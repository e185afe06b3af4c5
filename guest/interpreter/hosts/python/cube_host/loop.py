"""What a host is before it is born, and then its loop: one request after the other.

Cells run here by plain compile and exec. IPython stands beside them, made before the first cell, and is
asked only for what it alone knows: magics, rich display, tracebacks. So a plain cell touches little memory,
which each clone of a snapshot would have to copy.
"""

import gc
import os
import signal
import sys

from . import cells, seeds
from .control import Sink


class Loop:
    """Runs requests until the server is gone."""

    def __init__(self):
        self.control = Sink()
        self.base = {}
        self.cells = cells.Cells(self.control)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")

    def prepare(self, warm):
        """Loads what all hosts are to have; `warm`, with what users do first."""
        if warm:
            seeds.load_ahead()
        self.cells.prepare()
        seeds.use_kernel_for_openssl()
        if warm:
            self.warm_up()
        else:
            seeds.note_generators()
        self.cells.drop_loop()
        # A collection in a fork would copy all that it looks at.
        gc.collect()
        gc.freeze()

    def run(self, control, warm):
        """Runs what the server sends, until it is gone."""
        if warm:
            # The pages that users' first cells write are this host's own before the snapshot.
            self.warm_up()
        self.control = self.cells.control = control
        self.control.ready()
        signal.signal(signal.SIGINT, self.cells.on_interrupt)
        while (request := self.control.next_request()) is not None:
            self.handle(request)

    def handle(self, request):
        if request.get("seed"):
            seeds.reseed()
        stored = not request.get("unstored")
        if "base" in request:
            self.set_base(request["base"])
        env = request.get("env")
        before = swap_environment(env) if env else None
        try:
            self.cells.run(request["n"], request["code"], stored)
        except KeyboardInterrupt:
            # It came when the cell was as good as over.
            pass
        finally:
            if before is not None:
                restore_environment(before)
            if self.control.forked:
                # A cell's own child came back from it: the rest is the parent's.
                sys.stdout.flush()
                os._exit(0)
            self.control.done()

    def set_base(self, base):
        """Makes the sandbox's environment that of this process."""
        for name in self.base.keys() - base.keys():
            os.environ.pop(name, None)
        for name, value in base.items():
            swap_environment({name: value})
        self.base = base

    def warm_up(self):
        """Does what users do first and leaves no trace of it."""
        from . import heap, warm

        self.control = self.cells.control = Sink()
        for code in warm.CELLS:
            self.cells.run(1, code)
        seeds.note_generators()
        heap.settle()
        self.rehearse()

    def rehearse(self):
        """Takes the whole path of a first cell, until it leaves everything as it finds it."""
        self.control = self.cells.control = Sink()
        for _ in range(3):
            self.handle({"n": 1, "code": "1+1", "base": {}, "seed": True})
            self.cells.reset()
        gc.freeze()


def swap_environment(variables):
    """Sets variables; what they were before. Names and values that no environment can hold are left out."""
    before = {}
    for name, value in variables.items():
        try:
            old = os.environ.get(name)
            os.environ[name] = value
        except ValueError:
            continue
        before[name] = old
    return before


def restore_environment(before):
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
