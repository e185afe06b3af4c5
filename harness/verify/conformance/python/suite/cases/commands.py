"""Commands: output, exit codes, input, background commands."""

import threading
import time

from e2b import (
    AsyncSandbox,
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    SandboxException,
    TimeoutException,
)

from . import TEMPLATE, Absent, Cases, raises, same, sandbox, until

CASES = Cases()
case = CASES
# Text of the SDK's error if a stream breaks and a health check finds that the sandbox is gone.
KILLED = "sandbox was killed or reached its end of life"


@case
def run_foreground():
    with sandbox() as s:
        result = s.commands.run("echo out; echo err >&2")
        same((result.stdout, result.stderr, result.exit_code), ("out\n", "err\n", 0))


@case
def run_exit_code():
    with sandbox() as s:
        error = raises(CommandExitException, s.commands.run, "echo before; echo why >&2; exit 7")
        same((error.exit_code, error.stdout, error.stderr), (7, "before\n", "why\n"))


@case
def run_callbacks_stream():
    with sandbox() as s:
        seen = []
        began = time.monotonic()
        s.commands.run(
            "echo 1; sleep 1; echo 2; echo 3 >&2",
            on_stdout=lambda text: seen.append((text, time.monotonic() - began)),
            on_stderr=lambda text: seen.append((text, time.monotonic() - began)),
        )
        same([text for text, _ in seen], ["1\n", "2\n", "3\n"])
        assert seen[1][1] - seen[0][1] > 0.5, f"not streamed: {seen}"


@case
def run_background():
    with sandbox() as s:
        handle = s.commands.run("sleep 0.2; echo done", background=True)
        assert handle.pid > 0
        same(handle.wait().stdout, "done\n")


@case
def run_list_and_kill():
    with sandbox() as s:
        handle = s.commands.run("sleep 60", background=True)
        assert handle.pid in [p.pid for p in s.commands.list()]
        same(s.commands.kill(handle.pid), True)
        error = raises(CommandExitException, handle.wait)
        assert error.exit_code != 0
        until("the end of the command", lambda: handle.pid not in [p.pid for p in s.commands.list()])


@case
def kill_unknown_process():
    with sandbox() as s:
        same(s.commands.kill(999_999), False)


@case
def run_connect():
    with sandbox() as s:
        handle = s.commands.run("read line; echo got $line; exit 3", background=True, stdin=True)
        handle.disconnect()
        again = s.commands.connect(handle.pid)
        s.commands.send_stdin(handle.pid, "it\n")
        error = raises(CommandExitException, again.wait)
        same((error.exit_code, error.stdout), (3, "got it\n"))


@case
def connect_unknown_process():
    with sandbox() as s:
        raises(NotFoundException, s.commands.connect, 999_999)


@case
def run_stdin():
    with sandbox() as s:
        handle = s.commands.run("cat", background=True, stdin=True)
        s.commands.send_stdin(handle.pid, "hello ")
        s.commands.send_stdin(handle.pid, "there\n")
        s.commands.close_stdin(handle.pid)
        same(handle.wait().stdout, "hello there\n")


@case
def run_stdin_stream():
    with sandbox() as s:
        if not hasattr(s.commands, "stream_input"):
            raise Absent("no commands.stream_input")
        handle = s.commands.run("head -c 300000 | sha256sum", background=True, stdin=True)
        data = b"0123456789" * 30_000
        s.commands.stream_input(handle.pid, (data[i : i + 50_000] for i in range(0, 300_000, 50_000)))
        import hashlib

        same(handle.wait().stdout.split()[0], hashlib.sha256(data).hexdigest())


@case
def run_without_stdin_ends():
    with sandbox() as s:
        same(s.commands.run("cat", timeout=10).stdout, "")


@case
def run_timeout():
    with sandbox() as s:
        raises(TimeoutException, s.commands.run, "sleep 30", timeout=1)
        until("the end of the command", lambda: not [p for p in s.commands.list() if "sleep 30" in str(p.args)])


@case
def run_cwd():
    with sandbox() as s:
        same(s.commands.run("pwd").stdout, "/home/user\n")
        same(s.commands.run("pwd", cwd="/tmp").stdout, "/tmp\n")
        error = raises(InvalidArgumentException, s.commands.run, "pwd", cwd="/no/such")
        assert "does not exist" in str(error), error


@case
def run_user():
    with sandbox() as s:
        same(s.commands.run("whoami; echo $HOME").stdout, "user\n/home/user\n")
        same(s.commands.run("whoami; echo $HOME", user="root").stdout, "root\n/root\n")
        same(s.commands.run("sudo whoami").stdout, "root\n")


@case
def run_unknown_user():
    with sandbox() as s:
        error = raises(Exception, s.commands.run, "true", user="nobody-here")
        assert "invalid username" in str(error), error


@case
def run_envs():
    with sandbox() as s:
        same(s.commands.run("echo $A-$B", envs={"A": "1", "B": "two words"}).stdout, "1-two words\n")


@case
def run_large_output():
    with sandbox() as s:
        result = s.commands.run("head -c 8000000 /dev/zero | tr '\\0' x", timeout=60)
        same(len(result.stdout), 8_000_000)
        same(set(result.stdout), {"x"})


@case
def run_unicode_output():
    with sandbox() as s:
        result = s.commands.run("for i in $(seq 20000); do printf 'žluť🐎'; done")
        same(result.stdout, "žluť🐎" * 20000)


@case
def run_multiline_and_quotes():
    with sandbox() as s:
        same(s.commands.run("echo 'a \"b\" $c'\nprintf '%s|' one \"two three\"").stdout, 'a "b" $c\none|two three|')


@case
def run_many_in_one_sandbox():
    with sandbox() as s:
        results = {}

        def one(number: int) -> None:
            results[number] = s.commands.run(f"sleep 0.3; echo {number}").stdout

        threads = [threading.Thread(target=one, args=(n,)) for n in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        same(results, {n: f"{n}\n" for n in range(20)})


@case
def run_outlives_its_client():
    with sandbox() as s:
        handle = s.commands.run("sleep 1; echo alive > /tmp/mark; sleep 30", background=True)
        handle.disconnect()
        until("the file", lambda: s.files.exists("/tmp/mark"))
        assert handle.pid in [p.pid for p in s.commands.list()]


@case
def killed_while_a_command_runs():
    with sandbox() as s:
        handle = s.commands.run("sleep 60", background=True)
        s.kill()
        began = time.monotonic()
        error = raises((SandboxException, TimeoutException), handle.wait)
        assert KILLED in str(error), error
        assert time.monotonic() - began < 15


@case
async def killed_while_an_async_command_runs():
    s = await AsyncSandbox.create(TEMPLATE, timeout=60)
    handle = await s.commands.run("sleep 60", background=True)
    await s.kill()
    try:
        ended = await handle.wait()
    except (SandboxException, TimeoutException) as error:
        assert KILLED in str(error), error
    else:
        raise AssertionError(f"the command ended with {ended!r}")


@case
def languages():
    with sandbox() as s:
        same(s.commands.run("python -c 'print(6*7)'").stdout, "42\n")
        same(s.commands.run("node -e 'console.log(6*7)'").stdout, "42\n")
        assert s.commands.run("git --version").stdout.startswith("git version")
        assert s.commands.run("pip --version").stdout.startswith("pip ")
        assert s.commands.run("npm --version").stdout[0].isdigit()
