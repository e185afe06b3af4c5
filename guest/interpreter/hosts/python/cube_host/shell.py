"""The IPython shell, for magics, rich display and tracebacks."""

import builtins
import inspect
import os
import sys
import traceback

os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")

from IPython.core.displayhook import DisplayHook  # noqa: E402
from IPython.core.displaypub import DisplayPublisher  # noqa: E402
from IPython.core.interactiveshell import InteractiveShell  # noqa: E402
from IPython.display import display  # noqa: E402
from traitlets import Any, Type  # noqa: E402
from traitlets.config import Config  # noqa: E402

from . import mime  # noqa: E402


class Publisher(DisplayPublisher):
    """`display()`: sends a result that is not the main result of the cell."""

    def publish(self, data, metadata=None, *, transient=None, update=False, **kwargs):
        # Clients cannot update a displayed result.
        if not update:
            self.shell.push_bundle(data, main=False)
            self.shell.cells.control.flush()

    def clear_output(self, wait=False):
        """Does nothing: clients cannot remove results."""


class Hook(DisplayHook):
    """Shows the last expression of cells that IPython itself runs, as in `%%capture` or `%run`."""

    def write_output_prompt(self):
        """Does nothing: clients number results themselves."""

    def write_format_data(self, format_dict, md_dict=None):
        self.shell.push_bundle(format_dict, main=True)

    def finish_displayhook(self):
        self.shell.cells.control.flush()


class Shell(InteractiveShell):
    """The shell that `get_ipython()` returns."""

    displayhook_class = Type(Hook)
    display_pub_class = Type(Publisher)
    cells = Any()

    def enable_gui(self, gui=None):
        """Does nothing: there is no terminal."""

    def ask_exit(self):
        """`exit()`: ends the cell, not the context."""
        raise SystemExit

    def system(self, cmd):
        """`!command`: the output goes to the same place as the output of the cell."""
        sys.stdout.flush()
        sys.stderr.flush()
        self.system_raw(cmd)

    def show_result(self, value):
        """Sends the value of a cell's last expression."""
        data, _ = self.display_formatter.format(value)
        if data:
            self.push_bundle(data, main=True)

    def push_bundle(self, data, main):
        control = self.cells.control
        control.push(mime.event(data, main))

    def report(self, error):
        """Sends the error that ended a cell."""
        trace = skip_host_frames(error.__traceback__)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        original, inspect.getmodule = inspect.getmodule, module_of
        try:
            if isinstance(error, SyntaxError) and trace is None:
                lines = self.SyntaxTB.structured_traceback(type(error), error, [])
            else:
                lines = self.InteractiveTB.structured_traceback(type(error), error, trace, tb_offset=0)
        except Exception:  # noqa: BLE001 - a traceback that cannot be made pretty is shown plainly
            lines = traceback.format_exception(type(error), error, trace)
        finally:
            inspect.getmodule = original
        self._showtraceback(type(error), error, lines)

    def _showtraceback(self, etype, evalue, stb):
        try:
            value = str(evalue)
        except Exception:  # noqa: BLE001 - the user's own `__str__`
            value = "<no text>"
        self.cells.control.error(etype.__name__, value, "\n".join(stb))


def module_of(thing, _filename=None):
    """Replaces `inspect.getmodule` by a look-up of the name in a frame or function. The original examines each of two
    thousand modules, several times per traceback, and touches 16 MB."""
    frame = getattr(thing, "tb_frame", thing)
    names = getattr(frame, "f_globals", None)
    name = names.get("__name__") if names is not None else getattr(thing, "__module__", None)
    return sys.modules.get(name)


def skip_host_frames(trace):
    """The frames of a traceback that belong to user code."""
    here = os.path.dirname(__file__) + os.sep
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(here):
        trace = trace.tb_next
    return trace


def make(cells):
    """Creates the shell on the namespace of the cells."""
    config = Config()
    config.InteractiveShell.colors = "nocolor"
    config.PlainTextFormatter.max_seq_length = 0
    config.HistoryManager.enabled = False
    config.HistoryManager.hist_file = ":memory:"
    shell = Shell.instance(
        config=config, user_module=cells.module, user_ns=cells.ns, cells=cells
    )
    mime.register(shell)
    builtins.get_ipython = shell.get_ipython
    builtins.display = display
    return shell
