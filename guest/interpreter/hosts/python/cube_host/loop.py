"""The preparation of a host in the zygote, and the loop of a host: one request after another.

Cells run by plain compile and exec. IPython is set up before the first cell, and is used only for magics, rich display
and tracebacks. So a plain cell touches little memory, which every clone of a snapshot would have to copy.
"""

import gc
import os
import signal
import sys

from . import cells, seeds
from .control import Sink


class Loop:
    """A host: runs requests until the server closes the socket."""

    def __init__(self):
        self.control = Sink()
        self.base = {}
        self.cells = cells.Cells(self.control)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")

    def prepare(self, warm):
        """Loads everything that hosts share; if `warm`, also runs typical first cells."""
        if warm:
            seeds.load_ahead()
        self.cells.prepare()
        seeds.use_kernel_for_openssl()
        if warm:
            self.warm_up()
        else:
            seeds.note_generators()
        self.cells.drop_loop()
        # A garbage collection in a fork would copy every page that it visits.
        gc.collect()
        gc.freeze()

    def run(self, control, warm):
        """Runs requests until the server closes the socket."""
        if warm:
            # Copies the pages that users' first cells write before the snapshot.
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
            # The interrupt arrived at the very end of the cell.
            pass
        finally:
            if before is not None:
                restore_environment(before)
            if self.control.forked:
                # A child that the cell has forked returned from it; only the parent continues.
                sys.stdout.flush()
                os._exit(0)
            self.control.done()

    def set_base(self, base):
        """Replaces the sandbox's environment in this process."""
        for name in self.base.keys() - base.keys():
            os.environ.pop(name, None)
        for name, value in base.items():
            swap_environment({name: value})
        self.base = base

    def warm_up(self):
        """Runs typical first cells and removes their traces."""
        from . import heap, warm

        self.control = self.cells.control = Sink()
        for code in warm.CELLS:
            self.cells.run(1, code)
        seeds.note_generators()
        heap.settle()
        self.rehearse()

    def rehearse(self):
        """Runs the whole path of a first cell repeatedly, until it no longer changes memory."""
        self.control = self.cells.control = Sink()
        for _ in range(3):
            self.handle({"n": 1, "code": "1+1", "base": {}, "seed": True})
            self.cells.reset()
        gc.freeze()


def swap_environment(variables):
    """Sets variables. Returns their previous values. Invalid names and values are skipped."""
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
