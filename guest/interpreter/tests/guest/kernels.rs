//! Languages whose hosts start with their first cell: Jupyter kernels (ipykernel, installed in a clone, and R), and
//! Java.

use std::{fs, path::Path, time::Instant};

use serde_json::{Value, json};

use crate::{
    clone::{Clone, artifact},
    error, main_text, of_type,
    python::{leave, leave_running},
    text,
};

/// Starts a clone and installs ipykernel in it as a user would.
fn with_ipykernel() -> Clone {
    let clone = Clone::with_environment(&[("GLOBAL", "sandbox")]);
    let wheels = artifact("stages/code-interpreter-kernel-wheels");
    for entry in fs::read_dir(wheels).unwrap() {
        let wheel = entry.unwrap().path();
        if wheel.extension() != Some("whl".as_ref()) {
            continue;
        }
        let to = Path::new("/tmp/wheels").join(wheel.file_name().unwrap());
        let bytes = fs::read(&wheel).unwrap();
        let to = to.to_str().unwrap();
        clone.agent().write_file(to, &bytes, None).unwrap();
    }
    clone.command("pip install --quiet --no-index --no-deps /tmp/wheels/*.whl");
    clone
}

/// Disconnecting interrupts the cell, before its code runs and while it runs, and the kernel keeps its variables.
fn is_interrupted_whenever(clone: &Clone, id: &Value) {
    let run = |code: &str| clone.run(&json!({"code": code, "context_id": id}));
    run("x = 6");
    let code = "print('on', flush=True)\nimport time\nwhile True: time.sleep(0.1)";
    let endless = json!({"code": code, "context_id": id});
    for _ in 0..10 {
        leave(clone, &endless, "number_of_executions");
        assert_eq!(main_text(&run("x")), "6");
        leave_running(clone, &endless, "on");
        assert_eq!(main_text(&run("x")), "6");
    }
}

#[test]
fn interpreter_kernels_that_want_messages_are_interrupted_by_them() {
    let clone = with_ipykernel();
    let script = r#"
import json, os
kernels = "/usr/local/share/jupyter/kernels"
spec = json.load(open(f"{kernels}/python3/kernel.json")) | {"interrupt_mode": "message"}
os.mkdir(f"{kernels}/messages")
json.dump(spec, open(f"{kernels}/messages/kernel.json", "w"))"#;
    clone.command(&format!("python3 -c '{script}'"));
    let (status, made) = clone.ask("POST", "/contexts", &json!({"language": "messages"}));
    assert_eq!(status, 200, "{made}");
    let id = serde_json::from_str::<Value>(&made).unwrap()["id"].clone();
    is_interrupted_whenever(&clone, &id);
}

#[test]
fn interpreter_any_installed_jupyter_kernel_is_a_context() {
    let clone = Clone::start();
    assert_eq!(
        clone
            .ask("POST", "/contexts", &json!({"language": "python3"}))
            .0,
        500
    );
    drop(clone);
    let clone = with_ipykernel();
    let (status, made) = clone.ask(
        "POST",
        "/contexts",
        &json!({"language": "python3", "cwd": "/tmp"}),
    );
    assert_eq!(status, 200, "{made}");
    let id = serde_json::from_str::<Value>(&made).unwrap()["id"].clone();
    let run = |code: &str| clone.run(&json!({"code": code, "context_id": id}));

    let first = run("import os, sys; print('out'); print('err', file=sys.stderr); x = 6; x * 7");
    assert_eq!(
        (
            text(&first, "stdout").as_str(),
            text(&first, "stderr").as_str()
        ),
        ("out\n", "err\n")
    );
    assert_eq!(main_text(&first), "42");
    assert_eq!(
        main_text(&run("'kernel' in str(type(get_ipython())), os.getcwd(), x")),
        "(True, '/tmp', 6)"
    );
    let shown = run("from IPython.display import HTML, display; display(HTML('<b>')); 'last'");
    assert_eq!(of_type(&shown, "result")[0]["html"], "<b>");
    assert_eq!(main_text(&shown), "last");
    assert_eq!(error(&run("1/0"))["name"], "ZeroDivisionError");

    // Variables of the sandbox are set from the kernel's start, those of a cell during that cell.
    let get = "(os.environ.get('GLOBAL'), os.environ.get('CELL'))";
    let request =
        json!({"code": get, "context_id": id, "env_vars": {"CELL": "it's", "GLOBAL": "cell"}});
    assert_eq!(main_text(&clone.run(&request)), "('cell', \"it's\")");
    assert_eq!(main_text(&run(get)), "('sandbox', None)");

    is_interrupted_whenever(&clone, &id);
    // A kernel that ends is reported and replaced.
    assert_eq!(
        error(&run("os.kill(os.getpid(), 9)"))["name"],
        "UnexpectedEndOfExecution"
    );
    assert_eq!(error(&run("x"))["name"], "NameError");
    assert_eq!(
        clone
            .ask(
                "POST",
                &format!("/contexts/{}/restart", id.as_str().unwrap()),
                &Value::Null
            )
            .0,
        200
    );
    assert_eq!(main_text(&run("1+1")), "2");
    // The connection file is not readable by others.
    assert_eq!(clone.command("ls /tmp | grep cube-kernel || true"), "");
}

/// The text of the first result. R's kernel displays values and has no main result.
fn value(events: &[Value]) -> String {
    let shown = of_type(events, "result");
    assert!(!shown.is_empty(), "{events:?}");
    shown[0]["text"].as_str().unwrap().to_owned()
}

/// Runs a cell and prints its duration. Returns its events.
fn timed(clone: &Clone, language: &str, code: &str) -> Vec<Value> {
    let begun = Instant::now();
    let events = clone.cell(language, code);
    println!("{:?} for {code}", begun.elapsed());
    events
}

#[test]
fn interpreter_r_cells() {
    let clone = Clone::start();
    let r = |code: &str| timed(&clone, "r", code);
    assert!(!clone.runs("R"), "R runs before its first cell");
    let hello = r("x <- 6; cat('Hello, World!\\n')");
    assert_eq!(text(&hello, "stdout"), "Hello, World!\n");
    assert!(clone.runs("R"));
    assert_eq!(value(&r("x * 7")), "[1] 42");
    assert!(text(&r("message('no')"), "stderr").starts_with("no\n"));
    assert_eq!(text(&r("system('echo child')"), "stdout"), "child\n");
    let stop = r("f <- function() stop('bad')\nf()");
    assert_eq!(error(&stop)["value"], "Error in f(): bad\n");
    let frame = r("data.frame(a = 1:2, b = c('x', 'y'))");
    let html = of_type(&frame, "result")[0]["html"].as_str().unwrap();
    assert!(html.starts_with("<table"), "{html}");
    let plot = r("plot(1:3)");
    let png = of_type(&plot, "result")[0]["png"].as_str().unwrap();
    assert!(png.starts_with("iVBOR"), "{png}");
    let get = "cat(Sys.getenv('CELL'))";
    let request = json!({"code": get, "language": "R", "env_vars": {"CELL": "a'b\"c $d"}});
    assert_eq!(text(&clone.run(&request), "stdout"), "a'b\"c $d");
    assert_eq!(text(&r(get), "stdout"), "");
    let endless = "cat('on\\n'); flush.console(); repeat Sys.sleep(0.1)";
    leave_running(&clone, &json!({"code": endless, "language": "r"}), "on");
    assert_eq!(value(&r("x")), "[1] 6");
    let (_, contexts) = clone.ask("GET", "/contexts", &Value::Null);
    assert!(contexts.contains(r#""language":"r""#), "{contexts}");
    let draw = |clone: &Clone| value(&clone.cell("r", "runif(3)"));
    assert_ne!(draw(&clone), draw(&Clone::start()));
}

/// Each line is a number of another generator.
const JAVA: &str = r#"
Stream.of(Math.random(), new Random().nextLong(), ThreadLocalRandom.current().nextLong(),
    new SplittableRandom().nextLong(), java.util.random.RandomGenerator.getDefault().nextLong(),
    UUID.randomUUID(), new java.security.SecureRandom().nextLong(), secure.nextLong(), shuffled(),
    pool.submit(() -> ThreadLocalRandom.current().nextLong()).get(), Files.createTempFile("x", ""))
    .map(String::valueOf).collect(Collectors.joining("\n"))"#;
/// Uses each generator before a fork, because forks could share only state that exists by then.
const JAVA_BEFORE: &str = r#"
var secure = new java.security.SecureRandom();
var pool = Executors.newSingleThreadExecutor();
String shuffled() {
    var numbers = IntStream.range(0, 64).boxed().collect(Collectors.toList());
    Collections.shuffle(numbers);
    return numbers.toString();
}"#;

/// Further results of Java cells are tested on the host.
#[test]
fn interpreter_java_cells() {
    let clone = Clone::start();
    let java = |code: &str| timed(&clone, "java", code);
    let (_, contexts) = clone.ask("GET", "/contexts", &Value::Null);
    assert!(!contexts.contains(r#""language":"java""#), "{contexts}");
    assert!(!clone.runs("java"), "Java runs before its first cell");
    let hello = java("int x = 6;\nSystem.out.println(\"Hello, World!\");\nx * 7");
    assert_eq!(text(&hello, "stdout"), "Hello, World!\n");
    assert_eq!(main_text(&hello), "42");
    assert!(clone.runs("java"));
    assert_eq!(
        error(&java("x / 0"))["name"],
        "java.lang.ArithmeticException"
    );
    assert_eq!(error(&java("y"))["name"], "CompilationException");
    let request = json!({"code": "System.getProperty(\"CELL\")", "language": "java", "env_vars": {"CELL": "$d"}});
    assert_eq!(main_text(&clone.run(&request)), "$d");
    assert_eq!(
        main_text(&java("System.getProperty(\"user.dir\")")),
        "/home/user"
    );
    for code in ["while (true) {}", "Thread.sleep(1_000_000)"] {
        let code = format!("System.out.println(\"on\"); {code}");
        leave_running(&clone, &json!({"code": code, "language": "java"}), "on");
        assert_eq!(main_text(&java("x")), "6");
    }
    // If a cell ends just when it is interrupted again, the next cell is not affected.
    for ms in [482, 486, 490, 494, 498].repeat(3) {
        let spin = format!(
            "long e = System.nanoTime() + {ms}_000_000L; while (System.nanoTime() < e) {{}}"
        );
        let wait = "try { Thread.sleep(1_000_000); } catch (InterruptedException i)";
        let code = format!("System.out.println(\"on\"); {wait} {{ {spin} }}");
        leave_running(&clone, &json!({"code": code, "language": "java"}), "on");
        assert_eq!(main_text(&java("x")), "6", "after {ms} ms");
    }
    java(JAVA_BEFORE);
    java(JAVA);
    let drawn = clone.fork().map(|fork| main_text(&fork.cell("java", JAVA)));
    let [one, other] = &drawn;
    assert_eq!((one.lines().count(), other.lines().count()), (11, 11));
    for (generator, (one, other)) in one.lines().zip(other.lines()).enumerate() {
        assert_ne!(one, other, "generator {generator}");
    }
}
