//! One SDK's cases in a process of its own, each bounded in time.
//!
//! The process says `{"begin": NAME}` and `{"end": NAME, …}` on its standard output. When a case does not end
//! in time, the process and all that it has started are killed, and a new one goes on with the rest.

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

use super::{Address, Cell, DOMAIN, Verdict, features::Feature, sdk::Sdk};

/// An interpreter with its SDK takes seconds to start on a busy host.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// Longest line of a suite; a longer one is no line.
const MAX_LINE: u64 = 64 << 10;

/// What a suite says.
#[derive(Debug, Deserialize)]
struct Line {
    begin: Option<String>,
    end: Option<String>,
    verdict: Option<Said>,
    #[serde(default)]
    why: String,
    seconds: Option<f64>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Said {
    Pass,
    Fail,
    Absent,
}

/// How one process came to its end.
enum Outcome {
    /// It has run all cases that it was told.
    Done,
    /// This case did not end in time.
    Stuck(String),
    /// It ended early, in this case if one had begun.
    Ended(Option<String>),
}

/// Runs all cases of one SDK.
pub(super) fn run(
    sdk: &Sdk,
    dir: &Path,
    features: &[Feature],
    address: &Address,
    home: &Path,
) -> Vec<Cell> {
    let mut cells = Vec::new();
    let mut rest: Vec<&Feature> = features
        .iter()
        .filter(|feature| feature.suites.contains(&sdk.suite))
        .collect();
    while !rest.is_empty() {
        let before = cells.len();
        let outcome = match Process::start(sdk, dir, &rest, address, home) {
            Ok(mut process) => process.follow(&rest, |line| cells.extend(cell(sdk, &rest, line))),
            Err(why) => {
                cells.extend(rest.iter().map(|f| not_run(sdk, f, &why)));
                return cells;
            }
        };
        let found = |name: &str| rest.iter().find(|f| f.name == name);
        match outcome {
            Outcome::Done => {}
            Outcome::Stuck(name) => cells.extend(found(&name).map(|feature| {
                let why = format!("no end within {:?}", feature.within);
                new_cell(sdk, feature, Verdict::TimedOut, why, None)
            })),
            Outcome::Ended(Some(name)) => cells.extend(found(&name).map(|feature| {
                let why = "the SDK's process ended in this case".to_owned();
                new_cell(sdk, feature, Verdict::Fail, why, None)
            })),
            Outcome::Ended(None) => {}
        }
        rest.retain(|feature| !cells.iter().any(|cell| cell.feature == feature.name));
        if cells.len() == before {
            let why = "the SDK's process ended before its first case";
            cells.extend(rest.iter().map(|f| not_run(sdk, f, why)));
            return cells;
        }
    }
    cells
}

/// The cell of an end; `None` for other lines.
fn cell(sdk: &Sdk, features: &[&Feature], line: Line) -> Option<Cell> {
    let name = line.end?;
    let feature = features.iter().find(|feature| feature.name == name)?;
    let may_be_absent = feature.absent.contains(&sdk.name());
    let (verdict, why) = match line.verdict {
        Some(Said::Pass) => (Verdict::Pass, String::new()),
        Some(Said::Absent) if may_be_absent => (Verdict::Absent, String::new()),
        Some(Said::Absent) => {
            let why = format!("the list of features says it is there: {}", line.why);
            (Verdict::Fail, why)
        }
        Some(Said::Fail) => (Verdict::Fail, line.why),
        None => (Verdict::Fail, "an end without a verdict".to_owned()),
    };
    Some(new_cell(sdk, feature, verdict, why, line.seconds))
}

fn not_run(sdk: &Sdk, feature: &Feature, why: &str) -> Cell {
    new_cell(sdk, feature, Verdict::NotRun, why.to_owned(), None)
}

fn new_cell(
    sdk: &Sdk,
    feature: &Feature,
    verdict: Verdict,
    why: String,
    seconds: Option<f64>,
) -> Cell {
    Cell {
        feature: feature.name.clone(),
        sdk: sdk.name(),
        must: feature.must,
        verdict,
        why,
        seconds,
    }
}

/// A suite's process with everything that it starts. Dropping it kills all of them.
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
                "it is not in {dir}: `cargo xtask sdks` installs it"
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
            // Settings of whoever runs this are none of the suite's.
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
        let mut child = command.spawn().map_err(|e| e.to_string())?;
        let (sender, lines) = channel();
        if let Some(stdout) = child.stdout.take() {
            thread::spawn(move || read(stdout, |line| sender.send(line).is_ok()));
        }
        Ok(Self { child, lines })
    }

    fn follow(&mut self, features: &[&Feature], mut heard: impl FnMut(Line)) -> Outcome {
        let mut running: Option<&Feature> = None;
        loop {
            let patience = running.map_or(START_PATIENCE, |feature| feature.within);
            match self.lines.recv_timeout(patience) {
                Ok(line) => {
                    let name = line.begin.as_ref();
                    running = name.and_then(|n| features.iter().copied().find(|f| f.name == *n));
                    heard(line);
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
            // Fails only when the whole group has ended.
            let _ = killpg(Pid::from_raw(pid), Signal::SIGKILL);
        }
        let _ = self.child.wait();
    }
}

/// Hands on the lines that are ones, until the end or until nobody listens.
fn read(stdout: ChildStdout, mut hear: impl FnMut(Line) -> bool) {
    let mut reader = BufReader::new(stdout);
    loop {
        let mut bytes = Vec::new();
        match reader.by_ref().take(MAX_LINE).read_until(b'\n', &mut bytes) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        if let Ok(line) = serde_json::from_slice(&bytes)
            && !hear(line)
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
            within: Duration::from_millis(within_ms),
        }
    }

    /// Runs a shell script in the place of Node.
    fn cells_of(script: &str, features: &[Feature]) -> Vec<(String, Verdict)> {
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
        };
        let cells = run(&SDK, dir.path(), features, &address, dir.path());
        cells.into_iter().map(|c| (c.feature, c.verdict)).collect()
    }

    fn cells(list: &[(&str, Verdict)]) -> Vec<(String, Verdict)> {
        list.iter().map(|(f, v)| ((*f).to_owned(), *v)).collect()
    }

    const SAY: &str = r#"
        begin() { echo "{\"begin\": \"$1\"}"; }
        end() { echo "{\"end\": \"$1\", \"verdict\": \"$2\", \"why\": \"w\", \"seconds\": 0.1}"; }
    "#;

    #[test]
    fn verdicts_become_cells_and_other_lines_do_not() {
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
        assert_eq!(cells_of(&script, &features), cells(&want));
        let mut listed = features.clone();
        listed[2].absent.push(SDK.name());
        assert_eq!(cells_of(&script, &listed)[2].1, Verdict::Absent);
    }

    #[test]
    fn a_stuck_case_and_one_that_ends_its_process_cost_only_themselves() {
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
        assert_eq!(cells_of(&script, &features), cells(&want));
    }

    #[test]
    fn what_cannot_be_started_is_not_run() {
        let features = [feature("a", 9000), feature("b", 9000)];
        let want = [("a", Verdict::NotRun), ("b", Verdict::NotRun)];
        assert_eq!(cells_of("exit 3", &features), cells(&want));
    }
}
