"""Pause, resume, snapshots, forks."""

import time

from e2b import NotFoundException, Sandbox

from . import Absent, Cases, raises, same, sandbox, until

CASES = Cases()
case = CASES
BOOT_ID = "cat /proc/sys/kernel/random/boot_id"


def pause(s: Sandbox, **options):
    return (getattr(s, "pause", None) or s.beta_pause)(**options)


def start_counter(s: Sandbox) -> int:
    handle = s.commands.run("for i in $(seq 100000); do echo $i > /tmp/count; sleep 0.05; done", background=True, timeout=0)
    until("the counter", lambda: s.files.exists("/tmp/count"))
    return handle.pid


def count(s: Sandbox) -> int:
    return int(until("a number", lambda: s.files.read("/tmp/count").strip()))


@case
def pause_and_resume():
    with sandbox() as s:
        s.files.write("kept", "here")
        boot_id, pid = s.commands.run(BOOT_ID).stdout, start_counter(s)
        pause(s)
        assert not s.is_running()
        before = None
        again = Sandbox.connect(s.sandbox_id, timeout=60)
        same(again.sandbox_id, s.sandbox_id)
        same(again.files.read("kept"), "here")
        same(again.commands.run(BOOT_ID).stdout, boot_id)
        assert pid in [p.pid for p in again.commands.list()]
        before = count(again)
        until("the counter going on", lambda: count(again) > before)


@case
def pause_in_a_sleep():
    now = "cut -d' ' -f1 /proc/uptime"
    with sandbox() as s:
        s.commands.run(f"{now} > /tmp/begun; sleep 2; {now} > /tmp/waked; mv /tmp/waked /tmp/done", background=True)
        begun = float(until("its begin", lambda: s.files.exists("/tmp/begun") and s.files.read("/tmp/begun").strip()))
        pause(s)
        assert not s.is_running()
        time.sleep(3)
        again = Sandbox.connect(s.sandbox_id, timeout=60)
        assert not again.files.exists("/tmp/done"), "the sleep did not continue after the pause"
        until("its end", lambda: again.files.exists("/tmp/done"))
        slept = float(again.files.read("/tmp/done")) - begun
        assert slept >= 1.98, f"the program slept for {slept} s"


@case
def pause_twice():
    with sandbox() as s:
        assert pause(s) is not False
        same(bool(pause(s)), False)


@case
def pause_unknown():
    function = getattr(Sandbox, "pause", None) or Sandbox.beta_pause
    raises(NotFoundException, function, "i0123456789abcdefghi")


@case
def paused_clock_is_right():
    with sandbox() as s:
        pause(s)
        time.sleep(3)
        again = Sandbox.connect(s.sandbox_id, timeout=60)
        inside = float(again.commands.run("date +%s.%N").stdout)
        assert abs(inside - time.time()) < 1.0, inside - time.time()


@case
def pause_without_memory():
    with sandbox() as s:
        s.files.write("kept", "here")
        boot_id = s.commands.run(BOOT_ID).stdout
        try:
            pause(s, keep_memory=False)
        except TypeError:
            raise Absent("no keep_memory")
        again = Sandbox.connect(s.sandbox_id, timeout=60)
        same(again.files.read("kept"), "here")
        assert again.commands.run(BOOT_ID).stdout != boot_id


@case
def kill_paused():
    with sandbox() as s:
        pause(s)
        same(Sandbox.kill(s.sandbox_id), True)
        raises(NotFoundException, Sandbox.connect, s.sandbox_id)


@case
def auto_pause():
    with sandbox(timeout=2, lifecycle={"on_timeout": "pause"}) as s:
        s.files.write("kept", "here")
        until("its end", lambda: not s.is_running(), within=8)
        until("paused", lambda: s.get_info().state.value == "paused", within=8)
        again = Sandbox.connect(s.sandbox_id, timeout=60)
        same(again.files.read("kept"), "here")


@case
def auto_pause_at_once():
    pauses = {"action": "pause", "keep_memory": None}
    with sandbox(timeout=60, lifecycle={"on_timeout": pauses}) as s:
        boot_id = s.commands.run(BOOT_ID).stdout
        s.set_timeout(0)
        until("its end", lambda: not s.is_running())
        again = s.connect()
        same(again.commands.run(BOOT_ID).stdout, boot_id)
        assert again.is_running()


@case
def auto_resume():
    options = {"on_timeout": "pause", "auto_resume": True}
    with sandbox(timeout=3, lifecycle=options) as s:
        s.files.write("kept", "here")
        pause(s)
        same(s.files.read("kept"), "here")
        assert s.get_info().state.value == "running"


@case
def snapshot_and_start_from_it():
    with sandbox() as s:
        if not hasattr(s, "create_snapshot"):
            raise Absent("no create_snapshot")
        s.files.write("kept", "here")
        pid = start_counter(s)
        snapshot = s.create_snapshot()
        try:
            assert s.is_running(), "the source does not run any more"
            with sandbox(template=snapshot.snapshot_id) as clone:
                same(clone.files.read("kept"), "here")
                assert pid in [p.pid for p in clone.commands.list()]
            paginator = s.list_snapshots()
            assert snapshot.snapshot_id in [found.snapshot_id for found in paginator.next_items()]
        finally:
            same(Sandbox.delete_snapshot(snapshot.snapshot_id), True)
        same(Sandbox.delete_snapshot(snapshot.snapshot_id), False)


@case
def snapshots_of_a_sandbox():
    with sandbox() as one, sandbox() as two:
        made = one.create_snapshot()
        try:
            of = lambda **which: [found.snapshot_id for found in Sandbox.list_snapshots(**which).next_items()]
            same(of(sandbox_id=one.sandbox_id), [made.snapshot_id])
            same(of(sandbox_id=two.sandbox_id), [])
            assert made.snapshot_id in of()
        finally:
            Sandbox.delete_snapshot(made.snapshot_id)


@case
def fork():
    with sandbox() as s:
        if not hasattr(s, "fork"):
            raise Absent("no fork")
        s.files.write("kept", "here")
        pid = start_counter(s)
        forks = s.fork(count=3, timeout=60)
        try:
            same(len(forks), 3)
            for made in forks:
                if isinstance(made, Exception):
                    raise made
            same(len({made.sandbox_id for made in forks} | {s.sandbox_id}), 4)
            for number, made in enumerate(forks):
                same(made.files.read("kept"), "here")
                assert pid in [p.pid for p in made.commands.list()]
                made.files.write("own", str(number))
            same([made.files.read("own") for made in forks], ["0", "1", "2"])
            assert not s.files.exists("own")
        finally:
            for made in forks:
                if not isinstance(made, Exception):
                    made.kill()


@case
def clones_differ():
    with sandbox() as one, sandbox() as two:
        for command in ("cat /etc/machine-id", "hostname", BOOT_ID, "head -c 16 /dev/urandom | od -An -tx1",
                        "python3 -c 'import uuid; print(uuid.uuid4())'"):
            first, second = one.commands.run(command).stdout, two.commands.run(command).stdout
            assert first and first != second, f"{command}: the output of both is {first!r}"
