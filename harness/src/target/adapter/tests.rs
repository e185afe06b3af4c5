use std::{path::PathBuf, time::Instant};

use super::*;
use crate::target::exec_and_compare;

const ID: CloneId = CloneId {
    round: 0,
    arrival: 7,
};
const LONG: Duration = Duration::from_secs(20);
/// Responds to `hello`, then runs the rest of the script.
const HELLO: &str = r#"read line; echo '{"id":1,"protocol":1,"platform":"shell"}'; "#;

struct Stage {
    dir: tempfile::TempDir,
}

impl Stage {
    fn set() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
        }
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("adapter.stderr")
    }

    fn start(&self, script: &str, timeout: Duration) -> Result<Adapter, Failure> {
        let command = ["/bin/sh".to_owned(), "-c".to_owned(), script.to_owned()];
        Adapter::start(&command, "base", timeout, &self.log())
    }

    /// Cause and message of the first create on an adapter that responds to `hello` and then runs `script`.
    fn create(&self, script: &str, timeout: Duration) -> (FailureCause, String) {
        let adapter = self.start(&format!("{HELLO}{script}"), timeout).unwrap();
        let created = adapter.create(ID, &mut Timeline::default());
        let failure = created.err().unwrap();
        (failure.cause, failure.message)
    }
}

fn command(argv: &[&str], expect: &str) -> ExecSpec {
    ExecSpec {
        argv: argv.iter().map(|s| (*s).to_owned()).collect(),
        cell: None,
        language: None,
        user: "root".into(),
        expect_stdout: expect.into(),
        timeout: LONG,
    }
}

#[test]
fn the_example_of_the_documentation_works() {
    let text = include_str!("../../../../docs/measure/adapters.md");
    let example = text.split("```python\n").nth(1).unwrap();
    let example = example.split("```").next().unwrap();
    let lines = example.lines().filter(|line| !line.is_empty()).count();
    assert!(lines <= 32, "{lines} lines are not about 30");
    let stage = Stage::set();
    let file = stage.dir.path().join("adapter.py");
    std::fs::write(&file, example).unwrap();
    let argv = ["python3".to_owned(), file.display().to_string()];
    let adapter = match Adapter::start(&argv, "base", LONG, &stage.log()) {
        Err(failure) if failure.cause == FailureCause::Spawn => {
            eprintln!("skipped: no python3");
            return;
        }
        adapter => adapter.unwrap(),
    };
    assert_eq!(adapter.about().version.as_deref(), Some("example 1.0"));
    let mut timeline = Timeline::default();
    let before = crate::clock::monotonic_ns();
    let mut sandbox = adapter.create(ID, &mut timeline).unwrap();
    assert!(timeline.at(StartPhase::Replied).unwrap() > before);
    let echo = command(&["/bin/echo", "ok"], "ok\n");
    exec_and_compare(sandbox.as_mut(), &echo).unwrap();
    let missing = exec_and_compare(sandbox.as_mut(), &command(&["/dev/null/such"], ""));
    let failure = missing.unwrap_err();
    assert_eq!(failure.cause, FailureCause::Exec);
    assert!(failure.message.contains("Error: "), "{}", failure.message);
    sandbox.kill().unwrap();
    // Many concurrent calls: the responses arrive in a different order than the requests.
    std::thread::scope(|scope| {
        for arrival in 0..8 {
            let (adapter, echo) = (&adapter, &echo);
            scope.spawn(move || {
                let id = CloneId { round: 1, arrival };
                let mut sandbox = adapter.create(id, &mut Timeline::default()).unwrap();
                exec_and_compare(sandbox.as_mut(), echo).unwrap();
            });
        }
    });
}

#[test]
fn the_adapters_of_this_repository_name_the_package_of_a_program_that_is_missing() {
    let stage = Stage::set();
    for file in ["bubblewrap.py", "oci.py"] {
        let file = format!(
            "{}/../scenarios/adapters/{file}",
            env!("CARGO_MANIFEST_DIR")
        );
        let command = ["python3", &file, "artifacts", "/no/such"].map(str::to_owned);
        let failure = Adapter::start(&command, "base", LONG, &stage.log());
        let failure = failure.err().unwrap();
        if failure.cause == FailureCause::Spawn {
            eprintln!("skipped: no python3");
            return;
        }
        assert!(
            failure.message.contains("install the Debian package"),
            "{}",
            failure.message
        );
    }
}

#[test]
fn a_program_that_is_missing_or_speaks_another_version_is_refused() {
    let stage = Stage::set();
    let missing = Adapter::start(&["/no/such".to_owned()], "base", LONG, &stage.log());
    assert_eq!(missing.err().unwrap().cause, FailureCause::Spawn);
    let other = stage.start(r#"read l; echo '{"id":1,"protocol":2}'; cat"#, LONG);
    assert!(other.err().unwrap().message.contains("protocol"));
    let silent = stage.start("exit 3", LONG);
    assert_eq!(silent.err().unwrap().cause, FailureCause::Connect);
}

#[test]
fn what_is_no_answer_fails_every_start_and_names_the_log() {
    let stage = Stage::set();
    for (script, expected) in [
        ("read l; echo hello; cat >/dev/null", "not a response"),
        (
            r#"read l; echo '{"id":99,"sandbox":"x"}'; cat >/dev/null"#,
            "99",
        ),
        ("read l; exit 1", "ended"),
        (
            "read l; head -c 1200000 /dev/zero; cat >/dev/null",
            "longer",
        ),
        ("read l; exec 0<&-; exec 1>&-; sleep 60", "closed"),
    ] {
        let (cause, message) = stage.create(script, LONG);
        assert_eq!(cause, FailureCause::Connect, "{script}: {message}");
        assert!(message.contains(expected), "{script}: {message}");
        assert!(message.contains("adapter.stderr"), "{message}");
    }
}

#[test]
fn errors_and_invalid_ids_fail_one_start() {
    let stage = Stage::set();
    let (cause, message) = stage.create(
        r#"read l; printf '%s\n' '{"id":2,"error":"quota\u001b[31m"}'; cat >/dev/null"#,
        LONG,
    );
    assert_eq!(cause, FailureCause::Create);
    assert!(message.ends_with("quota [31m"), "{message:?}");
    for answer in [
        r#"{"id":2}"#,
        r#"{"id":2,"sandbox":""}"#,
        r#"{"id":2,"sandbox":"a\nb"}"#,
    ] {
        let script = format!("read l; printf '%s\\n' '{answer}'; cat >/dev/null");
        assert_eq!(stage.create(&script, LONG).0, FailureCause::Create);
    }
}

#[test]
fn a_sandbox_whose_start_is_answered_late_is_stopped() {
    let stage = Stage::set();
    let seen = stage.dir.path().join("seen");
    let go = stage.dir.path().join("go");
    let script = format!(
        r#"{HELLO} read l; while [ ! -e {go} ]; do sleep 0.01; done; echo '{{"id":2,"sandbox":"late"}}'; read l; echo "$l" > {seen}.part; mv {seen}.part {seen}; echo '{{"id":3}}'; cat >/dev/null"#,
        go = go.display(),
        seen = seen.display(),
    );
    let adapter = stage.start(&script, Duration::from_millis(50)).unwrap();
    let failure = adapter.create(ID, &mut Timeline::default()).err().unwrap();
    assert_eq!(failure.cause, FailureCause::Timeout, "{}", failure.message);
    std::fs::write(&go, "").unwrap();
    let deadline = Instant::now() + LONG;
    while !seen.exists() {
        assert!(
            Instant::now() < deadline,
            "the late sandbox was not stopped"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    let stop = std::fs::read_to_string(&seen).unwrap();
    assert!(
        stop.contains(r#""op":"stop""#) && stop.contains(r#""sandbox":"late""#),
        "{stop}"
    );
}

#[test]
fn dropping_it_ends_its_input_and_keeps_its_standard_error() {
    let stage = Stage::set();
    let script = format!("echo warning >&2; {HELLO} read l || echo clean >&2; echo end >&2");
    drop(stage.start(&script, LONG).unwrap());
    let deadline = Instant::now() + LONG;
    while std::fs::read_to_string(stage.log()).unwrap() != "warning\nclean\nend\n" {
        assert!(
            Instant::now() < deadline,
            "the standard error is not complete"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}
