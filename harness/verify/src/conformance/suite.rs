//! Runs the cases of one SDK in a process, with a time limit for each case.
//!
//! The process writes the lines `{"begin": NAME}` and `{"end": NAME, …}` to its standard output. If a case exceeds its
//! limit, the process and all its children are killed, and a new process runs the remaining cases.

use std::{
    io::{BufRead, BufReader, Read},
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, ChildStdout, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    thread,
    time::Duration,
};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use serde::Deserialize;

use super::{address::Address, features::Feature, registry, sdk::Sdk};
use crate::{
    report::{Case, Verdict},
    setup::DOMAIN,
};

/// Time until the first case or, after a case has ended, the next one begins. Starting an interpreter and loading its
/// SDK takes seconds on a busy host.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest line that is read, in bytes; longer lines are ignored.
const MAX_LINE: u64 = 64 << 10;

/// A line of a suite's output.
#[derive(Debug, Deserialize)]
struct Line {
    begin: Option<String>,
    end: Option<String>,
    /// Set if `end` is set.
    verdict: Option<Reported>,
    #[serde(default)]
    why: String,
    seconds: Option<f64>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Reported {
    Pass,
    Fail,
    Absent,
}

/// How a process ended.
enum Outcome {
    /// All requested cases were run.
    Done,
    /// This case exceeded its limit.
    Stuck(String),
    /// The process ended early, or began no case in time. Contains the running case, if any.
    Ended(Option<String>),
}

/// Runs all cases of one SDK. If a case hangs or crashes, starts a new process for the remaining cases.
pub(super) fn run(
    sdk: &Sdk,
    dir: &Path,
    features: &[Feature],
    address: &Address,
    home: &Path,
) -> Vec<Case> {
    let (mut rest, lacking): (Vec<&Feature>, Vec<&Feature>) = features
        .iter()
        .filter(|feature| feature.suites.contains(&sdk.suite))
        .partition(|feature| !feature.registry || address.images.is_some());
    let skipped = |feature| Case {
        required: false,
        ..not_run(sdk, feature, registry::MISSING)
    };
    let mut cases: Vec<Case> = lacking.into_iter().map(skipped).collect();
    while !rest.is_empty() {
        let before = cases.len();
        let outcome = match Process::start(sdk, dir, &rest, address, home) {
            Ok(mut process) => process.follow(&rest, |line| cases.extend(case(sdk, &rest, line))),
            Err(why) => {
                cases.extend(rest.iter().map(|f| not_run(sdk, f, &why)));
                return cases;
            }
        };
        let found = |name: &str| rest.iter().find(|f| f.name == name);
        match outcome {
            Outcome::Done => {}
            Outcome::Stuck(name) => cases.extend(found(&name).map(|feature| {
                let why = format!("no result within {:?}", feature.within);
                case_of(sdk, feature).judged(Verdict::TimedOut, [why])
            })),
            Outcome::Ended(Some(name)) => cases.extend(found(&name).map(|feature| {
                let why = "the SDK's process ended during this case";
                case_of(sdk, feature).judged(Verdict::Fail, [why])
            })),
            Outcome::Ended(None) => {}
        }
        rest.retain(|feature| !cases.iter().any(|case| case.name == feature.name));
        if cases.len() == before {
            let why = "the SDK's process ended before its first case";
            cases.extend(rest.iter().map(|f| not_run(sdk, f, why)));
            return cases;
        }
    }
    cases
}

/// The case of an `end` line of one of these features; `None` for any other line.
fn case(sdk: &Sdk, features: &[&Feature], line: Line) -> Option<Case> {
    let name = line.end?;
    let feature = features.iter().find(|feature| feature.name == name)?;
    let may_be_absent = feature.absent.contains(&sdk.name());
    let (verdict, why) = match line.verdict {
        Some(Reported::Pass) => (Verdict::Pass, None),
        Some(Reported::Absent) if may_be_absent => (Verdict::Absent, None),
        Some(Reported::Absent) => {
            let why = format!(
                "the list of features does not allow it to be absent: {}",
                line.why
            );
            (Verdict::Fail, Some(why))
        }
        Some(Reported::Fail) => (Verdict::Fail, Some(line.why)),
        None => (
            Verdict::Fail,
            Some("the end line has no verdict".to_owned()),
        ),
    };
    let mut case = case_of(sdk, feature).judged(verdict, why);
    case.seconds = line.seconds;
    Some(case)
}

fn not_run(sdk: &Sdk, feature: &Feature, why: &str) -> Case {
    case_of(sdk, feature).judged(Verdict::NotRun, [why])
}

fn case_of(sdk: &Sdk, feature: &Feature) -> Case {
    Case {
        required: feature.must,
        ..Case::new(&sdk.name(), &feature.name, &feature.why)
    }
}

/// The process of a suite. Dropping it kills the process and all its children.
struct Process {
    child: Child,
    lines: Receiver<Line>,
}

impl Process {
    fn start(
        sdk: &Sdk,
        dir: &Path,
        features: &[&Feature],
        address: &Address,
        home: &Path,
    ) -> Result<Self, String> {
        let (program, suite) = sdk.command(dir);
        if !program.exists() || !suite.exists() {
            let dir = dir.display();
            return Err(format!(
                "the SDK is not installed in {dir}: run `cargo xtask sdks`"
            ));
        }
        let mut command = Command::new(program);
        command
            .arg(suite)
            .args(features.iter().map(|feature| &feature.name))
            .env("E2B_API_URL", &address.url)
            .env("E2B_SANDBOX_URL", &address.url)
            .env("E2B_API_KEY", &address.key)
            .env("E2B_DOMAIN", DOMAIN)
            .env("CONFORMANCE_TEMPLATE", &address.template)
            // The suite must not depend on the settings of the user who runs it.
            .env("HOME", home)
            .env("NO_PROXY", "*")
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("NO_UPDATE_NOTIFIER", "1")
            .env_remove("E2B_DEBUG")
            .env_remove("E2B_ACCESS_TOKEN")
            .env_remove("HTTP_PROXY")
            .env_remove("http_proxy")
            .env_remove("HTTPS_PROXY")
            .env_remove("https_proxy")
            .env_remove("ALL_PROXY")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0);
        if let Some(secure) = &address.secure {
            command
                .env("CONFORMANCE_HTTPS_URL", &secure.url)
                .env("CONFORMANCE_HTTPS_KEY", &secure.key)
                .env("CONFORMANCE_HTTPS_CA", &secure.authority);
        }
        if let Some(images) = &address.images {
            command
                .env("CONFORMANCE_IMAGE", &images.open)
                .env("CONFORMANCE_LOCKED_IMAGE", &images.locked);
        }
        let mut child = command.spawn().map_err(|e| e.to_string())?;
        let (sender, lines) = channel();
        if let Some(stdout) = child.stdout.take() {
            thread::spawn(move || read(stdout, |line| sender.send(line).is_ok()));
        }
        Ok(Self { child, lines })
    }

    fn follow(&mut self, features: &[&Feature], mut on_line: impl FnMut(Line)) -> Outcome {
        let mut running: Option<&Feature> = None;
        loop {
            let timeout = running.map_or(START_TIMEOUT, |feature| feature.within);
            match self.lines.recv_timeout(timeout) {
                Ok(line) => {
                    let name = line.begin.as_ref();
                    running = name.and_then(|n| features.iter().copied().find(|f| f.name == *n));
                    on_line(line);
                }
                Err(RecvTimeoutError::Timeout) => {
                    return match running {
                        Some(feature) => Outcome::Stuck(feature.name.clone()),
                        None => Outcome::Ended(None),
                    };
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return match (running, self.child.wait()) {
                        (None, Ok(status)) if status.success() => Outcome::Done,
                        (running, _) => Outcome::Ended(running.map(|f| f.name.clone())),
                    };
                }
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Ok(pid) = i32::try_from(self.child.id()) {
            // Fails only if the whole group has already ended.
            let _ = killpg(Pid::from_raw(pid), Signal::SIGKILL);
        }
        let _ = self.child.wait();
    }
}

/// Passes each valid line to `on_line`, until the output ends or `on_line` returns false.
fn read(stdout: ChildStdout, mut on_line: impl FnMut(Line) -> bool) {
    let mut reader = BufReader::new(stdout);
    loop {
        let mut bytes = Vec::new();
        match reader.by_ref().take(MAX_LINE).read_until(b'\n', &mut bytes) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        if let Ok(line) = serde_json::from_slice(&bytes)
            && !on_line(line)
        {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{features::Area, sdk::Suite};
    use std::os::unix::fs::PermissionsExt;

    const SDK: Sdk = Sdk {
        suite: Suite::Js,
        version: "2.51.0",
    };

    fn feature(name: &str, within_ms: u64) -> Feature {
        Feature {
            name: name.to_owned(),
            why: "a test".to_owned(),
            area: Area::Sandbox,
            suites: vec![Suite::Js],
            absent: Vec::new(),
            must: true,
            own_server: false,
            registry: false,
            within: Duration::from_millis(within_ms),
        }
    }

    /// Runs a shell script instead of Node.
    fn cases_of(script: &str, features: &[Feature]) -> Vec<(String, Verdict)> {
        let dir = tempfile::tempdir().unwrap();
        let (node, suite) = SDK.command(dir.path());
        for (path, text) in [
            (&node, format!("#!/bin/sh\nshift\n{script}\n")),
            (&suite, String::new()),
        ] {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        std::fs::set_permissions(&node, std::fs::Permissions::from_mode(0o755)).unwrap();
        let address = Address {
            url: String::new(),
            key: String::new(),
            template: String::new(),
            secure: None,
            images: None,
        };
        let cases = run(&SDK, dir.path(), features, &address, dir.path());
        cases.into_iter().map(|c| (c.name, c.verdict)).collect()
    }

    fn cases(list: &[(&str, Verdict)]) -> Vec<(String, Verdict)> {
        list.iter().map(|(f, v)| ((*f).to_owned(), *v)).collect()
    }

    const SAY: &str = r#"
        begin() { echo "{\"begin\": \"$1\"}"; }
        end() { echo "{\"end\": \"$1\", \"verdict\": \"$2\", \"why\": \"w\", \"seconds\": 0.1}"; }
    "#;

    #[test]
    fn end_lines_become_cases_and_other_lines_are_ignored() {
        let script = format!("{SAY} echo noise; for f; do begin $f; end $f $f; done");
        let features = [
            feature("pass", 9000),
            feature("fail", 9000),
            feature("absent", 9000),
        ];
        let want = [
            ("pass", Verdict::Pass),
            ("fail", Verdict::Fail),
            ("absent", Verdict::Fail),
        ];
        assert_eq!(cases_of(&script, &features), cases(&want));
        let mut listed = features.clone();
        listed[2].absent.push(SDK.name());
        assert_eq!(cases_of(&script, &listed)[2].1, Verdict::Absent);
    }

    #[test]
    fn a_stuck_or_crashed_case_does_not_affect_other_cases() {
        let script = format!(
            "{SAY} for f; do begin $f; case $f in stuck) sleep 60;; dies) exit 1;; esac; end $f pass; done"
        );
        let features = [
            feature("a", 9000),
            feature("stuck", 300),
            feature("dies", 9000),
            feature("b", 9000),
        ];
        let want = [
            ("a", Verdict::Pass),
            ("stuck", Verdict::TimedOut),
            ("dies", Verdict::Fail),
            ("b", Verdict::Pass),
        ];
        assert_eq!(cases_of(&script, &features), cases(&want));
    }

    #[test]
    fn a_case_without_its_registry_is_skipped_and_says_so() {
        let script = format!("{SAY} for f; do begin $f; end $f pass; done");
        let mut features = [feature("a", 9000), feature("b", 9000)];
        features[0].registry = true;
        let want = [("a", Verdict::NotRun), ("b", Verdict::Pass)];
        assert_eq!(cases_of(&script, &features), cases(&want));
    }

    #[test]
    fn cases_of_a_process_that_fails_to_start_are_not_run() {
        let features = [feature("a", 9000), feature("b", 9000)];
        let want = [("a", Verdict::NotRun), ("b", Verdict::NotRun)];
        assert_eq!(cases_of("exit 3", &features), cases(&want));
    }
}
