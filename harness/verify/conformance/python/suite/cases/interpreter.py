"""run_code: the code interpreter package, on sandboxes of the template code-interpreter-v1."""

import asyncio
import base64
import json
import os
from contextlib import contextmanager

import httpx

from . import Absent, Cases, guide, raises, same

try:
    import e2b_code_interpreter as interpreter
    from e2b_code_interpreter import charts
except ImportError:
    interpreter = None

CASES = Cases()
case = CASES


@contextmanager
def sandbox(**options):
    if interpreter is None:
        raise Absent("its package goes with the newest SDK only")
    made = interpreter.Sandbox.create(timeout=120, **options)
    try:
        yield made
    finally:
        made.kill()


def text(execution):
    """The value of a cell, which must not fail."""
    assert execution.error is None, execution.error
    return execution.text


def printed(execution):
    assert execution.error is None, execution.error
    return "".join(execution.logs.stdout)


def ask(s, method, path, **body):
    """Sends a request to the code interpreter without the SDK, and returns status and text."""
    headers = {"E2b-Sandbox-Id": s.sandbox_id, "E2b-Sandbox-Port": "49999"}
    if path == "/execute":
        headers["X-Access-Token"] = s._envd_access_token
    url = os.environ["E2B_SANDBOX_URL"] + path
    answer = httpx.request(method, url, headers=headers, json=body or None, timeout=60)
    return answer.status_code, answer.text


@case
def run_code():
    with sandbox() as s:
        first = s.run_code("x = 1; x")
        same((text(first), first.execution_count, first.logs.stdout), ("1", 1, []))
        second = s.run_code("x += 1\nprint('out')\nx")
        same((text(second), printed(second), second.execution_count), ("2", "out\n", 2))
        same(text(s.run_code("y = 5")), None)
        assert json.loads(second.to_json())["results"], second.to_json()


@case
def run_code_guide():
    if interpreter is None:
        raise Absent("its package goes with the newest SDK only")
    guide.run("interpreter.md")


@case
def run_code_streams():
    with sandbox() as s:
        heard = []
        done = s.run_code(
            "import sys\nprint('a', flush=True)\nprint('b', file=sys.stderr, flush=True)\ndisplay('c')\n1/0",
            on_stdout=lambda m: heard.append(("out", m.line, m.error, bool(m.timestamp))),
            on_stderr=lambda m: heard.append(("err", m.line, m.error, bool(m.timestamp))),
            on_result=lambda r: heard.append(("result", r.text, r.is_main_result)),
            on_error=lambda e: heard.append(("error", e.name, e.value)),
        )
        wanted = [
            ("out", "a\n", False, True),
            ("err", "b\n", True, True),
            ("result", "c", False),
            ("error", "ZeroDivisionError", "division by zero"),
        ]
        same(sorted(heard), sorted(wanted))
        same(heard[-2:], wanted[-2:])
        same((done.logs.stdout, done.logs.stderr), (["a\n"], ["b\n"]))


@case
def run_code_wire():
    """Checks the lines of the response, on which clients other than the SDKs rely."""
    with sandbox() as s:
        same(ask(s, "GET", "/health"), (200, '"OK"'))
        status, body = ask(s, "POST", "/execute", code="import time; print('a'); time.sleep(12); 1")
        lines = body.split("\n")
        same((status, lines.pop()), (200, ""))
        assert all(lines), "the answer has a blank line"
        events = [json.loads(line) for line in lines]
        same((events[0], events[-1]), ({"type": "number_of_executions", "execution_count": 1}, {"type": "end_of_execution"}))
        kinds = [event["type"] for event in events[1:-1]]
        # Clients consider the sandbox dead if they receive nothing for longer.
        same([kind for kind in kinds if kind != "keepalive"], ["stdout", "result"])
        assert "keepalive" in kinds, kinds


@case
def run_code_refusals():
    with sandbox() as s:
        for method, path, body, status, words in (
            ("POST", "/execute", {"code": "1", "context_id": "none"}, 404, "none not found"),
            ("POST", "/execute", {"code": "1", "context_id": "none", "language": "python"}, 400, ""),
            ("POST", "/execute", {"code": "1", "language": "cobol"}, 500, "cobol"),
            ("POST", "/execute", {"language": "python"}, 422, ""),
            ("POST", "/contexts/none/restart", {}, 404, "none not found"),
            ("DELETE", "/contexts/none", {}, 404, "none not found"),
        ):
            got, text = ask(s, method, path, **body)
            assert got == status and words in text, (method, path, body, got, text)
        # The address of the port is not enough to run code.
        headers = {"E2b-Sandbox-Id": s.sandbox_id, "E2b-Sandbox-Port": "49999"}
        for token in ({}, {"X-Access-Token": "other"}):
            url = os.environ["E2B_SANDBOX_URL"] + "/execute"
            answer = httpx.post(url, headers={**headers, **token}, json={"code": "1"}, timeout=60)
            same(answer.status_code, 401)
        same(ask(s, "GET", "/contexts")[0], 200)


@case
def run_code_streams_at_once():
    with sandbox() as s:
        # The cell prints the second line only after the callback has received the first.
        def heard(message):
            if message.line == "first\n":
                s.files.write("/tmp/heard", "yes")

        code = """
import os, time
print('first', flush=True)
deadline = time.monotonic() + 20
while not os.path.exists('/tmp/heard') and time.monotonic() < deadline:
    time.sleep(0.01)
print('heard' if os.path.exists('/tmp/heard') else 'held back')
"""
        same(printed(s.run_code(code, on_stdout=heard)), "first\nheard\n")


@case
def run_code_errors():
    with sandbox() as s:
        error = s.run_code("def f():\n    return {}['k']\nf()").error
        same((error.name, error.value), ("KeyError", "'k'"))
        assert "return {}['k']" in error.traceback, error.traceback
        same(s.run_code("x = = 1").error.name, "SyntaxError")
        same(s.run_code("throw new TypeError('t')", language="js").error.name, "TypeError")
        same(text(s.run_code("3")), "3")


@case
def run_code_results():
    with sandbox() as s:
        shown = s.run_code(
            "from IPython.display import *\n"
            "display(HTML('<b>h</b>'), Markdown('# m'), Latex('$l$'), SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>'))\n"
            "display(JSON({'k': [1]}), Javascript('1'))\n"
            "display({'application/x-own': 'o'}, raw=True)"
        )
        assert shown.error is None, shown.error
        kinds = ("html", "markdown", "latex", "svg", "json", "javascript")
        for kind, result in zip(kinds, shown.results):
            assert getattr(result, kind), (kind, list(result.formats()))
        same(shown.results[0].html, "<b>h</b>")
        same(shown.results[4].json, {"k": [1]})
        same(shown.results[6].extra, {"application/x-own": "o"})
        assert not any(result.is_main_result for result in shown.results)


@case
def run_code_images():
    with sandbox() as s:
        done = s.run_code("from PIL import Image\nImage.new('RGB', (3, 2), 'red')")
        assert base64.b64decode(done.results[0].png).startswith(b"\x89PNG"), done.error


@case
def run_code_binary_results():
    with sandbox() as s:
        done = s.run_code(
            "from IPython.display import *\n"
            "display({'image/jpeg': 'anBlZw==', 'application/pdf': 'cGRm'}, raw=True)\n"
            "display(Image(data=b'\\x89PNG\\r\\n\\x1a\\n', format='png'))"
        )
        assert done.error is None, done.error
        same((done.results[0].jpeg.strip(), done.results[0].pdf.strip()), ("anBlZw==", "cGRm"))
        assert base64.b64decode(done.results[1].png).startswith(b"\x89PNG")
        # The quotes of a string's representation are not part of its text.
        same([text(s.run_code(code)) for code in ("'plain'", "\"it's\"")], ["plain", "it's"])


@case
def run_code_data_frame():
    with sandbox() as s:
        done = s.run_code("import pandas as pd\npd.DataFrame({'a': [1, 2], 'b': ['x', None]})")
        assert done.error is None, done.error
        same(done.results[0].data, {"a": [1, 2], "b": ["x", None]})
        assert "<table" in done.results[0].html


@case
def run_code_charts():
    draw = "import matplotlib.pyplot as plt\n"
    with sandbox() as s:
        done = s.run_code(draw + "plt.plot([1, 2], [3, 4], label='l'); plt.title('t'); plt.xlabel('X (s)'); plt.show()")
        assert done.error is None, done.error
        chart = done.results[0].chart
        assert base64.b64decode(done.results[0].png).startswith(b"\x89PNG")
        assert isinstance(chart, charts.LineChart), chart
        same((chart.title, chart.x_label, chart.x_unit), ("t", "X (s)", "s"))
        same([(e.label, [tuple(p) for p in e.points]) for e in chart.elements], [("l", [(1, 3), (2, 4)])])
        for code, kind in (
            ("plt.scatter([1], [2])", charts.ScatterChart),
            ("plt.bar(['a', 'b'], [1, 2])", charts.BarChart),
            ("plt.pie([1, 3], labels=['a', 'b'])", charts.PieChart),
            ("plt.boxplot([list(range(10)), list(range(5, 25))], patch_artist=True)", charts.BoxAndWhiskerChart),
            ("f, a = plt.subplots(1, 2); a[0].plot([1]); a[1].bar(['a'], [1])", charts.SuperChart),
        ):
            done = s.run_code(draw + code + "\nplt.show()")
            kinds = [type(r.chart) for r in done.results if r.chart]
            assert kinds == [kind], (code, kinds, done.error)


@case
def run_code_chart_elements():
    draw = "import matplotlib.pyplot as plt\n"
    with sandbox() as s:
        chart = lambda code: s.run_code(draw + code + "\nplt.show()").results[0].chart
        line = chart("plt.semilogy([1, 2], [1, 100]); plt.xticks([1, 2], ['one', 'two'])")
        same((line.x_scale, line.y_scale, line.x_ticks, line.x_tick_labels), ("linear", "log", [1, 2], ["one", "two"]))
        bars = chart("plt.bar(['a', 'b'], [1, 2], label='l')")
        same([(e.label, e.group, float(e.value)) for e in bars.elements], [("a", "l", 1.0), ("b", "l", 2.0)])
        pie = chart("plt.pie([1, 3], labels=['a', 'b'])")
        same([(e.label, round(e.angle), e.radius) for e in pie.elements], [("a", 90, 1), ("b", 270, 1)])
        box = chart("plt.boxplot([list(range(10)), list(range(5, 25))], patch_artist=True)").elements[0]
        numbers = (box.min, box.first_quartile, box.median, box.third_quartile, box.max)
        same(([float(n) for n in numbers], box.outliers), ([0, 2.25, 4.5, 6.75, 9], []))
        both = chart("f, a = plt.subplots(1, 2); a[0].plot([1]); a[1].bar(['a'], [1])")
        same([type(part) for part in both.elements], [charts.LineChart, charts.BarChart])


@case
def run_code_envs():
    cells = (
        ("python", "import os; print(os.environ.get('{}'))"),
        ("javascript", "console.log(process.env.{})"),
        ("typescript", "console.log(process.env.{} as string)"),
        ("bash", "echo ${}"),
    )
    with sandbox(envs={"WIDE": "wide", "BOTH": "wide"}) as s:
        for language, cell in cells:
            said = lambda name, **envs: printed(s.run_code(cell.replace("{}", name), language=language, envs=envs)).strip()
            same((language, said("WIDE"), said("BOTH")), (language, "wide", "wide"))
            same((language, said("ONE", ONE="one"), said("BOTH", BOTH="one")), (language, "one", "one"))
            # The variables apply to one call only.
            same((language, said("BOTH")), (language, "wide"))
            assert said("ONE") in ("None", "undefined", ""), (language, said("ONE"))


@case
def run_code_languages():
    with sandbox() as s:
        for language, code, wanted in (
            ("python", "import sys; print(sys.version_info.major)", "3\n"),
            ("js", "console.log([1, 2].map((x) => x * 2).join())", "2,4\n"),
            ("javascript", "const p = await Promise.resolve(4); console.log(p)", "4\n"),
            ("ts", "const n: number = 5; console.log(n)", "5\n"),
            ("typescript", "console.log(n + 1)", "6\n"),
            ("bash", "v=7; echo $v", "7\n"),
            ("bash", "echo $((v + 1))", "8\n"),
        ):
            same((language, printed(s.run_code(code, language=language))), (language, wanted))
        same(text(s.run_code("6 * 7", language="js")), "42")
        raises(Exception, s.run_code, "1", language="cobol")


@case
def run_code_r():
    with sandbox(envs={"WIDE": "wide"}) as s:
        r = lambda code, **options: s.run_code(code, language="r", **options)
        same(printed(r("x <- 6; cat('out\\n')")), "out\n")
        # R's kernel displays values, and marks none of them as the main result.
        same([(v.text, v.is_main_result) for v in r("x * 7").results], [("[1] 42", False)])
        error = r("stop('bad')").error
        assert error and "bad" in error.value, error
        assert base64.b64decode(r("plot(1:3)").results[0].png).startswith(b"\x89PNG")
        said = "cat(Sys.getenv('WIDE'), Sys.getenv('ONE'))"
        same(printed(r(said, envs={"ONE": "one"})).split(), ["wide", "one"])
        same(printed(r(said)).split(), ["wide"])
        own = s.create_code_context(language="r", cwd="/tmp")
        same((own.language, own.cwd), ("r", "/tmp"))
        same(printed(s.run_code("cat(exists('x'), getwd())", context=own)), "FALSE /tmp")


@case
def run_code_java():
    with sandbox(envs={"WIDE": "wide"}) as s:
        java = lambda code, **options: s.run_code(code, language="java", **options)
        first = java('int x = 6;\nSystem.out.println("out");\nx * 7')
        same((printed(first), text(first)), ("out\n", "42"))
        same(java("x / 0").error.name, "java.lang.ArithmeticException")
        said = 'System.getProperty("WIDE") + System.getProperty("ONE")'
        same(text(java(said, envs={"ONE": "one"})), "wideone")
        same(text(java(said)), "widenull")
        own = s.create_code_context(language="java", cwd="/tmp")
        same((own.language, own.cwd), ("java", "/tmp"))
        same(s.run_code("x", context=own).error.name, "CompilationException")
        same(text(java("x")), "6")


@case
def run_code_contexts():
    with sandbox() as s:
        before = s.list_code_contexts()
        same(sorted(c.language for c in before), ["javascript", "python"])
        own = s.create_code_context(cwd="/tmp", language="python")
        same((own.language, own.cwd), ("python", "/tmp"))
        same([c.id for c in s.list_code_contexts()], [c.id for c in before] + [own.id])
        s.run_code("x = 'own'", context=own)
        same(text(s.run_code("x", context=own)), "own")
        same(s.run_code("x").error.name, "NameError")
        same(text(s.run_code("import os; os.getcwd()", context=own)), "/tmp")
        s.restart_code_context(own)
        again = s.run_code("x", context=own)
        same((again.error.name, again.execution_count), ("NameError", 1))
        s.remove_code_context(own)
        same([c.id for c in s.list_code_contexts()], [c.id for c in before])
        raises(Exception, s.run_code, "1", context=own)
        raises(Exception, s.remove_code_context, own.id)


@case
def run_code_context_defaults():
    with sandbox() as s:
        plain = s.create_code_context()
        same((plain.language, plain.cwd), ("python", "/home/user"))
        # A language without a default context gets one with its first cell.
        same(printed(s.run_code("echo $PWD", language="bash")), "/home/user\n")
        same(sorted(c.language for c in s.list_code_contexts()), ["bash", "javascript", "python", "python"])


@case
def run_code_private_traffic():
    with sandbox(network={"allow_public_traffic": False}) as s:
        same(text(s.run_code("6 * 7")), "42")


@case
def run_code_interrupts():
    with sandbox() as s:
        same(text(s.run_code("kept = 7; kept")), "7")
        raises(Exception, s.run_code, "import time\nwhile True: time.sleep(0.1)", timeout=1)
        # After the client disconnected, the cell was interrupted and the state was kept.
        same(text(s.run_code("kept", timeout=20)), "7")


@case
def run_code_ends_its_host():
    with sandbox() as s:
        done = s.run_code("import os; os._exit(1)")
        same(done.error.name, "UnexpectedEndOfExecution")
        same(text(s.run_code("1+1")), "2")


@case
def run_code_turns_of_pandas():
    with sandbox() as s:
        s.files.write("/home/user/sales.csv", "region,amount\nnorth,10\nsouth,5\nnorth,7\n")
        same(text(s.run_code("import pandas as pd\nframe = pd.read_csv('/home/user/sales.csv')\nlen(frame)")), "3")
        assert s.run_code("totals = frame.groupby('region').amount.sum()").error is None
        same(text(s.run_code("int(totals['north'])")), "17")


@case
def run_code_paused():
    with sandbox() as s:
        s.run_code("x = [1, 2]")
        s.run_code("globalThis.y = 3", language="js")
        s.pause()
        again = interpreter.Sandbox.connect(s.sandbox_id)
        same(text(again.run_code("x.append(3); x")), "[1, 2, 3]")
        same(text(again.run_code("y + 1", language="js")), "4")


@case
def run_code_clones_differ():
    code = "import random, uuid, os; print(random.random(), uuid.uuid4(), os.urandom(8).hex())"
    with sandbox() as one, sandbox() as two:
        a, b = (printed(s.run_code(code)).split() for s in (one, two))
        assert len(a) == 3 and not set(a) & set(b), (a, b)


@case
async def run_code_async():
    if interpreter is None:
        raise Absent("its package goes with the newest SDK only")
    made = await asyncio.gather(*(interpreter.AsyncSandbox.create(timeout=120) for _ in range(3)))
    try:
        done = await asyncio.gather(*(s.run_code(f"print({n}); {n} * 2") for n, s in enumerate(made)))
        same([(d.text, d.logs.stdout) for d in done], [(str(n * 2), [f"{n}\n"]) for n in range(3)])
        heard = []

        async def hear(message):
            heard.append(message.line)

        await made[0].run_code("print('awaited')", on_stdout=hear)
        same(heard, ["awaited\n"])
    finally:
        await asyncio.gather(*(s.kill() for s in made))
