//! JavaScript, TypeScript and bash, and variables in each language.

use serde_json::{Value, json};

use crate::{clone::Clone, error, main_result, main_text, of_type, text};

#[test]
fn interpreter_javascript_cells() {
    let clone = Clone::start();
    let js = |code: &str| clone.cell("js", code);
    assert_eq!(
        text(&js("console.log('Hello, World!')"), "stdout"),
        "Hello, World!\n"
    );
    assert_eq!(text(&js("console.error('no')"), "stderr"), "no\n");
    assert_eq!(main_text(&js("const x = 1; x")), "1");
    // A cell can be run twice.
    assert_eq!(main_text(&js("const x = {a: [1]}; x")), "{ a: [ 1 ] }");
    assert_eq!(
        main_text(&js("await Promise.resolve('Hello World!')")),
        "Hello World!"
    );
    let import =
        "\n    import { readFileSync } from 'fs'\n    console.log(typeof readFileSync)\n    ";
    assert_eq!(text(&js(import), "stdout"), "function\n");
    assert_eq!(main_text(&js("(await import('os')).type()")), "Linux");
    assert_eq!(main_text(&js("require('path').join('a', 'b')")), "a/b");
    let thrown = js("function f() {\n  throw new TypeError('bad') }\nf()");
    assert_eq!(
        (
            error(&thrown)["name"].as_str(),
            error(&thrown)["value"].as_str()
        ),
        (Some("TypeError"), Some("bad"))
    );
    let traceback = error(&thrown)["traceback"].as_str().unwrap();
    assert!(
        traceback.contains("cell-9.js:2") && !traceback.contains("host.js"),
        "{traceback}"
    );
    assert_eq!(error(&js("foo("))["name"], "SyntaxError");
    assert!(of_type(&js("undefined"), "result").is_empty());
    assert_eq!(
        main_result(&js("({_toHtml() { return '<b>' }})"))["html"],
        "<b>"
    );
    let later = js("Promise.reject(new Error('later')); 3");
    assert_eq!(main_text(&later), "3");
    assert_eq!(main_text(&js("x.a[0]")), "1");
}

#[test]
fn interpreter_javascript_is_interrupted_in_loops_and_waits() {
    let clone = Clone::start();
    clone.cell("js", "globalThis.kept = 7");
    for code in ["while (true) {}", "await new Promise(() => {})"] {
        crate::python::leave_running(
            &clone,
            &json!({"code": format!("console.log('on'); {code}"), "language": "js"}),
            "on",
        );
        assert_eq!(main_text(&clone.cell("js", "kept")), "7", "{code}");
    }
}

#[test]
fn interpreter_typescript_and_bash_cells() {
    let clone = Clone::start();
    let ts = "const message: string = 'Hello, World!'; console.log(message)";
    assert_eq!(text(&clone.cell("ts", ts), "stdout"), "Hello, World!\n");
    assert_eq!(
        main_text(&clone.cell(
            "typescript",
            "enum E { X = 1 }; interface A { b: number }; E.X"
        )),
        "1"
    );
    assert_eq!(main_text(&clone.cell("ts", "process.cwd()")), "/home/user");
    // The context of TypeScript was created ahead, and is listed from its first cell on.
    let (_, contexts) = clone.ask("GET", "/contexts", &Value::Null);
    let contexts: Vec<Value> = serde_json::from_str(&contexts).unwrap();
    assert_eq!(contexts.last().unwrap()["language"], "typescript");
    assert_eq!(contexts.len(), 3);
    assert_eq!(
        text(&clone.cell("bash", "pwd; x=3"), "stdout"),
        "/home/user\n"
    );
    assert_eq!(
        text(&clone.cell("bash", "echo $x | tr 3 4"), "stdout"),
        "4\n"
    );
}

#[test]
fn interpreter_variables_of_sandbox_and_cell_in_each_language() {
    let clone = Clone::with_environment(&[("GLOBAL", "sandbox"), ("BOTH", "sandbox")]);
    let read = |language: &str, name: &str| match language {
        "python" => format!("import os; print(os.getenv('{name}', 'none'))"),
        "bash" => format!("echo ${{{name}:-none}}"),
        _ => format!("console.log(process.env.{name} ?? 'none')"),
    };
    for language in ["python", "javascript", "typescript", "bash"] {
        let get = |name: &str, variables| {
            let request =
                json!({"code": read(language, name), "language": language, "env_vars": variables});
            text(&clone.run(&request), "stdout").trim().to_owned()
        };
        let of_cell = json!({"BOTH": "cell", "CELL": "a'b\"c $d"});
        assert_eq!(get("GLOBAL", json!(null)), "sandbox", "{language}");
        assert_eq!(get("BOTH", of_cell.clone()), "cell", "{language}");
        assert_eq!(get("CELL", of_cell), "a'b\"c $d", "{language}");
        assert_eq!(get("BOTH", json!(null)), "sandbox", "{language}");
        assert_eq!(get("CELL", json!(null)), "none", "{language}");
    }
}
