//! The test tiers, the test runner, and the summary that ends the output.
//!
//! A test's tier is the first part of its function's name: `kvm_…`, `net_…`, `interpreter_…`, `soak_…`;
//! all others are `unit`. Tests find what was prepared through CUBE_ARTIFACTS and CUBE_BIN.

use std::{
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::{tool, workspace::Workspace};

/// What a test needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Tier {
    /// No privileges.
    Unit,
    /// Root and network namespaces.
    Net,
    /// /dev/kvm and the prepared artifacts.
    Kvm,
    /// As kvm, and the template of the code interpreter.
    Interpreter,
    /// Root; a machine with SVM, which is emulated where this host is none.
    Hvm,
    /// A C++ compiler, and a minute.
    Fuzz,
    /// As kvm, and namespaces; what sandboxes can reach.
    Isolation,
    /// As kvm; the official SDKs against a real server.
    E2b,
    /// As kvm, and much time.
    Soak,
}

impl Tier {
    /// The tiers of `cargo xtask test`.
    pub(crate) const USUAL: [Self; 8] = [
        Self::Unit,
        Self::Net,
        Self::Kvm,
        Self::Interpreter,
        Self::Hvm,
        Self::Fuzz,
        Self::Isolation,
        Self::E2b,
    ];

    /// Whether its tests start virtual machines.
    pub(crate) fn needs_kvm(self) -> bool {
        match self {
            Self::Unit | Self::Net | Self::Hvm | Self::Fuzz => false,
            Self::Kvm | Self::Interpreter | Self::Isolation | Self::E2b | Self::Soak => true,
        }
    }

    /// Whether its tests are cargo's.
    pub(crate) fn is_cargos(self) -> bool {
        match self {
            Self::Unit | Self::Net | Self::Kvm | Self::Interpreter | Self::Soak => true,
            Self::Hvm | Self::Fuzz | Self::Isolation | Self::E2b => false,
        }
    }

    /// How the names of its tests begin; `None` for those that begin otherwise, or are none of the runner's.
    fn prefix(self) -> Option<&'static str> {
        match self {
            Self::Unit | Self::Hvm | Self::Fuzz | Self::Isolation | Self::E2b => None,
            Self::Net => Some("net_"),
            Self::Kvm => Some("kvm_"),
            Self::Interpreter => Some("interpreter_"),
            Self::Soak => Some("soak_"),
        }
    }
}

const NAMED: [Tier; 4] = [Tier::Net, Tier::Kvm, Tier::Interpreter, Tier::Soak];

/// Tests by how they ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            passed,
            failed,
            skipped,
        } = self;
        write!(f, "{passed} passed, {failed} failed, {skipped} skipped")
    }
}

/// Whether everything passed, and the counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) success: bool,
    pub(crate) counts: Counts,
}

impl Default for Outcome {
    /// Nothing ran, nothing failed.
    fn default() -> Self {
        Self {
            success: true,
            counts: Counts::default(),
        }
    }
}

impl Outcome {
    /// Both together.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            success: self.success && other.success,
            counts: Counts {
                passed: self.counts.passed + other.counts.passed,
                failed: self.counts.failed + other.counts.failed,
                skipped: self.counts.skipped + other.counts.skipped,
            },
        }
    }
}

/// What the tests of a tier are given.
#[derive(Debug)]
pub(crate) struct Surroundings {
    pub(crate) artifacts: PathBuf,
    /// Absent when no tier asked for needs the binaries.
    pub(crate) binaries: Option<PathBuf>,
}

/// Runs the tests of some tiers, with nextest if it is installed and with cargo's own runner otherwise.
pub(crate) fn run(
    workspace: &Workspace,
    tiers: &[Tier],
    surroundings: &Surroundings,
) -> Result<Outcome> {
    let runner = Runner::installed(workspace);
    let mut command = match runner {
        Runner::Nextest => nextest(workspace, tiers),
        Runner::CargoTest => cargo_test(workspace, tiers),
    };
    command.env("CUBE_ARTIFACTS", &surroundings.artifacts);
    if let Some(binaries) = &surroundings.binaries {
        command.env("CUBE_BIN", binaries);
    }
    watch(&mut command, runner, &mut std::io::stderr())
}

/// What runs the tests. Each ends with its own kind of summary; nextest shows the other's too, in the
/// output of failed tests.
#[derive(Debug, Clone, Copy)]
enum Runner {
    Nextest,
    CargoTest,
}

impl Runner {
    fn installed(workspace: &Workspace) -> Self {
        match tool::output(workspace.cargo().args(["nextest", "--version"])) {
            Ok(_) => Self::Nextest,
            Err(_) => Self::CargoTest,
        }
    }

    fn is_summary(self, line: &str) -> bool {
        match self {
            Self::Nextest => line.starts_with("Summary [") && line.contains("run:"),
            Self::CargoTest => line.starts_with("test result: "),
        }
    }
}

fn nextest(workspace: &Workspace, tiers: &[Tier]) -> Command {
    let mut command = workspace.cargo();
    command
        .args([
            "nextest",
            "run",
            "--workspace",
            "--no-fail-fast",
            "--color=never",
        ])
        .arg("--config-file")
        .arg(workspace.root().join("dev/xtask/nextest.toml"))
        .args(["--no-tests=warn", "-E", &filter(tiers)]);
    if tiers.contains(&Tier::Soak) {
        // Ignored, so that no other runner starts them by accident.
        command.args(["--profile", "soak", "--run-ignored=all"]);
    }
    command
}

/// The tests of these tiers in nextest's filter language.
fn filter(tiers: &[Tier]) -> String {
    let named = |prefix: &str| format!("test(/(^|::){prefix}/)");
    let mut terms: Vec<_> = tiers
        .iter()
        .filter_map(|tier| tier.prefix())
        .map(named)
        .collect();
    if tiers.contains(&Tier::Unit) {
        let others: Vec<_> = NAMED.iter().filter_map(|t| t.prefix()).map(named).collect();
        terms.push(format!("not ({})", others.join(" + ")));
    }
    terms.join(" + ")
}

/// cargo's own runner filters by parts of names: the tiers not asked for are skipped. Without the unit
/// tier its filter has to name the others.
fn cargo_test(workspace: &Workspace, tiers: &[Tier]) -> Command {
    let mut command = workspace.cargo();
    command.args([
        "test",
        "--workspace",
        "--no-fail-fast",
        "--color=never",
        "--",
    ]);
    // VMs share two cores and measured time: one test after another.
    command.arg("--test-threads=1");
    if tiers.contains(&Tier::Soak) {
        command.arg("--include-ignored");
    }
    for tier in NAMED {
        let Some(prefix) = tier.prefix() else {
            continue;
        };
        match (tiers.contains(&Tier::Unit), tiers.contains(&tier)) {
            (true, false) => command.args(["--skip", prefix]),
            (false, true) => command.arg(prefix),
            (true, true) | (false, false) => &mut command,
        };
    }
    command
}

/// Passes a runner's output on and reads its summaries.
fn watch(command: &mut Command, runner: Runner, terminal: &mut impl Write) -> Result<Outcome> {
    let (reader, writer) = std::io::pipe()?;
    command
        .stdin(Stdio::null())
        .stdout(writer.try_clone()?)
        .stderr(writer);
    let mut child = command.spawn().context("cannot start the test runner")?;
    // The writing ends live on in the command; without them the reader sees the end.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut counts = Counts::default();
    for line in BufReader::new(reader).split(b'\n') {
        let mut line = line?;
        if let Some(more) = summary(runner, &String::from_utf8_lossy(&line)) {
            counts.passed += more.passed;
            counts.failed += more.failed;
            counts.skipped += more.skipped;
        }
        line.push(b'\n');
        terminal.write_all(&line)?;
    }
    let success = child.wait()?.success();
    Ok(Outcome { success, counts })
}

/// The counts in a runner's summary line; `None` for other lines.
fn summary(runner: Runner, line: &str) -> Option<Counts> {
    let line = line.trim();
    if !runner.is_summary(line) {
        return None;
    }
    let before = |word: &str| {
        let words: Vec<_> = line
            .split([' ', ',', ';'])
            .filter(|w| !w.is_empty())
            .collect();
        let found = words.windows(2).find(|pair| pair[1] == word);
        found.and_then(|pair| pair[0].parse().ok()).unwrap_or(0_u64)
    };
    Some(Counts {
        passed: before("passed"),
        failed: before("failed") + before("timed") + before("exec"),
        skipped: before("skipped") + before("ignored") + before("filtered"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(passed: u64, failed: u64, skipped: u64) -> Option<Counts> {
        Some(Counts {
            passed,
            failed,
            skipped,
        })
    }

    #[test]
    fn summaries_of_both_runners_are_read() {
        let nextest = [
            (
                "  Summary [ 0.004s] 3 tests run: 3 passed, 1 skipped",
                counts(3, 0, 1),
            ),
            (
                "  Summary [ 1.0s] 7/9 tests run: 3 passed (1 slow), 2 failed, 1 timed out, 4 skipped",
                counts(3, 3, 4),
            ),
            (
                "test result: FAILED. 0 passed; 1 failed; 9 filtered out",
                None,
            ),
        ];
        for (line, want) in nextest {
            assert_eq!(summary(Runner::Nextest, line), want, "{line}");
        }
        let cargo = [
            (
                "test result: FAILED. 5 passed; 1 failed; 2 ignored; 0 measured; 3 filtered out",
                counts(5, 1, 5),
            ),
            ("test result is fine", None),
            ("test kvm_boot ... ok", None),
        ];
        for (line, want) in cargo {
            assert_eq!(summary(Runner::CargoTest, line), want, "{line}");
        }
    }

    #[test]
    fn a_filter_names_the_tiers() {
        assert_eq!(filter(&[Tier::Kvm]), "test(/(^|::)kvm_/)");
        assert_eq!(
            filter(&[Tier::Unit, Tier::Net]),
            "test(/(^|::)net_/) + not (test(/(^|::)net_/) + test(/(^|::)kvm_/) + \
             test(/(^|::)interpreter_/) + test(/(^|::)soak_/))"
        );
    }

    #[test]
    fn a_runner_is_watched_to_its_end() {
        let mut command = Command::new("sh");
        command.args([
            "-c",
            "echo 'test result: ok. 2 passed; 0 failed;' >&2; exit 1",
        ]);
        let outcome = watch(&mut command, Runner::CargoTest, &mut Vec::new()).unwrap();
        assert!(!outcome.success);
        assert_eq!(Some(outcome.counts), counts(2, 0, 0));
    }
}
