//! Python contexts. They are forks of one process and must be independent.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::{clone::Clone, error, identity::PYTHON, main_text, python::leave_running, text};

/// A context of a clone.
struct Context<'a> {
    clone: &'a Clone,
    id: String,
}

impl<'a> Context<'a> {
    fn new(clone: &'a Clone, request: &Value) -> Self {
        let (status, made) = clone.ask("POST", "/contexts", request);
        assert_eq!(status, 200, "{made}");
        let made: Value = serde_json::from_str(&made).unwrap();
        let id = made["id"].as_str().unwrap().to_owned();
        Self { clone, id }
    }

    /// The context that exists from the start.
    fn default(clone: &'a Clone) -> Self {
        let (_, all) = clone.ask("GET", "/contexts", &Value::Null);
        let all: Value = serde_json::from_str(&all).unwrap();
        let id = all[0]["id"].as_str().unwrap().to_owned();
        Self { clone, id }
    }

    fn run(&self, code: &str) -> Vec<Value> {
        let request = json!({ "code": code, "context_id": self.id });
        self.clone.run(&request)
    }

    fn restart(&self) {
        let path = format!("/contexts/{}/restart", self.id);
        let answer = self.clone.ask("POST", &path, &Value::Null);
        assert_eq!(answer, (200, "null".to_owned()));
    }

    fn remove(&self) {
        let path = format!("/contexts/{}", self.id);
        assert_eq!(self.clone.ask("DELETE", &path, &Value::Null).0, 200);
    }
}

/// The lines of a main result.
fn lines(events: &[Value]) -> Vec<String> {
    let shown = main_text(events);
    let lines = shown.split("\\n").flat_map(str::lines);
    lines.map(ToOwned::to_owned).collect()
}

/// Asserts that no generator returned the same value twice.
fn assert_all_differ(drawn: &[Vec<String>]) {
    for generator in 0..drawn[0].len() {
        let values: BTreeSet<&String> = drawn.iter().map(|lines| &lines[generator]).collect();
        let all = drawn.len();
        assert_eq!(values.len(), all, "generator {generator}: {values:?}");
    }
}

#[test]
fn interpreter_contexts_draw_different_numbers_everywhere() {
    let clones = [Clone::start(), Clone::start()];
    let mut drawn = Vec::new();
    for clone in &clones {
        // The first was forked before the snapshot, the others later, all from the same process.
        let contexts: Vec<Context<'_>> = (0..3)
            .map(|_| Context::new(clone, &json!({})))
            .chain([Context::default(clone)])
            .collect();
        drawn.extend(contexts.iter().map(|context| lines(&context.run(PYTHON))));
        contexts[0].restart();
        drawn.push(lines(&contexts[0].run(PYTHON)));
    }
    assert_eq!(drawn[0].len(), 11);
    assert_all_differ(&drawn);
}

#[test]
fn interpreter_twenty_contexts_are_apart() {
    let clone = Clone::with_environment(&[("GLOBAL", "sandbox")]);
    clone.command("for i in $(seq 20); do mkdir /tmp/$i; done; chmod 777 /tmp/*");
    let contexts: Vec<Context<'_>> = (1..=20)
        .map(|n| Context::new(&clone, &json!({ "cwd": format!("/tmp/{n}") })))
        .collect();
    for (context, n) in contexts.iter().zip(1..) {
        let code =
            format!("import os; x = {n}; os.environ['OWN'] = '{n}'; open('file', 'w').close()");
        assert!(
            context
                .run(&code)
                .iter()
                .all(|event| event["type"] != "error")
        );
    }
    let mut groups = BTreeSet::new();
    for (context, n) in contexts.iter().zip(1..) {
        let code =
            "f'{x} {os.getcwd()} {os.listdir()} {os.environ[\"OWN\"]} {os.environ[\"GLOBAL\"]}'";
        let wanted = format!("{n} /tmp/{n} ['file'] {n} sandbox");
        assert_eq!(main_text(&context.run(code)), wanted);
        let printed = text(&context.run("!echo $OWN; pwd"), "stdout");
        assert_eq!(printed, format!("{n}\n/tmp/{n}\n"));
        groups.insert(main_text(
            &context.run("os.getpgrp() == os.getpid(), os.getpid()"),
        ));
    }
    assert_eq!(groups.len(), 20);
    assert!(groups.iter().all(|group| group.starts_with("(True, ")));
    // The default context does not have the variables of other contexts.
    let default = Context::default(&clone);
    assert_eq!(error(&default.run("x"))["name"], "NameError");
    for context in contexts {
        context.remove();
    }
    let left = "ps -eo pid,ppid,args | grep -c '[h]ost.py'";
    // The zygote, and the host of the default context.
    assert_eq!(clone.command(left).trim(), "2");
}

#[test]
fn interpreter_a_restart_keeps_nothing() {
    let clone = Clone::start();
    let made = Context::new(&clone, &json!({ "cwd": "/" }));
    for context in [Context::default(&clone), made] {
        let code = "import os, json, math; x = 1; os.chdir('/tmp'); os.environ['KEPT'] = 'yes'; \
                    json.kept = math.kept = 1; os.getpid()";
        let before = main_text(&context.run(code));
        for _ in 0..2 {
            context.restart();
            let look = "import os, json, math; 'x' in globals(), \
                        os.environ.get('KEPT'), hasattr(json, 'kept'), hasattr(math, 'kept'), len(Out), len(In), \
                        os.getcwd() != '/tmp'";
            let first = context.run(look);
            assert_eq!(first[0]["execution_count"], 1);
            assert_eq!(main_text(&first), "(False, None, False, False, 0, 2, True)");
            assert_ne!(main_text(&context.run("os.getpid()")), before);
        }
    }
}

#[test]
fn interpreter_an_interrupt_hits_one_context() {
    let clone = Clone::start();
    let [one, other] = [0, 1].map(|_| Context::new(&clone, &json!({})));
    for context in [&one, &other] {
        context.run("kept = 7");
    }
    std::thread::scope(|scope| {
        let code = "import time, os\nopen('/tmp/on', 'w').close()\n\
                    while not os.path.exists('/tmp/off'): time.sleep(0.01)\nkept";
        let waiting = scope.spawn(|| main_text(&other.run(code)));
        let request = json!({
            "code": "import os\nwhile not os.path.exists('/tmp/on'): pass\nprint('on')\nwhile True: pass",
            "context_id": one.id,
        });
        leave_running(&clone, &request, "on");
        // The response ends once the loop has ended.
        assert_eq!(main_text(&one.run("kept")), "7");
        one.run("open('/tmp/off', 'w').close()");
        assert_eq!(waiting.join().unwrap(), "7");
    });
}

#[test]
fn interpreter_contexts_that_die_are_repaired() {
    let clone = Clone::start();
    let [one, other] = [0, 1].map(|_| Context::new(&clone, &json!({})));
    other.run("kept = 7");
    let died = |context: &Context<'_>, code: &str| {
        let events = context.run(code);
        assert_eq!(error(&events)["name"], "UnexpectedEndOfExecution");
    };
    died(&one, "import os; os.kill(os.getpid(), 9)");
    let again = one.run("1+1");
    assert_eq!(
        (again[0]["execution_count"].as_u64(), main_text(&again)),
        (Some(1), "2".to_owned())
    );
    assert_eq!(main_text(&other.run("kept")), "7");
    // If the zygote ends, all contexts start again as forks of a new zygote.
    died(
        &one,
        "import os, time; os.kill(os.getppid(), 9); time.sleep(1000)",
    );
    for context in [&one, &other, &Context::default(&clone)] {
        assert_eq!(main_text(&context.run("1+1")), "2");
    }
    assert_eq!(error(&other.run("kept"))["name"], "NameError");
    assert_eq!(main_text(&Context::new(&clone, &json!({})).run("1+1")), "2");
}

#[test]
fn interpreter_a_new_context_has_what_users_do_first() {
    let clone = Clone::start();
    let context = Context::new(&clone, &json!({}));
    let loaded =
        "import sys; [name in sys.modules for name in ('pandas', 'matplotlib', 'sklearn')]";
    assert_eq!(main_text(&context.run(loaded)), "[True, True, True]");
    assert_eq!(
        main_text(&context.run("[n for n in globals() if n in ('pd', 'frame', 'figure', 'x')]")),
        "[]"
    );
    assert_eq!(
        main_text(&context.run("import asyncio; await asyncio.sleep(0, 3)")),
        "3"
    );
    let drawn = context.run("import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()");
    assert!(
        drawn.iter().any(|event| event["png"].is_string()),
        "{drawn:?}"
    );
}

#[test]
fn interpreter_contexts_share_no_open_file() {
    let clone = Clone::start();
    // Forks share the positions of open files, so a host must not have any open file.
    let open = "import os; links = [f'/proc/self/fd/{n}' for n in os.listdir('/proc/self/fd')]; \
                sorted(os.readlink(l).split(':')[0] for l in links if os.path.lexists(l))";
    let wanted = "['/dev/null', 'pipe', 'pipe', 'socket']";
    for _ in 0..2 {
        // The first host was forked before the snapshot.
        let context = Context::new(&clone, &json!({}));
        assert_eq!(main_text(&context.run(open)), wanted);
    }
}
