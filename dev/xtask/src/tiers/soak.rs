//! The tier `soak`: tests that take minutes. Each test runs in its own process, a failure does not stop the others,
//! and the run ends with a table.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};

use crate::{
    tiers::{Counts, Outcome, TestEnvironment},
    tool,
    workspace::Workspace,
};

/// The crates with soak tests among their integration tests. A test compares them with the sources.
const PACKAGES: [&str; 2] = ["vmm", "api"];
/// The prefix of the names of soak tests.
const PREFIX: &str = "soak_";
/// Time limit for one test.
const LIMIT: Duration = Duration::from_secs(2 * 3600);
/// Lines of a test's output for the table: a result of the test (`test_cases::FOUND`), and the reason of a failure.
const FOUND: [&str; 2] = ["found: ", "test panicked: "];

/// A test and the program that contains it.
#[derive(Debug, Clone)]
struct Test {
    program: PathBuf,
    /// The directory in which cargo would run the program.
    dir: PathBuf,
    name: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    Passed,
    Failed,
    TimedOut,
}

/// A row of the table.
#[derive(Debug)]
struct Row {
    name: String,
    ending: Ending,
    seconds: u64,
    found: Vec<String>,
}

/// Runs the soak tests whose names contain `only`, or all. The table is printed and written to
/// `target/cube/results/soak.txt`, the output of each test to `target/cube/log/NAME.log`.
pub(crate) fn run(
    workspace: &Workspace,
    environment: &TestEnvironment,
    only: Option<&str>,
) -> Result<Outcome> {
    let mut tests = tests(workspace)?;
    tests.retain(|test| only.is_none_or(|only| test.name.contains(only)));
    if tests.is_empty() {
        bail!(
            "no soak test has {:?} in its name",
            only.unwrap_or_default()
        );
    }
    let logs = environment.artifacts.join("log");
    fs::create_dir_all(&logs)?;
    let mut rows = Vec::new();
    for (index, test) in tests.iter().enumerate() {
        eprintln!("--- {} ({} of {})", test.name, index + 1, tests.len());
        let mut command = command(test, environment);
        let log = logs.join(format!("{}.log", test.name));
        let row = watch(&mut command, &test.name, &log, LIMIT)?;
        eprintln!("--- {}: {} after {} s", row.name, row.ending, row.seconds);
        rows.push(row);
    }
    let table = table(&rows);
    println!("{table}");
    let results = environment.artifacts.join("results");
    fs::create_dir_all(&results)?;
    fs::write(results.join("soak.txt"), &table)?;
    Ok(outcome(&rows))
}

fn outcome(rows: &[Row]) -> Outcome {
    let passed = rows
        .iter()
        .filter(|row| row.ending == Ending::Passed)
        .count();
    let counts = Counts {
        passed: passed as u64,
        failed: (rows.len() - passed) as u64,
        skipped: 0,
    };
    Outcome {
        success: counts.failed == 0,
        counts,
    }
}

/// Builds the test programs and lists their soak tests.
fn tests(workspace: &Workspace) -> Result<Vec<Test>> {
    let mut build = workspace.cargo();
    build.args([
        "test",
        "--no-run",
        "--message-format=json-render-diagnostics",
        "--test",
        "*",
    ]);
    for package in PACKAGES {
        build.args(["--package", package]);
    }
    // Compiler messages go to the terminal.
    build.stderr(Stdio::inherit());
    let messages = tool::output(&mut build)?;
    let mut tests = Vec::new();
    for (program, dir) in messages.lines().filter_map(program) {
        let mut list = Command::new(&program);
        list.args(["--list", "--ignored"]).current_dir(&dir);
        for name in names(&tool::output(&mut list)?) {
            tests.push(Test {
                program: program.clone(),
                dir: dir.clone(),
                name,
            });
        }
    }
    Ok(tests)
}

/// The test program that a message of cargo reports, and the directory of its package.
fn program(message: &str) -> Option<(PathBuf, PathBuf)> {
    let message: serde_json::Value = serde_json::from_str(message).ok()?;
    let is_test = message["profile"]["test"].as_bool()?;
    let program = message["executable"].as_str()?;
    let package = Path::new(message["manifest_path"].as_str()?).parent()?;
    is_test.then(|| (program.into(), package.to_owned()))
}

/// The soak tests in the output of `--list`.
fn names(list: &str) -> Vec<String> {
    let name = |line: &str| {
        let name = line.strip_suffix(": test")?.trim();
        name.starts_with(PREFIX).then(|| name.to_owned())
    };
    list.lines().filter_map(name).collect()
}

fn command(test: &Test, environment: &TestEnvironment) -> Command {
    let mut command = Command::new(&test.program);
    command
        .args(["--exact", "--ignored", "--nocapture", &test.name])
        .current_dir(&test.dir)
        .env("CUBE_ARTIFACTS", &environment.artifacts);
    if let Some(binaries) = &environment.binaries {
        command.env("CUBE_BIN", binaries);
    }
    command
}

/// Runs one test in its own process group, which is killed at the end. Copies its output to standard error and to
/// `log`.
fn watch(command: &mut Command, name: &str, log: &Path, limit: Duration) -> Result<Row> {
    let mut log = fs::File::create(log)
        .with_context(|| format!("cannot create the log {}", log.display()))?;
    let (reader, writer) = std::io::pipe()?;
    command
        .stdin(Stdio::null())
        .stdout(writer.try_clone()?)
        .stderr(writer)
        .process_group(0);
    let started = Instant::now();
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot start the test {name}"))?;
    // `command` still holds the write ends of the pipe: drop them, or the reader never sees end-of-file.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let (ending, found) = thread::scope(|scope| {
        let found = scope.spawn(move || -> Result<Vec<String>> {
            let mut found = Vec::new();
            for line in BufReader::new(reader).split(b'\n') {
                let mut line = line?;
                let text = String::from_utf8_lossy(&line);
                if let Some(what) = FOUND.iter().find_map(|start| text.strip_prefix(start)) {
                    found.push(what.to_owned());
                }
                drop(text);
                line.push(b'\n');
                log.write_all(&line)?;
                std::io::stderr().write_all(&line)?;
            }
            Ok(found)
        });
        let ending = wait(&mut child, started + limit);
        let found = found.join();
        (ending, found)
    });
    let found = found.map_err(|_| anyhow::anyhow!("the reader of the test's output panicked"))?;
    Ok(Row {
        name: name.to_owned(),
        ending: ending?,
        seconds: started.elapsed().as_secs(),
        found: found?,
    })
}

/// Waits for a test, at most until the deadline, and kills every process that is left in its group.
fn wait(child: &mut Child, deadline: Instant) -> Result<Ending> {
    let ending = loop {
        match child.try_wait()? {
            Some(status) if status.success() => break Ending::Passed,
            Some(_) => break Ending::Failed,
            None if Instant::now() >= deadline => break Ending::TimedOut,
            None => thread::sleep(Duration::from_millis(100)),
        }
    };
    // Fails if no process is left.
    let _ = killpg(Pid::from_raw(i32::try_from(child.id())?), Signal::SIGKILL);
    child.wait()?;
    Ok(ending)
}

impl std::fmt::Display for Ending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Passed => "passed",
            Self::Failed => "failed",
            Self::TimedOut => "timed out",
        })
    }
}

/// One line per test, and one for each further result.
fn table(rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.name.len()).max().unwrap_or(0);
    let mut lines = vec![format!(
        "{:<width$}  {:<9}  seconds  found",
        "test", "outcome"
    )];
    for row in rows {
        let Row {
            name,
            ending,
            seconds,
            found,
        } = row;
        let mut found = found.iter();
        let first = found.next().map_or("", String::as_str);
        lines.push(format!(
            "{name:<width$}  {ending:<9}  {seconds:>7}  {first}"
        ));
        let indent = width + 22;
        lines.extend(found.map(|more| format!("{:indent$}{more}", "")));
    }
    lines
        .iter()
        .map(|line| line.trim_end())
        .collect::<Vec<_>>()
        .join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watched(script: &str, limit: Duration) -> (Row, String) {
        let log = tempfile::NamedTempFile::new().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let row = watch(&mut command, "soak_x", log.path(), limit).unwrap();
        (row, fs::read_to_string(log.path()).unwrap())
    }

    #[test]
    fn a_test_is_judged_by_its_exit_status_and_its_results_are_kept() {
        let script =
            "echo found: 3 sandboxes >&2; echo noise; echo 'test panicked: no agent'; exit 1";
        let (row, log) = watched(script, LIMIT);
        assert_eq!(row.ending, Ending::Failed);
        assert_eq!(row.found, ["3 sandboxes", "no agent"]);
        assert!(log.contains("noise\n"), "{log}");
        assert_eq!(watched("true", LIMIT).0.ending, Ending::Passed);
    }

    #[test]
    fn a_test_that_hangs_is_killed_with_its_children() {
        let (row, log) = watched("sleep 1000 & echo $!; wait", Duration::from_millis(200));
        assert_eq!(row.ending, Ending::TimedOut);
        let child: i32 = log.trim().parse().unwrap();
        let stat = || fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
        // A killed process ends when the kernel next runs it.
        let limit = Instant::now() + Duration::from_secs(60);
        while !(stat().is_empty() || stat().contains(") Z ")) {
            assert!(Instant::now() < limit, "{}", stat());
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_child_that_outlives_its_test_does_not_keep_the_run_waiting() {
        let (row, _) = watched("sleep 1000 & exit 0", LIMIT);
        assert_eq!(row.ending, Ending::Passed);
    }

    #[test]
    fn the_table_has_a_line_for_each_result() {
        let row = |name: &str, ending, seconds, found: &[&str]| Row {
            name: name.to_owned(),
            ending,
            seconds,
            found: found.iter().map(|&f| f.to_owned()).collect(),
        };
        let rows = [
            row("soak_one", Ending::Passed, 12, &["a", "b"]),
            row("soak_the_second", Ending::TimedOut, 7200, &[]),
        ];
        let want = "\
test             outcome    seconds  found
soak_one         passed          12  a
                                     b
soak_the_second  timed out     7200";
        assert_eq!(table(&rows), want);
        let Outcome { success, counts } = outcome(&rows);
        assert_eq!((success, counts.passed, counts.failed), (false, 1, 1));
    }

    #[test]
    fn the_packages_are_those_with_soak_tests() {
        let workspace = Workspace::locate().unwrap();
        let mut grep = Command::new("git");
        grep.args(["grep", "--files-with-matches", "pub(crate) fn soak_"])
            .args(["--", "*/tests/*.rs"])
            .current_dir(workspace.root());
        let files = tool::output(&mut grep).unwrap();
        let dirs: std::collections::BTreeSet<_> = files
            .lines()
            .filter_map(|file| file.split('/').next())
            .collect();
        assert_eq!(dirs, PACKAGES.into());
    }

    #[test]
    fn only_soak_tests_are_listed() {
        let list = "soak_a: test\nkvm_b: test\nsoak_c: benchmark\n\n2 tests, 0 benchmarks\n";
        assert_eq!(names(list), ["soak_a"]);
    }

    #[test]
    fn only_test_programs_are_run() {
        let message = |test: bool| {
            format!(
                r#"{{"profile":{{"test":{test}}},"executable":"/t/kvm","manifest_path":"/w/vmm/Cargo.toml"}}"#
            )
        };
        let found = program(&message(true));
        assert_eq!(found, Some(("/t/kvm".into(), "/w/vmm".into())));
        assert_eq!(program(&message(false)), None);
        assert_eq!(program("warning: text"), None);
    }
}
