//! The test tiers, and the runner of the tiers whose tests are cargo tests.
//!
//! The prefix of a test function's name is its tier: `kvm_…`, `net_…`, `image_…`, `interpreter_…`, `cluster_…`; a test
//! without one of these prefixes is `unit`, except `soak_…`, which [`soak`] runs. Tests find the build outputs
//! through the variables CUBE_ARTIFACTS and CUBE_BIN.

// Beside cargo's tests in the usual run.
pub(crate) mod dependencies;
pub(crate) mod fuzz;
pub(crate) mod hvm;
pub(crate) mod isolation;

// Against a real server, in the documents' words or with clients of others.
pub(crate) mod blocks;
pub(crate) mod conformance;
pub(crate) mod console;
pub(crate) mod integrations;
pub(crate) mod package;
pub(crate) mod smoke;

// Only by name: hours, and tests of the tests.
pub(crate) mod mutate;
pub(crate) mod mutate_confinement;
pub(crate) mod soak;

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Command, ExitStatus, Stdio},
};

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::{junit, progress::Progress, tool, workspace::Workspace};

/// Tests with the same requirements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Tier {
    /// Needs no privileges.
    Unit,
    /// Needs root and network namespaces.
    Net,
    /// Needs root, the kernel's EROFS, and the packages in `template/oci-image/tests/host-packages.txt`.
    Image,
    /// Needs /dev/kvm and the template `base`: starts real VMs.
    Kvm,
    /// Needs /dev/kvm and the template `code-interpreter-v1`.
    Interpreter,
    /// Needs /dev/kvm, network namespaces and the etcd that [`crate::stages::etcd`] fetches.
    Cluster,
    /// Needs root. Runs on this host if its KVM uses VMX or SVM, otherwise on an AMD machine emulated by QEMU.
    Hvm,
    /// Needs root. Runs the steps of `hvm` on Intel machines emulated by Bochs.
    HvmVmx,
    /// Needs a C++ compiler. Runs all fuzz targets for a minute in total.
    Fuzz,
    /// Needs /dev/kvm and network namespaces. Runs the provers of isolation, confinement, restarts and
    /// lifecycles.
    Isolation,
    /// Needs /dev/kvm. Runs the official SDKs against a real server.
    E2b,
    /// Needs /dev/kvm. Runs the smoke scenario, and compares the figures of the documents with the published runs.
    Bench,
    /// Needs /dev/kvm, Chromium, npm and the template `code-interpreter-v1`. Builds the console anew, compares it with `console/dist`, and uses it in a browser.
    Console,
    /// Needs /dev/kvm, mmdebstrap, systemd-nspawn and curl. Installs, upgrades and purges the
    /// package in a fresh Debian.
    Package,
    /// Needs /dev/kvm, PyPI and npm. Runs the programs of `examples/integrations`.
    Integrations,
}

impl std::fmt::Display for Tier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.to_possible_value() {
            Some(value) => f.write_str(value.get_name()),
            None => write!(f, "{self:?}"),
        }
    }
}

impl Tier {
    /// The tiers of [`Selection::Usual`].
    const USUAL: [Self; 6] = [
        Self::Unit,
        Self::Net,
        Self::Kvm,
        Self::Isolation,
        Self::E2b,
        Self::Bench,
    ];

    pub(crate) fn needs_kvm(self) -> bool {
        match self {
            Self::Unit | Self::Net | Self::Image | Self::Hvm | Self::HvmVmx | Self::Fuzz => false,
            Self::Kvm
            | Self::Interpreter
            | Self::Cluster
            | Self::Isolation
            | Self::E2b
            | Self::Bench
            | Self::Console
            | Self::Package
            | Self::Integrations => true,
        }
    }

    /// Whether the tests of this tier are cargo tests. The others have runners of their own.
    pub(crate) fn runs_under_cargo(self) -> bool {
        match self {
            Self::Unit
            | Self::Net
            | Self::Image
            | Self::Kvm
            | Self::Interpreter
            | Self::Cluster => true,
            Self::Hvm
            | Self::HvmVmx
            | Self::Fuzz
            | Self::Isolation
            | Self::E2b
            | Self::Bench
            | Self::Console
            | Self::Package
            | Self::Integrations => false,
        }
    }

    /// The prefix of the names of this tier's tests. `None` if the names have no prefix or are not cargo tests.
    fn prefix(self) -> Option<&'static str> {
        match self {
            Self::Unit
            | Self::Hvm
            | Self::HvmVmx
            | Self::Fuzz
            | Self::Isolation
            | Self::E2b
            | Self::Bench
            | Self::Console
            | Self::Package
            | Self::Integrations => None,
            Self::Net => Some("net_"),
            Self::Image => Some("image_"),
            Self::Kvm => Some("kvm_"),
            Self::Interpreter => Some("interpreter_"),
            Self::Cluster => Some("cluster_"),
        }
    }
}

/// The tests of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Selection {
    /// The tests that every change has to pass, in half an hour on two cores: [`Tier::USUAL`], with the tests in
    /// `usual-kvm.txt` of the tier `kvm`, two SDKs, and the two provers whose cases do not depend on time.
    Usual,
    /// Whole tiers.
    Tiers(Vec<Tier>),
    /// Every tier, whole.
    All,
}

impl Selection {
    pub(crate) fn of(tiers: Vec<Tier>, all: bool) -> Self {
        match (all, tiers.is_empty()) {
            (true, _) => Self::All,
            (false, true) => Self::Usual,
            (false, false) => Self::Tiers(tiers),
        }
    }

    pub(crate) fn tiers(&self) -> Vec<Tier> {
        match self {
            Self::Usual => Tier::USUAL.to_vec(),
            Self::Tiers(tiers) => tiers.clone(),
            Self::All => Tier::value_variants().to_vec(),
        }
    }

    /// Whether all tests of the selected tiers run.
    pub(crate) fn is_whole(&self) -> bool {
        *self != Self::Usual
    }

    /// The tests of the tier `kvm` that run; `None` for all.
    pub(crate) fn kvm_tests(&self) -> Option<Vec<&'static str>> {
        match self {
            Self::Usual => Some(usual_kvm_tests()),
            Self::Tiers(_) | Self::All => None,
        }
    }
}

/// The names in `usual-kvm.txt`.
pub(crate) fn usual_kvm_tests() -> Vec<&'static str> {
    let lines = include_str!("../usual-kvm.txt").lines();
    lines.filter(|line| line.starts_with("kvm_")).collect()
}

/// The tiers whose tests have a prefix. Tests with the prefix `soak_` are ignored by both runners; [`soak`] runs
/// them.
const PREFIXED: [Tier; 5] = [
    Tier::Net,
    Tier::Image,
    Tier::Kvm,
    Tier::Interpreter,
    Tier::Cluster,
];

/// Number of tests by result.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl Counts {
    /// Counts a test as skipped that a runner has counted as passed.
    fn skip_one(&mut self) {
        self.passed = self.passed.saturating_sub(1);
        self.skipped += 1;
    }
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) success: bool,
    pub(crate) counts: Counts,
}

impl Default for Outcome {
    /// The outcome of an empty run: success, with all counts zero.
    fn default() -> Self {
        Self {
            success: true,
            counts: Counts::default(),
        }
    }
}

impl Outcome {
    /// The outcome of a program. A program that fails without a failed test, for example because something could not be
    /// judged, counts as one: a summary without failures must not end in a failed run.
    pub(crate) fn of(name: &str, status: ExitStatus, mut counts: Counts) -> Self {
        let success = status.success();
        if !success && counts.failed == 0 {
            eprintln!("{name} failed without a failed test: {status}");
            counts.failed = 1;
        }
        Self { success, counts }
    }

    /// Combines two outcomes: success if both succeeded, and the sums of the counts.
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

/// Directories that tests find through environment variables.
#[derive(Debug)]
pub(crate) struct TestEnvironment {
    /// CUBE_ARTIFACTS.
    pub(crate) artifacts: PathBuf,
    /// CUBE_BIN. `None` if no tier of this run needs the release binaries.
    pub(crate) binaries: Option<PathBuf>,
    /// CUBE_LATER_VMMS. `None` without the tier `kvm`.
    pub(crate) later_vmms: Option<PathBuf>,
}

/// Runs the tests of these tiers with nextest, or with `cargo test` if nextest is not installed.
pub(crate) fn run(
    workspace: &Workspace,
    tiers: &[Tier],
    selection: &Selection,
    environment: &TestEnvironment,
) -> Result<Outcome> {
    let runner = Runner::installed(workspace);
    let commands = match runner {
        Runner::Nextest => vec![nextest(workspace, &filter(tiers, selection))],
        Runner::CargoTest => cargo_test(workspace, tiers, selection),
    };
    let report = workspace.target()?.join(junit::REPORT);
    let _none_from_this_run = fs::remove_file(&report);
    let mut outcome = Outcome::default();
    for mut command in commands {
        command.env("CUBE_ARTIFACTS", &environment.artifacts);
        if let Some(binaries) = &environment.binaries {
            command.env("CUBE_BIN", binaries);
        }
        if let Some(vmms) = &environment.later_vmms {
            command.env("CUBE_LATER_VMMS", vmms);
        }
        outcome = outcome.and(watch(&mut command, runner, &mut std::io::stderr())?);
    }
    // Without a test there may be no report.
    let report = fs::read_to_string(&report).unwrap_or_default();
    for (name, why) in junit::skipped(&report) {
        eprintln!("{name} is skipped: {why}");
        outcome.counts.skip_one();
    }
    Ok(outcome)
}

/// Builds the tests of all crates.
pub(crate) fn build(workspace: &Workspace, progress: Progress) -> Result<()> {
    let log = workspace.artifacts().join("log/tests.log");
    fs::write(&log, "")?;
    let words: &[&str] = match Runner::installed(workspace) {
        Runner::Nextest => &["nextest", "run"],
        Runner::CargoTest => &["test"],
    };
    let mut command = workspace.cargo();
    command.args(words).args(["--workspace", "--no-run"]);
    progress.stage("tests", || tool::run(&mut command, &log))
}

/// The test runner. The summary lines of the two runners differ, and only those of the runner in use are counted: under
/// nextest, the output of a failed test contains a summary line of libtest as well.
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

fn nextest(workspace: &Workspace, filter: &str) -> Command {
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
        .args(["--test-threads", &at_a_time().to_string()])
        .args(["--no-tests=warn", "-E", filter]);
    command
}

/// Tests with VMs leave half of the cores idle if as many run as there are cores: they wait for guests, timers and KVM.
fn at_a_time() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    cores + cores.div_ceil(2)
}

/// A nextest filter expression that selects the selected tests of these tiers.
fn filter(tiers: &[Tier], selection: &Selection) -> String {
    let named = |prefix: &str| format!("test(/(^|::){prefix}/)");
    let of_tier = |tier: &Tier| match (tier, selection.kvm_tests()) {
        (Tier::Kvm, Some(names)) => Some(format!("test(/(^|::)({})$/)", names.join("|"))),
        _ => tier.prefix().map(named),
    };
    let mut terms: Vec<_> = tiers.iter().filter_map(of_tier).collect();
    if tiers.contains(&Tier::Unit) {
        let others: Vec<_> = PREFIXED
            .iter()
            .filter_map(|t| t.prefix())
            .map(named)
            .collect();
        terms.push(format!("not ({})", others.join(" + ")));
    }
    terms.join(" + ")
}

/// `cargo test` selects tests by substrings of their names. With the unit tier, the prefixes of unwanted tiers are
/// skipped; without it, the prefixes of the wanted tiers are selected.
///
/// No choice of substrings selects both single tests of the tier `kvm` and the unit tests, so the single tests are a run of
/// their own.
fn cargo_test(workspace: &Workspace, tiers: &[Tier], selection: &Selection) -> Vec<Command> {
    let single = selection.kvm_tests().filter(|_| tiers.contains(&Tier::Kvm));
    let is_whole = |tier: &Tier| tiers.contains(tier) && !(*tier == Tier::Kvm && single.is_some());
    let mut command = libtest(workspace);
    for tier in PREFIXED {
        let Some(prefix) = tier.prefix() else {
            continue;
        };
        match (tiers.contains(&Tier::Unit), is_whole(&tier)) {
            (true, false) => command.args(["--skip", prefix]),
            (false, true) => command.arg(prefix),
            (true, true) | (false, false) => &mut command,
        };
    }
    let mut commands = vec![command];
    commands.extend(single.map(|names| {
        let mut command = libtest(workspace);
        command.args(names);
        command
    }));
    commands
}

/// `cargo test` up to the selection of tests.
fn libtest(workspace: &Workspace) -> Command {
    let mut command = workspace.cargo();
    command.args([
        "test",
        "--workspace",
        "--no-fail-fast",
        "--color=never",
        "--",
    ]);
    // Parallel VMs would distort the times that tests measure.
    command.arg("--test-threads=1");
    // Shows the tests that state why they cannot run.
    command.arg("--show-output");
    command
}

/// Copies a runner's output to `terminal`, adds up its summary lines, and lists the longest tests at the end.
fn watch(command: &mut Command, runner: Runner, terminal: &mut impl Write) -> Result<Outcome> {
    let (reader, writer) = std::io::pipe()?;
    command
        .stdin(Stdio::null())
        .stdout(writer.try_clone()?)
        .stderr(writer);
    let mut child = command.spawn().context("cannot start the test runner")?;
    // `command` still holds the write ends of the pipe: drop them, or the reader never sees end-of-file.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut counts = Counts::default();
    let mut unable = 0;
    let mut times = Vec::new();
    for line in BufReader::new(reader).split(b'\n') {
        let mut line = line?;
        let text = String::from_utf8_lossy(&line);
        if let Some(more) = summary(runner, &text) {
            counts.passed += more.passed;
            counts.failed += more.failed;
            counts.skipped += more.skipped;
        }
        if matches!(runner, Runner::CargoTest) && junit::reason(&text).is_some() {
            unable += 1;
        }
        times.extend(time_of_test(&text));
        line.push(b'\n');
        terminal.write_all(&line)?;
    }
    (0..unable).for_each(|_| counts.skip_one());
    times.sort_by(|a, b| b.0.total_cmp(&a.0));
    for (seconds, name) in times.iter().take(LONGEST) {
        writeln!(terminal, "{seconds:7.1} s {name}")?;
    }
    Ok(Outcome::of("the test runner", child.wait()?, counts))
}

/// How many of the longest tests are listed.
const LONGEST: usize = 25;

/// The seconds and the name of a test that passed, from a line of nextest; `None` for any other line.
fn time_of_test(line: &str) -> Option<(f64, String)> {
    let (seconds, rest) = line.trim().strip_prefix("PASS [")?.split_once("s] ")?;
    let (_, name) = rest.split_once(") ")?;
    Some((seconds.trim().parse().ok()?, name.to_owned()))
}

/// Parses a runner's summary line. Returns `None` for any other line.
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
mod tests;
