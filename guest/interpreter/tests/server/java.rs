//! Java cells, on machines with a JDK. Random numbers of forks are tested in guests.

use std::{fs, path::Path, process::Command};

use serde_json::{Value, json};

use crate::{Server, of_type, text};

/// A directory of hosts in which the Java host has been compiled; `None` without a JDK.
fn hosts() -> Option<tempfile::TempDir> {
    if Command::new("javac").arg("-version").output().is_err() {
        println!("skipped: there is no javac");
        return None;
    }
    let hosts = tempfile::tempdir().unwrap();
    let java = hosts.path().join("java");
    fs::create_dir(&java).unwrap();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("hosts/java");
    for entry in fs::read_dir(sources).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), java.join(entry.file_name())).unwrap();
    }
    let build = Command::new("sh").arg(java.join("build.sh")).output();
    let build = build.unwrap();
    assert!(build.status.success(), "{build:?}");
    Some(hosts)
}

struct Java(Server);

impl Java {
    fn cell(&self, code: &str) -> Vec<Value> {
        self.run(code, &json!({}))
    }

    fn run(&self, code: &str, variables: &Value) -> Vec<Value> {
        let request = json!({"code": code, "language": "java", "env_vars": variables});
        self.0.client().run(&request)
    }

    /// Runs a cell. Returns the text of its value.
    fn value(&self, code: &str) -> String {
        let events = self.cell(code);
        let results = of_type(&events, "result");
        assert_eq!(results.len(), 1, "{code}: {events:?}");
        results[0]["text"].as_str().unwrap().to_owned()
    }

    /// Runs a cell that fails. Returns name, value and traceback of its error.
    fn error(&self, code: &str) -> (String, String, String) {
        let events = self.cell(code);
        let errors = of_type(&events, "error");
        assert_eq!(errors.len(), 1, "{code}: {events:?}");
        let field = |name: &str| errors[0][name].as_str().unwrap().to_owned();
        (field("name"), field("value"), field("traceback"))
    }
}

#[test]
fn java_runs_cells_errors_variables_and_interrupts() {
    let Some(hosts) = hosts() else { return };
    let java = Java(Server::start_in(hosts.path(), &[]));
    values_and_output(&java);
    errors(&java);
    variables(&java);
    interrupts(&java);
    let end = java.cell("System.out.println(\"last words\"); System.exit(3)");
    assert_eq!(text(&end, "stdout"), "last words\n");
    assert_eq!(
        of_type(&end, "error")[0]["name"],
        "UnexpectedEndOfExecution"
    );
    // A new host has taken the place of the ended one, with the sandbox's variables in its environment.
    let child = format!("var child = {CHILD};\n{OUTPUT}").replace("NAME", "GLOBAL");
    assert_eq!(java.value(&child), "sandbox");
}

/// Code that runs a child which prints a variable, and shows its output.
const CHILD: &str = r#"new ProcessBuilder("sh", "-c", "printf %s \"${NAME-none}\"")"#;
const OUTPUT: &str = "new String(child.start().getInputStream().readAllBytes())";

fn values_and_output(java: &Java) {
    let hello = java.cell("System.out.println(\"grüße\"); System.err.print(\"no\")");
    assert_eq!(
        (
            text(&hello, "stdout").as_str(),
            text(&hello, "stderr").as_str()
        ),
        ("grüße\n", "no")
    );
    // Like E2B's kernel for Java, whose clients look at the first text.
    let printed = of_type(&hello, "stdout");
    let texts: Vec<_> = printed.iter().map(|event| &event["text"]).collect();
    assert_eq!(texts, [&json!("grüße"), &json!("\n")]);
    assert!(of_type(&java.cell("int x = 6;"), "result").is_empty());
    assert_eq!(java.value("// more\nx * 7"), "42");
    assert!(of_type(&java.cell("x = 5"), "result").is_empty());
    assert_eq!(java.value("\"a \\\"text\\\"\""), "a \"text\"");
    assert_eq!(java.value("new int[] {1, 2}"), "int[2] { 1, 2 }");
    assert!(of_type(&java.cell("String none = null; none"), "result").is_empty());
    let class = "class Point {\n  final int x;\n  Point(int x) {\n    this.x = x;\n  }\n}\n\n\
                 int twice(Point p) {\n  return 2 * p.x;\n}\ntwice(new Point(4))";
    assert_eq!(java.value(class), "8");
    assert_eq!(java.value("twice(new Point(x))"), "10");
    let import = "import java.time.Duration;\nDuration.ofSeconds(90)";
    assert_eq!(java.value(import), "PT1M30S");
    let shown = java.cell("display(1);\nnew java.awt.image.BufferedImage(2, 2, 1)");
    let results = of_type(&shown, "result");
    assert_eq!(
        (&results[0]["text"], &results[0]["is_main_result"]),
        (&json!("1"), &json!(false))
    );
    assert!(results[1]["png"].as_str().unwrap().starts_with("iVBOR"));
}

fn errors(java: &Java) {
    let thrown = java.error("int half(int n) {\n  return n / 0;\n}\nhalf(1)");
    assert_eq!(
        (thrown.0.as_str(), thrown.1.as_str()),
        ("java.lang.ArithmeticException", "/ by zero")
    );
    assert!(
        thrown.2.contains("at half(#") && !thrown.2.contains("cube."),
        "{thrown:?}"
    );
    let (name, value, place) = java.error("int y = 1;\n\n  y = \"no\";\nx = 99;");
    assert_eq!(name, "CompilationException");
    assert!(value.starts_with("incompatible types"), "{value}");
    assert!(
        place.contains("cell:3: error:") && place.contains("\n  y = \"no\";\n      ^"),
        "{place}"
    );
    // Code before an error has run, code after it has not.
    assert_eq!(java.value("x + y"), "6");
    assert_eq!(java.error("foo(").0, "CompilationException");
    let (name, value, _) = java.error("int later() { return missing(); }\nlater()");
    assert_eq!(name, "UnresolvedReferenceException");
    assert!(value.contains("method missing()"), "{value}");
    let recursion = java.error("int deep(int n) { return deep(n + 1); }\ndeep(0)");
    assert_eq!(recursion.0, "java.lang.StackOverflowError");
}

fn variables(java: &Java) {
    let envs = java.0.state.path().join("envs");
    fs::write(&envs, r#"{"GLOBAL":"sandbox","BOTH":"sandbox"}"#).unwrap();
    let of_cell = json!({"BOTH": "cell", "CELL": "a'b\"c $d"});
    // As a system property, in the environment of Java, and in that of a child process.
    let readers = [
        "System.getProperty(\"NAME\", \"none\")".to_owned(),
        "System.getenv().getOrDefault(\"NAME\", \"none\")".to_owned(),
        format!("var child = {CHILD};\nchild.environment();\n{OUTPUT}"),
    ];
    for reader in readers {
        let get = |name: &str, variables: &Value| {
            let events = java.run(&reader.replace("NAME", name), variables);
            of_type(&events, "result")[0]["text"].clone()
        };
        assert_eq!(get("GLOBAL", &json!({})), "sandbox", "{reader}");
        assert_eq!(get("BOTH", &of_cell), "cell", "{reader}");
        assert_eq!(get("CELL", &of_cell), "a'b\"c $d", "{reader}");
        assert_eq!(get("BOTH", &json!({})), "sandbox", "{reader}");
        assert_eq!(get("CELL", &json!({})), "none", "{reader}");
    }
}

/// Starts an endless cell and disconnects.
fn leave(java: &Java, code: &str) {
    let mut leaving = java.0.client();
    let code = format!("System.out.println(\"begun\"); {code}\nx = 99;");
    let request = json!({"code": code, "language": "java"});
    leaving.send("POST", "/execute", &request.to_string());
    leaving.read_until("begun");
}

fn interrupts(java: &Java) {
    java.cell("x = 7");
    leave(java, "Thread.sleep(1_000_000);");
    assert_eq!(java.value("x"), "7");
    let deaf = "while (true) try { Thread.sleep(1_000_000); } catch (InterruptedException e) {}";
    let jdk: u32 = java.value("Runtime.version().feature()").parse().unwrap();
    for code in ["while (true) {}", deaf] {
        leave(java, code);
        if jdk < 20 {
            assert_eq!(java.value("x"), "7", "{code}");
        } else {
            // Later JDKs cannot stop threads: the host was replaced.
            assert_eq!(java.error("x").0, "CompilationException", "{code}");
        }
    }
}
