"""Creating, inspecting, listing and ending sandboxes."""

import concurrent.futures
import datetime
import inspect
import re
import time
import uuid

from e2b import (
    AsyncSandbox,
    AuthenticationException,
    NotFoundException,
    Sandbox,
    SandboxQuery,
    SandboxState,
)

from . import TEMPLATE, Absent, Cases, Case, raises, same, sandbox, until

CASES = Cases()
case = CASES


@case
def create_and_kill():
    s = Sandbox.create(TEMPLATE, timeout=60)
    assert re.fullmatch("[a-z0-9]+", s.sandbox_id), s.sandbox_id
    assert s.is_running()
    same(s.kill(), True)
    assert not s.is_running()


@case
def create_idempotent():
    if "idempotency_key" not in inspect.signature(Sandbox.create).parameters:
        raise Absent("create has no idempotency_key")
    key = str(uuid.uuid4())
    first = Sandbox.create(TEMPLATE, timeout=60, idempotency_key=key)
    try:
        again = Sandbox.create(TEMPLATE, timeout=60, idempotency_key=key)
        same(again.sandbox_id, first.sandbox_id)
        raises(Exception, Sandbox.create, TEMPLATE, timeout=61, idempotency_key=key)
    finally:
        same(first.kill(), True)


@case
def kill_unknown():
    same(Sandbox.kill("i0123456789abcdefghi"), False)


@case
def kill_twice():
    with sandbox() as s:
        same(s.kill(), True)
        same(Sandbox.kill(s.sandbox_id), False)


@case
async def async_create_run_kill():
    s = await AsyncSandbox.create(TEMPLATE, timeout=60)
    try:
        assert await s.is_running()
        result = await s.commands.run("echo async")
        same(result.stdout, "async\n")
    finally:
        same(await s.kill(), True)


@case
def connect():
    with sandbox() as s:
        s.files.write("/home/user/kept", "here")
        other = Sandbox.connect(s.sandbox_id)
        same(other.files.read("/home/user/kept"), "here")
        same(other.sandbox_id, s.sandbox_id)


@case
def connect_unknown():
    raises(NotFoundException, Sandbox.connect, "i0123456789abcdefghi")


@case
def connect_never_shortens():
    with sandbox(timeout=300) as s:
        before = s.get_info().end_at
        Sandbox.connect(s.sandbox_id, timeout=10)
        after = s.get_info().end_at
        assert after >= before, f"the end moved from {before} to {after}"


@case
def connect_extends():
    with sandbox(timeout=60) as s:
        Sandbox.connect(s.sandbox_id, timeout=600)
        left = s.get_info().end_at - datetime.datetime.now(datetime.timezone.utc)
        assert left > datetime.timedelta(seconds=500), left


@case
def info():
    with sandbox(metadata={"a": "1"}, timeout=100) as s:
        info = s.get_info()
        same(info.sandbox_id, s.sandbox_id)
        same(info.metadata, {"a": "1"})
        same(info.state, SandboxState.RUNNING)
        same(info.name, TEMPLATE)
        length = (info.end_at - info.started_at).total_seconds()
        assert 98 <= length <= 102, length
        assert info.cpu_count >= 1 and info.memory_mb >= 128
        assert info.template_id and info.envd_version


@case
def metadata_survives_any_text():
    odd = {"key with blank": "a&b=c", "unicode": "žluťoučký 🐎", "percent": "100%25", "empty": ""}
    with sandbox(metadata=odd) as s:
        same(s.get_info().metadata, odd)


def listed(query: SandboxQuery, **options) -> list:
    paginator = Sandbox.list(query=query, **options)
    found = []
    while paginator.has_next:
        found.extend(paginator.next_items())
    return found


@case
def list_by_metadata():
    mark = uuid.uuid4().hex
    with sandbox(metadata={"mark": mark, "odd": "b c&d=e%"}) as s, sandbox(metadata={"mark": mark}):
        found = listed(SandboxQuery(metadata={"mark": mark, "odd": "b c&d=e%"}))
        same([f.sandbox_id for f in found], [s.sandbox_id])
        same(found[0].metadata["odd"], "b c&d=e%")
        same(len(listed(SandboxQuery(metadata={"mark": mark}))), 2)
        same(listed(SandboxQuery(metadata={"mark": mark + "x"})), [])


@case
def list_pages():
    mark = uuid.uuid4().hex
    made = [Sandbox.create(TEMPLATE, timeout=120, metadata={"mark": mark}) for _ in range(3)]
    try:
        paginator = Sandbox.list(query=SandboxQuery(metadata={"mark": mark}), limit=2)
        first = paginator.next_items()
        assert paginator.has_next and paginator.next_token
        second = paginator.next_items()
        assert not paginator.has_next
        got = [f.sandbox_id for f in first + second]
        same(len(first), 2)
        same(got, [s.sandbox_id for s in reversed(made)])
    finally:
        for s in made:
            s.kill()


@case
def list_by_state():
    mark = uuid.uuid4().hex
    with sandbox(metadata={"mark": mark}) as running, sandbox(metadata={"mark": mark}) as paused:
        (getattr(paused, "pause", None) or paused.beta_pause)()
        both = {"mark": mark}
        states = {f.sandbox_id: f.state for f in listed(SandboxQuery(metadata=both))}
        same(states[running.sandbox_id], SandboxState.RUNNING)
        same(states[paused.sandbox_id], SandboxState.PAUSED)
        only = listed(SandboxQuery(metadata=both, state=[SandboxState.PAUSED]))
        same([f.sandbox_id for f in only], [paused.sandbox_id])


@case
def set_timeout_shortens():
    with sandbox(timeout=300) as s:
        s.set_timeout(2)
        began = time.monotonic()
        until("its end", lambda: not s.is_running(), within=8)
        took = time.monotonic() - began
        assert 1.0 <= took <= 4.0, f"the sandbox ended after {took:.2f} s"


@case
def timeout_ends_it():
    with sandbox(timeout=2) as s:
        assert s.is_running()
        until("its end", lambda: not s.is_running(), within=6)
        same(Sandbox.kill(s.sandbox_id), False)


@case
def set_timeout_unknown():
    raises(NotFoundException, Sandbox.set_timeout, "i0123456789abcdefghi", 10)


@case
def envs_of_the_sandbox():
    with sandbox(envs={"PLACE": "all over", "OTHER": "x"}) as s:
        same(s.commands.run("echo $PLACE").stdout, "all over\n")
        same(s.commands.run("echo $OTHER", envs={"OTHER": "y"}).stdout, "y\n")


@case
def template_unknown():
    raises(Exception, Sandbox.create, "no-such-template-anywhere", timeout=30)


@case
def wrong_key():
    raises(AuthenticationException, Sandbox.create, TEMPLATE, api_key="e2b_" + "f" * 40)


@case
def killed_sandbox_says_so():
    with sandbox() as s:
        s.kill()
        error = raises(Exception, s.commands.run, "true")
        assert "not found" in str(error).lower() or "not running" in str(error).lower(), error


@case
def twenty_at_once():
    def one(number: int) -> None:
        with sandbox() as s:
            same(s.commands.run(f"echo {number}").stdout, f"{number}\n")

    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        for done in [pool.submit(one, number) for number in range(20)]:
            done.result()


@case
def metrics():
    with sandbox() as s:
        found = until("a sample", s.get_metrics, within=20)
        sample = found[-1]
        assert sample.cpu_count >= 1 and 0 <= sample.cpu_used_pct <= 100 * sample.cpu_count + 1
        assert 0 < sample.mem_used < sample.mem_total
        assert 0 <= sample.disk_used < sample.disk_total


@case
def template_exists():
    from e2b import Template

    if not hasattr(Template, "exists") and not hasattr(Template, "alias_exists"):
        raise Absent("no Template.exists")
    exists = getattr(Template, "exists", None) or Template.alias_exists
    same(exists(TEMPLATE), True)
    same(exists("no-such-template-anywhere"), False)


@case
def client_object():
    import e2b

    if not hasattr(e2b, "E2B"):
        raise Absent("no class E2B")
    assert inspect.isclass(e2b.E2B)


@case
def code_interpreter_imports():
    try:
        import e2b_code_interpreter
    except ImportError:
        raise Absent("its package goes with the newest SDK only")
    assert e2b_code_interpreter.Sandbox.default_template
