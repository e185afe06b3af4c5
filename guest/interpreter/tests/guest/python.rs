//! Python cells: results, errors and interrupts.

use std::io::{BufRead, BufReader, Write};

use serde_json::{Value, json};

use crate::{clone::Clone, error, main_result, main_text, of_type, text};

/// Starts a cell and disconnects once it has printed that text.
pub(crate) fn leave_running(clone: &Clone, request: &Value, printed: &str) {
    leave(
        clone,
        request,
        &format!(r#"{{"type":"stdout","text":"{printed}"#),
    );
}

/// Starts a cell and disconnects once an event contains `mark`.
pub(crate) fn leave(clone: &Clone, request: &Value, mark: &str) {
    let mut stream = clone.stream();
    let body = request.to_string();
    let head = format!(
        "POST /execute HTTP/1.1\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream
        .write_all(format!("{head}{body}").as_bytes())
        .unwrap();
    let mut lines = BufReader::new(stream).lines();
    assert!(
        lines.any(|line| line.unwrap().contains(mark)),
        "the cell said no {mark}"
    );
}

#[test]
fn interpreter_cells_that_are_not_stored() {
    let clone = Clone::start();
    let unstored = |code: &str| clone.run(&json!({"code": code, "store_history": false}));
    for _ in 0..2 {
        let events = unstored("1+1");
        assert_eq!(events[0]["execution_count"], 1);
        assert_eq!(main_text(&events), "2");
    }
    assert_eq!(error(&unstored("1/0"))["name"], "ZeroDivisionError");
    let first = clone.python("'_' in globals(), len(In), len(Out)");
    assert_eq!(first[0]["execution_count"], 1);
    // IPython's first input is always empty; the second is the cell itself.
    assert_eq!(main_text(&first), "(False, 2, 0)");
    assert_eq!(clone.python("1")[0]["execution_count"], 2);
}

#[test]
fn interpreter_what_first_cells_make_begins_in_new_pools() {
    let clone = Clone::start();
    let code = "from cube_host import heap\n\
        last = {len(block): id(block) for block in heap._held if type(block) is bytes}\n\
        len(last), {at % heap.POOL for at in last.values()}";
    assert_eq!(main_text(&clone.python(code)), "(30, {48})");
}

#[test]
fn interpreter_first_cells() {
    let clone = Clone::start();
    let first = clone.python("x =1; x");
    assert_eq!(
        first[0],
        json!({"type": "number_of_executions", "execution_count": 1})
    );
    assert_eq!(main_text(&first), "1");
    assert_eq!(main_text(&clone.python("x += 1; x")), "2");
    let print = clone.python("print(1)");
    assert_eq!(text(&print, "stdout"), "1\n");
    assert!(of_type(&print, "stdout")[0]["timestamp"].is_string());
    assert_eq!(
        text(
            &clone.python("import sys; print(1, file=sys.stderr)"),
            "stderr"
        ),
        "1\n"
    );
    assert_eq!(main_text(&clone.python("'text'")), "text");
    assert_eq!(main_text(&clone.python("_, Out[2]")), "('text', 2)");
    assert!(of_type(&clone.python("1;"), "result").is_empty());
    assert_eq!(
        main_text(&clone.python("    import os\n    len(os.sep)")),
        "1"
    );
    let (_, contexts) = clone.ask("GET", "/contexts", &Value::Null);
    let contexts: Vec<Value> = serde_json::from_str(&contexts).unwrap();
    let languages: Vec<_> = contexts
        .iter()
        .map(|c| c["language"].as_str().unwrap())
        .collect();
    assert_eq!(languages, ["python", "javascript"]);
    assert_eq!(contexts[0]["cwd"], "/home/user");
}

#[test]
fn interpreter_output_of_children_and_of_c() {
    let clone = Clone::start();
    assert_eq!(
        text(
            &clone.python("import os; os.system('echo child')"),
            "stdout"
        ),
        "child\n"
    );
    let c = "import ctypes; libc = ctypes.CDLL(None); libc.puts(b'from C'); libc.fflush(None);";
    assert_eq!(text(&clone.python(c), "stdout"), "from C\n");
    assert_eq!(
        text(&clone.python("print('ä' * 40000)"), "stdout")
            .chars()
            .count(),
        40_001
    );
    let fork = "
import multiprocessing
def work(n): print('worker', flush=True); return n * 2
with multiprocessing.Pool(2) as pool: r = pool.map(work, [1, 2])
r";
    let forked = clone.python(fork);
    assert_eq!(main_text(&forked), "[2, 4]");
    assert_eq!(text(&forked, "stdout"), "worker\nworker\n");
}

#[test]
fn interpreter_every_kind_of_content() {
    let clone = Clone::start();
    let shown = |code: &str| of_type(&clone.python(code), "result")[0].clone();
    let raw = |kind: &str| shown(&format!("display({{'{kind}': 'content'}}, raw=True)"));
    for (kind, key) in [
        ("text/plain", "text"),
        ("text/html", "html"),
        ("text/markdown", "markdown"),
        ("image/svg+xml", "svg"),
        ("image/png", "png"),
        ("image/jpeg", "jpeg"),
        ("application/pdf", "pdf"),
        ("text/latex", "latex"),
        ("application/javascript", "javascript"),
    ] {
        assert_eq!(
            raw(kind),
            json!({"type": "result", key: "content", "is_main_result": false})
        );
    }
    assert_eq!(
        raw("application/x-own")["extra"],
        json!({"application/x-own": "content"})
    );
    assert_eq!(shown("{'a': [1, None]}")["json"], json!({"a": [1, null]}));
    assert_eq!(
        shown("from IPython.display import HTML; HTML('<b>')")["html"],
        "<b>"
    );
    assert_eq!(
        shown("from sympy import symbols; symbols('x') ** 2")["latex"],
        "$\\displaystyle x^{2}$"
    );
    let own = "
class Own:
    def _repr_html_(self): return '<i>'
    def _repr_markdown_(self): return '*i*'
Own()";
    assert_eq!(
        (&shown(own)["html"], &shown(own)["markdown"]),
        (&json!("<i>"), &json!("*i*"))
    );
}

/// Compares values that are shown without IPython, and similar ones, with the output of its formatters.
#[test]
fn interpreter_short_containers_look_as_ipython_shows_them() {
    let clone = Clone::start();
    let values = [
        "()",
        "(1,)",
        "(50, 50115)",
        "(1, -2.5e300, 'a\"\\n\u{2028}', b'\\x00', None, True, 1j, float('nan'))",
        "[]",
        "[1, 2**70]",
        "['a', None, float('inf'), False]",
        "[b'a']",
        "{}",
        "{'a': 1, 2: None, (): 'x'}",
        "{'a': 1, 2: 2.5, None: 'x'}",
        "[[1], (2,)]",
        "{'a': {'b': [1]}}",
        "('x' * 75,)",
        "('x' * 77,)",
        "list(range(24))",
        "list(range(30))",
        "{n: n for n in range(40)}",
    ];
    for value in values {
        let asked = format!(
            "shown = get_ipython().display_formatter.format({value})[0]\n\
             import json; print(json.dumps([shown['text/plain'], 'application/json' in shown]))"
        );
        let expected: Value = serde_json::from_str(&text(&clone.python(&asked), "stdout")).unwrap();
        let events = clone.python(value);
        let got = main_result(&events);
        assert_eq!(got["text"], expected[0], "{value}");
        assert_eq!(got.get("json").is_some(), expected[1], "{value}: {got}");
        assert_eq!(got["is_main_result"], true, "{value}");
    }
    // IPython gets the number of a cell when it shows something.
    let asked = |value: &str| {
        let number = clone.python(value)[0]["execution_count"].to_string();
        main_text(&clone.python("get_ipython().execution_count")) == number
    };
    assert!(asked("[[1]]"));
    for value in ["(50, 50115)", "['a', 1.5]", "{'a': None}"] {
        assert!(!asked(value), "{value}");
    }
    // Formatters that users register for such values are used.
    let own = "plain, html = (get_ipython().display_formatter.formatters[k] for k in ('text/plain', 'text/html'))\n\
        html.for_type(list, lambda _: '<ul>')\n\
        plain.for_type(complex, lambda _, printer, cycle: printer.text('z'))";
    clone.python(own);
    assert_eq!(main_result(&clone.python("[1]"))["html"], "<ul>");
    assert_eq!(main_text(&clone.python("[1]")), "[1]");
    clone.python("html.pop(list)");
    assert_eq!(main_text(&clone.python("[1j]")), "[z]");
    assert_eq!(main_result(&clone.python("[1]")).get("html"), None);
}

#[test]
fn interpreter_data_frames_come_with_their_data() {
    let clone = Clone::start();
    let code = "
        import pandas as pd
        pd.DataFrame({'a': [1, 2, 3], 't': pd.date_range('2024-01-01', periods=3), 'f': [1.5, None, 2]})
        ";
    let events = clone.python(code);
    let result = main_result(&events);
    assert_eq!(result["data"]["a"], json!([1, 2, 3]));
    assert_eq!(result["data"]["t"][0], "2024-01-01T00:00:00");
    assert_eq!(result["data"]["f"], json!([1.5, null, 2.0]));
    assert!(result["html"].as_str().unwrap().contains("<table"));
}

#[test]
fn interpreter_figures_come_as_images_and_charts() {
    let clone = Clone::start();
    let line = "
import matplotlib.pyplot as plt
import numpy as np
x = np.linspace(0, 20, 100)
plt.plot(x, np.sin(x), label='sine')
plt.title('T'); plt.xlabel('time (s)')
plt.show()

x";
    let events = clone.python(line);
    let results = of_type(&events, "result");
    assert_eq!(results.len(), 2);
    let figure = results
        .iter()
        .find(|r| r["is_main_result"] == false)
        .unwrap();
    assert!(figure["png"].as_str().unwrap().starts_with("iVBOR"));
    assert!(figure["text"].is_string() && figure["extra"].is_null());
    let chart = &figure["chart"];
    assert_eq!(
        (&chart["type"], &chart["title"], &chart["x_unit"]),
        (&json!("line"), &json!("T"), &json!("s"))
    );
    assert_eq!(
        chart["elements"][0]["points"].as_array().unwrap().len(),
        100
    );
    for (draw, kind) in [
        ("plt.scatter([1, 2], [3, 4])", "scatter"),
        ("plt.bar(['a', 'b'], [1, 2])", "bar"),
        ("plt.pie([1, 2], labels=['a', 'b'])", "pie"),
        (
            "plt.boxplot([list(range(10)), list(range(5, 25))], patch_artist=True)",
            "box_and_whisker",
        ),
        (
            "f, (a, b) = plt.subplots(1, 2); a.plot([1, 2]); b.bar(['x'], [1])",
            "superchart",
        ),
        ("plt.imshow([[1, 2], [3, 4]])", "unknown"),
    ] {
        let events = clone.python(&format!("{draw}\nplt.show()"));
        let figures = of_type(&events, "result");
        let kinds: Vec<_> = figures.iter().map(|r| r["chart"]["type"].clone()).collect();
        assert_eq!(kinds, [json!(kind)], "{draw}: {events:?}");
    }
}

#[test]
fn interpreter_images_are_shown_and_saved() {
    let clone = Clone::start();
    let image = "from PIL import Image; image = Image.new('RGB', (4, 4));";
    for (code, main) in [
        ("image.show()", false),
        ("image", true),
        ("image.save('/tmp/i.png')", false),
    ] {
        let events = clone.python(&format!("{image} {code}"));
        let shown = of_type(&events, "result");
        assert!(
            shown[0]["png"].as_str().unwrap().starts_with("iVBOR"),
            "{code}"
        );
        assert_eq!(shown[0]["is_main_result"], main, "{code}");
    }
}

#[test]
fn interpreter_errors_as_users_of_ipython_know_them() {
    let clone = Clone::start();
    let events = clone.python("def f():\n    raise ValueError('no')\nf()");
    let told = error(&events);
    assert_eq!(
        (&told["name"], &told["value"]),
        (&json!("ValueError"), &json!("no"))
    );
    let traceback = told["traceback"].as_str().unwrap();
    assert!(
        traceback.contains("Cell In[1], line 3") && traceback.contains("----> 3 f()"),
        "{traceback}"
    );
    assert!(
        !traceback.contains("cube_host") && !traceback.contains('\u{1b}'),
        "{traceback}"
    );
    assert_eq!(error(&clone.python("f("))["name"], "SyntaxError");
    assert_eq!(
        error(&clone.python("xyz"))["value"],
        "name 'xyz' is not defined"
    );
    assert_eq!(
        error(&clone.python("import sys; sys.exit(3)"))["name"],
        "SystemExit"
    );
    assert_eq!(error(&clone.python("input('?')"))["name"], "RuntimeError");
    assert_eq!(main_text(&clone.python("1+1")), "2");
}

#[test]
fn interpreter_magics_and_commands() {
    let clone = Clone::start();
    let printed = |code: &str| text(&clone.python(code), "stdout");
    assert_eq!(printed("!pwd"), "/home/user\n");
    assert_eq!(printed("%%bash\necho from bash"), "from bash\n");
    assert!(printed("%time sum(range(10))").contains("Wall time"));
    assert!(printed("%timeit -n1 -r1 1").contains("1 loop"));
    assert_eq!(
        main_text(&clone.python("names = !echo a; echo b\nnames")),
        "['a', 'b']"
    );
    assert!(printed("%cd /tmp").contains("/tmp"));
    assert_eq!(printed("!pwd"), "/tmp\n");
    assert_eq!(printed("%env NEW=1\n!echo $NEW"), "env: NEW=1\n1\n");
    assert!(printed("len?").contains("Return the number of items"));
    assert_eq!(printed("%%capture c\nprint('hidden')"), "");
    assert_eq!(main_text(&clone.python("c.stdout")), "hidden\\n");
    assert!(printed("%pip --version").contains("python 3.11"));
    assert_eq!(
        main_text(&clone.python("import asyncio\nawait asyncio.sleep(0.01, 7)")),
        "7"
    );
}

#[test]
fn interpreter_python_is_interrupted_restarted_and_repaired() {
    let clone = Clone::start();
    clone.python("kept = 7");
    for code in [
        "import time; print('on'); time.sleep(1000)",
        "print('on')\nwhile True: pass",
        "!echo on; sleep 1000",
    ] {
        leave_running(&clone, &json!({ "code": code }), "on");
        assert_eq!(main_text(&clone.python("kept")), "7", "{code}");
    }
    let died = clone.python("import os; os.kill(os.getpid(), 9)");
    assert_eq!(error(&died)["name"], "UnexpectedEndOfExecution");
    assert_eq!(error(&clone.python("kept"))["name"], "NameError");
    let (status, made) = clone.ask("POST", "/contexts", &json!({}));
    let made: Value = serde_json::from_str(&made).unwrap();
    assert_eq!(
        (status, &made["language"], &made["cwd"]),
        (200, &json!("python"), &json!("/home/user"))
    );
    let id = made["id"].as_str().unwrap();
    let run = |code: &str| clone.run(&json!({"code": code, "context_id": id}));
    run("x = 1");
    assert_eq!(
        clone
            .ask("POST", &format!("/contexts/{id}/restart"), &Value::Null)
            .0,
        200
    );
    assert_eq!(error(&run("x"))["value"], "name 'x' is not defined");
    // A killed server is restarted; the response of this cell has no end.
    let kill = json!({"code": "kill -9 $PPID", "language": "bash"}).to_string();
    let answer = clone
        .interpreter()
        .request("POST", "/execute", &[], kill.as_bytes());
    assert!(answer.is_err());
    clone.until_ready();
    assert_eq!(main_text(&clone.python("1+1")), "2");
}

#[test]
fn interpreter_last_expressions_are_found() {
    let clone = Clone::start();
    for (code, wanted) in [
        ("x = 1\nx", "1"),
        ("x = 1; x + 1", "2"),
        ("def f(a):\n    return a\n\nf(\n    3\n)", "3"),
        ("a = 1\n(a,\n 2)", "(1, 2)"),
        ("'''a\nb'''", "a\\nb"),
        ("x = {\n  'k': 5,\n}\nx['k']  # why\n\n# end", "5"),
        ("for i in range(3):\n    i\nelse:\n    j = 7\nj", "7"),
        ("async def f():\n    return 6\nawait f()", "6"),
        ("y = 1 + \\\n 2\ny", "3"),
        ("import os, \\\n  sys\nlen([\n])", "0"),
    ] {
        assert_eq!(main_text(&clone.python(code)), wanted, "{code}");
    }
    for code in [
        "x = 1",
        "if x:\n    x",
        "for i in [1]:\n    i",
        "x = [\n1,\n]",
        "s = '''\n1\n'''",
        "",
        "# only",
    ] {
        let events = clone.python(code);
        assert!(
            of_type(&events, "result").is_empty() && of_type(&events, "error").is_empty(),
            "{code}: {events:?}"
        );
    }
}
