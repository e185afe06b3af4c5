"""Pseudo-terminals."""

from e2b import PtySize

from . import Cases, raises, same, sandbox, until

CASES = Cases()
case = CASES


def reader(handle):
    """Collects the output of a terminal until it ends."""
    said = bytearray()

    def wait():
        try:
            handle.wait(on_pty=said.extend)
        except Exception as error:
            return error

    return said, wait


@case
def pty_create():
    with sandbox() as s:
        handle = s.pty.create(PtySize(rows=24, cols=80), envs={"ABC": "123"}, cwd="/tmp")
        s.pty.send_stdin(handle.pid, b"echo $ABC-$((40+2)); pwd; echo $TERM; exit\n")
        said, wait = reader(handle)
        wait()
        text = said.decode()
        for wanted in ("123-42", "/tmp", "xterm-256color"):
            assert wanted in text, text


@case
def pty_resize():
    with sandbox() as s:
        handle = s.pty.create(PtySize(rows=24, cols=80))
        s.pty.resize(handle.pid, PtySize(rows=30, cols=132))
        s.pty.send_stdin(handle.pid, b"stty size; exit\n")
        said, wait = reader(handle)
        wait()
        assert "30 132" in said.decode(), said.decode()


@case
def pty_kill():
    with sandbox() as s:
        handle = s.pty.create(PtySize(rows=24, cols=80))
        assert handle.pid in [p.pid for p in s.commands.list()]
        same(s.pty.kill(handle.pid), True)
        until("its end", lambda: handle.pid not in [p.pid for p in s.commands.list()])
        same(s.pty.kill(handle.pid), False)


@case
def pty_connect():
    with sandbox() as s:
        handle = s.pty.create(PtySize(rows=24, cols=80))
        handle.disconnect()
        again = s.pty.connect(handle.pid)
        s.pty.send_stdin(handle.pid, b"echo back-$((1+1)); exit\n")
        said, wait = reader(again)
        wait()
        assert "back-2" in said.decode(), said.decode()


@case
def pty_unknown():
    with sandbox() as s:
        raises(Exception, s.pty.send_stdin, 999_999, b"x")
