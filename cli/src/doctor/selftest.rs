//! `cube doctor --selftest`: runs the installed `cube-bench` on this host, and writes one publishable file: facts
//! about the host, results of each step, and hashes of the programs. It contains no keys and no addresses, but does
//! contain paths of the installation.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use serde::Serialize;
use serde_json::{Map, Value};

use super::{Finding, host::beside, options::Options};
use crate::failure::Failure;

/// Version of the file.
const FORMAT: u32 = 1;
/// A step that takes longer is killed. The longest takes two minutes on two cores.
const LIMIT: &str = "600";
/// Written by the build next to the programs: commit, and SHA-256 of each program.
const BUILD_RECORD: &str = "build.json";
const SMOKE: &str = include_str!("../../../scenarios/00-smoke.toml");
const BURST: &str = include_str!("../../../scenarios/50-concurrent.toml");
/// The parts of a run's report to keep.
const REPORT: [&str; 14] = [
    "scenario",
    "ended",
    "exit_code",
    "n",
    "failures",
    "phases",
    "starts",
    "beside",
    "baseline",
    "cost",
    "memory",
    "gates",
    "interference",
    "host",
];

struct Step {
    name: &'static str,
    /// Arguments of `cube-bench`. `SCENARIO` and `OUT` are placeholders for paths.
    command: &'static [&'static str],
    scenario: &'static str,
    /// The report that the step writes, below `OUT`; `None`: its standard output.
    report: Option<&'static str>,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Check,
    /// A missed or inconclusive gate describes this host, and is not a fault.
    Measurement,
}

impl Kind {
    fn fails(self, exit_code: Option<i32>) -> bool {
        match (self, exit_code) {
            (_, Some(0)) | (Self::Measurement, Some(3 | 5)) => false,
            (Self::Check | Self::Measurement, _) => true,
        }
    }
}

const STEPS: [Step; 7] = [
    Step {
        name: "host",
        command: &["cube-bench", "doctor", "--format", "json"],
        scenario: "",
        report: None,
        kind: Kind::Check,
    },
    // Boots the guest as the first start of a server does, warms it up and takes a snapshot.
    Step {
        name: "boot",
        command: &["cube-api", "prepare", "--state", "OUT"],
        scenario: "",
        report: None,
        kind: Kind::Check,
    },
    // Boots nothing: the template was already booted and snapshotted on this host.
    Step {
        name: "clones",
        command: &["cube-bench", "run", "SCENARIO", "--results", "OUT"],
        scenario: SMOKE,
        report: Some("report.json"),
        kind: Kind::Check,
    },
    Step {
        name: "50-at-once",
        command: &[
            "cube-bench",
            "run",
            "SCENARIO",
            "--results",
            "OUT",
            "--set",
            "rounds=4",
            "--set",
            "warmup_rounds=1",
        ],
        scenario: BURST,
        report: Some("report.json"),
        kind: Kind::Measurement,
    },
    // Forks, pauses, resumes, snapshots, kills, compared with a model.
    Step {
        name: "lifecycle",
        command: &[
            "cube-bench",
            "verify",
            "lifecycle",
            "--minutes",
            "1",
            "--results",
            "OUT",
        ],
        scenario: "",
        report: Some("lifecycle.json"),
        kind: Kind::Check,
    },
    Step {
        name: "confinement",
        command: &["cube-bench", "verify", "confinement", "--results", "OUT"],
        scenario: "",
        report: Some("confinement.json"),
        kind: Kind::Check,
    },
    Step {
        name: "isolation",
        command: &["cube-bench", "verify", "isolation", "--results", "OUT"],
        scenario: "",
        report: Some("isolation.json"),
        kind: Kind::Check,
    },
];

#[derive(Debug, Serialize)]
struct Selftest {
    format: u32,
    kind: &'static str,
    version: &'static str,
    started_unix_s: u64,
    build: Value,
    checks: Vec<Finding>,
    steps: Vec<StepResult>,
}

#[derive(Debug, Serialize)]
struct StepResult {
    step: &'static str,
    verdict: &'static str,
    #[serde(skip)]
    is_failed: bool,
    /// `null`: ended by a signal.
    exit_code: Option<i32>,
    seconds: u64,
    /// `null`: the step wrote no report.
    report: Value,
}

/// Runs all steps and writes `file`.
///
/// # Errors
/// Returns a [`Failure`] if the file cannot be written, or after it is written if a step did not pass.
pub(super) fn run(options: &Options, checks: Vec<Finding>, file: &Path) -> Result<(), Failure> {
    let unusable = |what: &Path, why: std::io::Error| {
        Failure::host(format!("cannot write {}: {why}", what.display()))
    };
    // Checked first, because the steps take minutes.
    fs::write(file, "").map_err(|why| unusable(file, why))?;
    let scratch = std::env::temp_dir().join(format!("cube-selftest-{}", std::process::id()));
    fs::create_dir(&scratch).map_err(|why| unusable(&scratch, why))?;
    let artifacts = artifacts(options);
    let steps = STEPS.iter().map(|step| step.run(&artifacts, &scratch));
    let steps: Vec<_> = steps.collect();
    let document = Selftest {
        format: FORMAT,
        kind: "selftest",
        version: env!("CARGO_PKG_VERSION"),
        started_unix_s: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs()),
        build: read(&beside(BUILD_RECORD)),
        checks,
        steps,
    };
    // Serializing plain values does not fail.
    let text = serde_json::to_string_pretty(&document).unwrap_or_default();
    fs::write(file, text).map_err(|why| unusable(file, why))?;
    let failed: Vec<_> = document.steps.iter().filter(|s| s.is_failed).collect();
    if failed.is_empty() {
        let _ = fs::remove_dir_all(&scratch);
        eprintln!("no step failed: {}", file.display());
        return Ok(());
    }
    let names: Vec<_> = failed
        .iter()
        .map(|s| format!("{} ({})", s.step, s.verdict))
        .collect();
    Err(
        Failure::host(format!("these steps did not pass: {}", names.join(", "))).with_cure(
            format!(
                "their output is in {}; send it with {}",
                scratch.display(),
                file.display()
            ),
        ),
    )
}

/// The directory with `guest` and `templates`, of an installed server or of a build.
fn artifacts(options: &Options) -> PathBuf {
    let installed = options.state.join("installed");
    let built = beside("..");
    if built.join("templates/base").is_dir() {
        built
    } else {
        installed
    }
}

fn read(path: &Path) -> Value {
    let text = fs::read(path).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

impl Step {
    fn run(&self, artifacts: &Path, scratch: &Path) -> StepResult {
        eprint!("{} …", self.name);
        let begun = Instant::now();
        let out = scratch.join(self.name);
        let status = self
            .command(artifacts, scratch, &out)
            .and_then(|mut command| command.status());
        let exit_code = status.ok().and_then(|status| status.code());
        let report = match self.report {
            Some(name) => read(&out.join(name)),
            None => {
                // A template and the files that it was booted from, if any.
                let _ = fs::remove_dir_all(&out);
                read(&out.with_extension("json"))
            }
        };
        let result = StepResult {
            step: self.name,
            verdict: verdict(exit_code),
            is_failed: self.kind.fails(exit_code),
            exit_code,
            seconds: begun.elapsed().as_secs(),
            report: reduced(report),
        };
        eprintln!(" {} ({} s)", result.verdict, result.seconds);
        result
    }

    fn command(&self, artifacts: &Path, scratch: &Path, out: &Path) -> std::io::Result<Command> {
        let scenario = scratch.join(format!("{}.toml", self.name));
        fs::write(&scenario, self.scenario)?;
        let stdout = fs::File::create(out.with_extension("json"))?;
        let log = fs::File::create(out.with_extension("log"))?;
        let mut command = Command::new("timeout");
        command.arg(LIMIT);
        for (at, argument) in self.command.iter().enumerate() {
            match *argument {
                program if at == 0 => command.arg(beside(program)),
                "SCENARIO" => command.arg(&scenario),
                "OUT" => command.arg(out),
                word => command.arg(word),
            };
        }
        command
            .env("CUBE_ARTIFACTS", artifacts)
            .env("CUBE_BIN", beside(""))
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(log);
        Ok(command)
    }
}

/// The exit codes of `cube-bench`.
fn verdict(exit_code: Option<i32>) -> &'static str {
    match exit_code {
        Some(0) => "pass",
        Some(3) => "gate failed",
        Some(4) => "breach",
        Some(5) => "inconclusive",
        Some(6) => "unsuitable host",
        Some(124) => "too slow",
        Some(_) | None => "failed",
    }
}

/// A run's report without fields that need its directory; for a prover, the number of cases by class and verdict.
fn reduced(report: Value) -> Value {
    let Value::Object(mut report) = report else {
        return report;
    };
    if report.contains_key("scenario") {
        report.retain(|key, _| REPORT.contains(&key.as_str()));
    }
    if let Some(Value::Array(cases)) = report.remove("cases") {
        report.insert("cases".to_owned(), counted(&cases));
    }
    Value::Object(report)
}

fn counted(cases: &[Value]) -> Value {
    let mut classes: Map<String, Value> = Map::new();
    for case in cases {
        let word = |key: &str| case[key].as_str().unwrap_or("unknown");
        let class = classes
            .entry(word("class"))
            .or_insert_with(|| Map::new().into());
        let count = class[word("verdict")].as_u64().unwrap_or(0);
        class[word("verdict")] = (count + 1).into();
    }
    classes.into()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn cases_are_counted_by_class_and_verdict() {
        let case =
            |class: &str, verdict: &str| json!({"case": "a", "class": class, "verdict": verdict});
        let cases = [
            case("dns", "pass"),
            case("dns", "pass"),
            case("dns", "breach"),
            case("l7", "pass"),
        ];
        let report = reduced(json!({"format": 1, "cases": cases}));
        let wanted = json!({"dns": {"pass": 2, "breach": 1}, "l7": {"pass": 1}});
        assert_eq!(report, json!({"format": 1, "cases": wanted}));
    }

    #[test]
    fn only_the_comparable_parts_of_a_run_are_kept() {
        let report =
            reduced(json!({"scenario": "s", "n": 5, "reproduce": "cube-bench run /home/a/s.toml"}));
        assert_eq!(report, json!({"scenario": "s", "n": 5}));
    }

    #[test]
    fn a_boot_runs_the_server_program_in_a_directory_of_its_own() {
        let scratch = tempfile::tempdir().unwrap();
        let boot = STEPS.iter().find(|step| step.name == "boot").unwrap();
        let out = scratch.path().join("boot");
        let command = boot.command(Path::new("/a"), scratch.path(), &out).unwrap();
        let words: Vec<_> = command.get_args().map(PathBuf::from).collect();
        let program = beside("cube-api");
        let wanted = [
            Path::new(LIMIT),
            &program,
            "prepare".as_ref(),
            "--state".as_ref(),
            &out,
        ];
        assert_eq!(words, wanted);
    }

    #[test]
    fn only_exit_code_0_passes() {
        let passing = (0..=255).filter(|code| verdict(Some(*code)) == "pass");
        assert_eq!(passing.collect::<Vec<_>>(), [0]);
        assert_eq!(verdict(None), "failed");
        let fails = |kind: Kind| [0, 3, 4, 5, 6].map(|code| kind.fails(Some(code)));
        assert_eq!(fails(Kind::Check), [false, true, true, true, true]);
        assert_eq!(fails(Kind::Measurement), [false, false, true, false, true]);
    }
}
