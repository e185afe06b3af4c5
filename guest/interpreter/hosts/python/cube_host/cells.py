"""Cells: parsing, running, and showing the value of the last expression."""

import ast
import builtins
import linecache
import sys
import types

# Results of exactly these types are shown by `repr`, with the same output as IPython.
PLAIN = frozenset((int, float, bool, str, complex, bytes))
# Short containers of them and of None are shown by `repr` too: IPython's printer and its surroundings would touch eight
# hundred pages.
ITEMS = PLAIN | {type(None)}
CONTAINERS = frozenset((tuple, list, dict))
# IPython breaks longer text into lines.
LINE = 79
# `inspect.CO_COROUTINE`, without importing inspect.
CO_COROUTINE = 0x80
# Largest number of results in `Out`.
MAX_OUT = 1000
# Flags of `from __future__` statements in code objects and for `compile`.
FUTURE = 0x01FE0000


class Cells:
    """Runs the cells of a context in one namespace."""

    def __init__(self, control):
        self.control = control
        self.module = types.ModuleType("__main__", "The cells of this context.")
        self.module.__builtins__ = builtins
        sys.modules["__main__"] = self.module
        self.ns = self.module.__dict__
        self.flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        self.shell = None
        # Parts of the shell that every cell needs. Looking them up in the shell would touch more pages.
        self.inputs = self.raw_inputs = ()
        self.callbacks = {}
        # Callbacks that were registered before the first cell, and the state that they examine. Without figures they do
        # nothing, and calling them would run code of matplotlib.
        self.usual = {}
        self.figures = self.shown = ()
        self.transformers = ()
        # Registrations of formatters by type: the current ones, and those before the first cell.
        self.printers = ()
        self.mime = None
        # Whether a magic may have changed the display of plain values.
        self.display_changed = False
        self.loop = None
        self.running = False
        self.number = 0
        # Whether the running cell is part of the history.
        self.stored = True
        # Numbers of cells by the file names with which they were compiled.
        self.names = {}

    def prepare(self):
        """Creates the IPython shell, which takes some hundred milliseconds. Called before the first cell."""
        from . import mime, shell

        self.shell = shell.make(self)
        self.mime = mime
        self.take_parts()
        builtins.input = refuse_input

    def take_parts(self):
        history = self.shell.history_manager
        self.inputs, self.raw_inputs = history.input_hist_parsed, history.input_hist_raw
        self.callbacks = self.shell.events.callbacks
        self.transformers = self.shell.ast_transformers
        self.usual = {event: list(callbacks) for event, callbacks in self.callbacks.items()}
        display = self.shell.display_formatter
        formatters = [*display.formatters.values(), display.mimebundle_formatter, display.ipython_display_formatter]
        self.printers = [(f.type_printers, f.type_printers.copy()) for f in formatters]
        if helpers := sys.modules.get("matplotlib._pylab_helpers"):
            self.figures = helpers.Gcf.figs
        if backend := sys.modules.get("matplotlib_inline.backend_inline"):
            self.shown = vars(backend.show)

    def reset(self):
        """Clears the history after the warm-up."""
        kept = set(self.shell.user_ns_hidden) | {"__builtins__", "In", "Out", "get_ipython"}
        for name in [name for name in self.ns if name not in kept and not name.startswith("__")]:
            del self.ns[name]
        self.shell.history_manager.reset()
        self.take_parts()
        self.ns["In"], self.ns["Out"] = self.inputs, self.shell.history_manager.output_hist
        self.display_changed = False
        for name in self.names:
            linecache.cache.pop(name, None)
        self.names.clear()
        self.number = 0

    def on_interrupt(self, signum, frame):
        """Interrupts the running cell. Does nothing between cells."""
        if not self.running:
            return
        if self.control.sending:
            self.control.interrupted = True
        else:
            raise KeyboardInterrupt

    def run(self, number, code, stored=True):
        """Runs one cell and sends its events to the control socket. A cell that is not `stored` leaves neither
        history nor result behind."""
        self.number, self.stored = number, stored
        hidden = None
        try:
            self.running = True
            if stored:
                self.remember(code)
            self.trigger("pre_execute")
            value = self.evaluate_cell(dedent(code))
            if value is not None and not code.rstrip().endswith(";"):
                self.show(value)
        except BaseException as error:  # noqa: BLE001 - whatever a cell raises is its result
            hidden = error
        try:
            if hidden is not None:
                self.report(hidden)
            self.trigger("post_execute")
        except BaseException as error:  # noqa: BLE001 - as above, for what IPython's users registered
            self.report(error)
        finally:
            self.running = False

    def remember(self, code):
        self.inputs.append(code)
        self.raw_inputs.append(code)

    def evaluate_cell(self, code):
        """Runs a cell. Returns the value of its last expression."""
        name = "<ipython-input-%d>" % self.number
        self.names[name] = self.number
        self.note_source(code, name)
        if not self.transformers and (parts := compile_plainly(code, name, self.flags)):
            return self.run_parts(*parts)
        try:
            tree = self.parse(code, name)
        except SyntaxError as error:
            # Code that is not Python may be IPython syntax: magics, `!command`, `name?`.
            transformed = self.transform(code, error)
            self.note_source(transformed, name)
            tree = self.parse(transformed, name)
            # Magics may run further cells and capture their output.
            with self.shell.builtin_trap, self.shell.display_trap:
                return self.run_parts(*self.compile_tree(tree, name))
        return self.run_parts(*self.compile_tree(tree, name))

    def note_source(self, code, name):
        """Registers the source for tracebacks and `inspect`."""
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)

    def parse(self, code, name):
        return compile(code, name, "exec", ast.PyCF_ONLY_AST | self.flags, True)

    def transform(self, code, error):
        self.sync_shell()
        self.display_changed = True
        try:
            transformed = self.shell.transform_cell(code)
        except SyntaxError:
            raise error from None
        if transformed.strip() == code.strip():
            raise error
        return transformed

    def compile_tree(self, tree, name):
        """Code objects of a cell's statements and of its last expression; None for a missing one."""
        for transformer in self.transformers:
            tree = transformer.visit(tree)
        body, last = tree.body, None
        if body and type(body[-1]) is ast.Expr:
            expression = ast.Expression(body.pop().value)
            last = compile(expression, name, "eval", self.flags, True)
        return compile(tree, name, "exec", self.flags, True) if body else None, last

    def run_parts(self, body, last):
        if body is not None:
            self.evaluate(body)
        return None if last is None else self.evaluate(last)

    def evaluate(self, code):
        # Future statements of a cell apply to later cells.
        self.flags |= code.co_flags & FUTURE
        value = eval(code, self.ns)  # noqa: S307 - running the user's code is the purpose
        if code.co_flags & CO_COROUTINE:
            value = self.wait_for(value)
        return value

    def wait_for(self, coroutine):
        """Runs a cell with top-level await. The event loop stays: its tasks continue when a later cell awaits."""
        import asyncio

        if self.loop is None or self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
        task = self.loop.create_task(coroutine)
        try:
            return self.loop.run_until_complete(task)
        except KeyboardInterrupt:
            task.cancel()
            # Lets the task clean up; its result is discarded.
            self.loop.run_until_complete(asyncio.wait([task], timeout=1))
            raise

    def drop_loop(self):
        """Closes the event loop, whose descriptors forks would share."""
        if self.loop is not None:
            import asyncio

            self.loop.close()
            self.loop = None
            # Restores the state of a process that never had a loop.
            asyncio.set_event_loop_policy(None)

    def show(self, value):
        """Shows the value of a cell's last expression."""
        if self.stored:
            self.note(value)
        if not self.display_changed:
            if type(value) in PLAIN:
                self.control.text_result(strip_quotes(repr(value)))
                return
            if type(value) in CONTAINERS and (text := self.short_text(value)):
                self.show_container(value, text)
                return
        self.sync_shell()
        self.shell.show_result(value)

    def short_text(self, value):
        """`repr` of a container if IPython would show the same; otherwise None."""
        # Each item takes at least one character and a comma.
        if 2 * len(value) > LINE:
            return None
        kinds = set(map(type, value))
        if type(value) is dict:
            kinds.update(map(type, value.values()))
        if not kinds <= ITEMS or self.has_own_printer({type(value)} | kinds):
            return None
        try:
            text = repr(value)
        except ValueError:
            # An integer that is too long to be converted.
            return None
        return text if len(text) <= LINE else None

    def has_own_printer(self, kinds):
        """Whether the user has registered a formatter for one of these types."""
        return any(now.get(kind) is not usual.get(kind) for now, usual in self.printers for kind in kinds)

    def show_container(self, value, text):
        if type(value) is tuple:
            self.control.text_result(text)
            return
        bundle = {"text/plain": text, "application/json": self.mime.as_json(value)}
        self.control.push(self.mime.event(bundle, main=True))

    def note(self, value):
        """Stores a result as `_`, `_3` and `Out[3]`."""
        ns, out = self.ns, self.ns.get("Out")
        if type(out) is not dict:
            return
        if len(out) >= MAX_OUT:
            del out[next(iter(out))]
        out[self.number] = value
        ns["___"], ns["__"], ns["_"] = ns.get("__", ""), ns.get("_", ""), value
        ns["_%d" % self.number] = value

    def report(self, error):
        self.sync_shell()
        self.shell.report(error)

    def sync_shell(self):
        """Passes cells to IPython that were run without it."""
        self.shell.execution_count = self.number
        self.shell.compile._filename_map.update(self.names)

    def trigger(self, event):
        """Runs callbacks that are registered with IPython for this event, such as the drawing of figures."""
        callbacks = self.callbacks[event]
        if callbacks != self.usual[event] or self.is_noteworthy():
            self.shell.events.trigger(event)

    def is_noteworthy(self):
        """Whether the usual callbacks have something to do: a figure exists or is to be shown, or warnings are to be
        reset."""
        drawn = "_draw_called" in self.shown and self.shown["_draw_called"]
        return self.figures or drawn or "__warningregistry__" in self.ns


def compile_plainly(code, name, flags):
    """Code objects of a cell's statements and of its last expression, without a syntax tree of Python objects, which
    takes half of the memory that a short cell touches. The cell is cut where its last line without indentation
    begins; if both parts are valid Python, the last statement begins there. None if this is not conclusive."""
    lines = code.splitlines(keepends=True)
    cut = len(lines) - 1
    while cut >= 0 and (lines[cut][0] in " \t\n\r)]}#" or not lines[cut].strip()):
        cut -= 1
    if cut < 0:
        return None
    head, tail = "".join(lines[:cut]), "".join(lines[cut:])
    # A semicolon may separate statements or suppress the output, which needs a syntax tree.
    if ";" in tail or tail[0] in "%!?@":
        return None
    try:
        body = compile(head, name, "exec", flags, True) if head.strip() else None
        # Keeps the line numbers.
        tail = "\n" * cut + tail
        try:
            return body, compile(tail, name, "eval", flags, True)
        except SyntaxError:
            return compile(code, name, "exec", flags, True), None
    except SyntaxError:
        return None


def dedent(code):
    """Removes the common indentation of code that was pasted from an indented block."""
    stripped = code.lstrip("\n\r")
    if stripped[:1] not in (" ", "\t"):
        return code
    import textwrap

    return textwrap.dedent(code)


def strip_quotes(text):
    """Removes the quotes around a text, as official servers do."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text


def refuse_input(prompt=""):
    raise RuntimeError("input() was called, but nobody is there to answer: standard input is empty")
