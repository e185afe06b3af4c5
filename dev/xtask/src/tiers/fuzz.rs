//! The tier `fuzz`, which runs every fuzz target for a few seconds from the committed seeds, and the task
//! `cargo xtask fuzz`, which runs them for minutes or hours.
//!
//! The targets are built with the compiler flags of `cargo fuzz`, but without a sanitizer, so that the pinned stable
//! compiler suffices. The targets look for panics, hangs and unbounded memory, which need no sanitizer. An input that
//! makes a target fail is kept in `target/cube/log/fuzz`.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result, ensure};

use crate::{
    progress::Progress,
    stages::archive,
    tiers::{Counts, Outcome},
    tool,
    workspace::Workspace,
};

/// Run time of the tier, divided among the targets.
const TIER_TIME: Duration = Duration::from_secs(60);
/// An input that takes longer counts as a hang.
const HANG_SECONDS: u32 = 10;
/// Memory limit of a target.
const MEMORY_MB: u32 = 1024;
/// Limit for the total size of the committed seeds, in bytes.
const SEEDS_MAX: u64 = 1 << 20;
/// The crate libfuzzer-sys compiles libFuzzer, which is C++.
const COMPILER: &str = "g++";
/// The coverage instrumentation that libFuzzer needs.
const COVERAGE: &str = "--cfg fuzzing -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares \
    -Cdebug-assertions=on -Coverflow-checks=on -Ccodegen-units=1";
/// Named explicitly, because Cargo applies RUSTFLAGS to build scripts as well if no target is given.
const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// Options of `cargo xtask fuzz`.
#[derive(Debug)]
pub(crate) struct LongRun {
    /// `None`: all targets.
    pub(crate) target: Option<String>,
    /// Run time of each target.
    pub(crate) minutes: u64,
    /// Whether inputs that reach new code are added to the seeds.
    pub(crate) keep: bool,
}

/// Runs the tier `fuzz`: each target for its share of [`TIER_TIME`].
pub(crate) fn run(workspace: &Workspace, progress: Progress) -> Result<Outcome> {
    let targets = prepare(workspace, progress)?;
    let share = TIER_TIME / u32::try_from(targets.len()).unwrap_or(1).max(1);
    let mut counts = Counts::default();
    for target in targets {
        // The corpus of this run is discarded.
        let corpus = tempfile::tempdir()?;
        match target.run(corpus.path(), share, progress) {
            Ok(()) => counts.passed += 1,
            Err(error) => {
                eprintln!("{error:#}");
                counts.failed += 1;
            }
        }
    }
    Ok(Outcome {
        success: counts.failed == 0,
        counts,
    })
}

/// Runs each selected target for `plan.minutes` on its corpus in `target/cube/fuzz`, which grows from run to run, and
/// adds a line per target to `dev/fuzz/HOURS.md`. If a target fails, the others still run.
///
/// # Errors
/// Returns an error if `plan.target` is not the name of a target, if a target fails, or if the seeds exceed their size
/// limit.
pub(crate) fn run_long(workspace: &Workspace, plan: &LongRun, progress: Progress) -> Result<()> {
    let mut targets = prepare(workspace, progress)?;
    if let Some(only) = &plan.target {
        targets.retain(|target| target.name == *only);
        ensure!(
            !targets.is_empty(),
            "no fuzz target is called {only}: dev/fuzz/Cargo.toml lists all of them"
        );
    }
    let time = Duration::from_secs(plan.minutes.saturating_mul(60));
    let mut failed = Vec::new();
    for target in &targets {
        let corpus = workspace.artifacts().join("fuzz").join(&target.name);
        fs::create_dir_all(&corpus)?;
        let outcome = target.run(&corpus, time, progress);
        let found = if outcome.is_ok() { "none" } else { "see log" };
        append_to_hours(workspace, target, plan.minutes, found)?;
        match outcome {
            Err(error) => failed.push(format!("{}: {error:#}", target.name)),
            Ok(()) if plan.keep => target.keep(&corpus, progress)?,
            Ok(()) => {}
        }
    }
    ensure!(failed.is_empty(), "{}", failed.join("\n"));
    let size = size_of(&workspace.root().join("dev/fuzz/seeds"))?;
    ensure!(
        size <= SEEDS_MAX,
        "the seeds in dev/fuzz/seeds have {size} bytes: the limit is {SEEDS_MAX}"
    );
    Ok(())
}

/// Appends a line to the table in `dev/fuzz/HOURS.md`.
fn append_to_hours(
    workspace: &Workspace,
    target: &Target,
    minutes: u64,
    found: &str,
) -> Result<()> {
    let path = workspace.root().join("dev/fuzz/HOURS.md");
    let commit = tool::output(
        Command::new("git")
            .current_dir(workspace.root())
            .args(["describe", "--always", "--dirty"]),
    )?;
    let day = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let day = day.split('T').next().unwrap_or_default();
    let executions = executions(&fs::read_to_string(&target.log).unwrap_or_default());
    let executions = executions.map_or("n/a".to_owned(), |number| number.to_string());
    let name = &target.name;
    let mut table = fs::OpenOptions::new()
        .append(true)
        .open(&path)
        .with_context(|| format!("cannot open {}", path.display()))?;
    let commit = commit.trim();
    writeln!(
        table,
        "| {day} | {commit} | {name} | {minutes} | {executions} | {found} |"
    )?;
    Ok(())
}

/// The number of inputs that a target executed, from the last statistics in its output.
fn executions(log: &str) -> Option<u64> {
    let mut lines = log.lines().rev();
    let number = lines.find_map(|line| line.strip_prefix("stat::number_of_executed_units:"))?;
    number.trim().parse().ok()
}

fn size_of(dir: &Path) -> Result<u64> {
    let mut size = 0;
    for entry in fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))? {
        let entry = entry?;
        let found = entry.metadata()?;
        size += if found.is_dir() {
            size_of(&entry.path())?
        } else {
            found.len()
        };
    }
    Ok(size)
}

/// A fuzz target whose program is built.
#[derive(Debug)]
struct Target {
    name: String,
    program: PathBuf,
    seeds: PathBuf,
    /// Directory for inputs that make the target fail.
    findings: PathBuf,
    log: PathBuf,
}

impl Target {
    fn run(&self, corpus: &Path, time: Duration, progress: Progress) -> Result<()> {
        fs::write(&self.log, "")?;
        let mut command = self.command(corpus);
        command.args([
            format!("-max_total_time={}", time.as_secs().max(1)),
            format!(
                "-artifact_prefix={}/{}-",
                self.findings.display(),
                self.name
            ),
            "-print_final_stats=1".to_owned(),
        ]);
        let stage = format!("fuzz {}", self.name);
        progress.stage(&stage, || tool::run(command.arg(&self.seeds), &self.log))
    }

    /// Adds an input of the corpus to the seeds if it reaches code that no seed reaches.
    fn keep(&self, corpus: &Path, progress: Progress) -> Result<()> {
        let mut command = self.command(&self.seeds);
        command.args(["-merge=1", "-use_counters=0"]).arg(corpus);
        let stage = format!("seeds {}", self.name);
        progress.stage(&stage, || tool::run(&mut command, &self.log))
    }

    fn command(&self, first: &Path) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args([
                format!("-timeout={HANG_SECONDS}"),
                format!("-rss_limit_mb={MEMORY_MB}"),
            ])
            .arg(first);
        command.current_dir(&self.seeds);
        command
    }
}

/// Builds all targets, and returns those that have a directory of seeds.
fn prepare(workspace: &Workspace, progress: Progress) -> Result<Vec<Target>> {
    let logs = workspace.artifacts().join("log");
    let findings = logs.join("fuzz");
    fs::create_dir_all(&findings)?;
    compiler(workspace, progress)?;
    let seeds = seeds(workspace)?;
    let binaries = build(workspace, workspace.cargo(), progress)?;
    let targets = seeds.into_iter().map(|(name, seeds)| Target {
        program: binaries.join(&name),
        log: logs.join(format!("fuzz-{name}.log")),
        findings: findings.clone(),
        name,
        seeds,
    });
    Ok(targets.collect())
}

/// Installs the C++ compiler if it is missing.
pub(crate) fn compiler(workspace: &Workspace, progress: Progress) -> Result<()> {
    if tool::output(Command::new(COMPILER).arg("--version")).is_err() {
        let log = log(workspace)?;
        archive::update(progress, &log)?;
        archive::install(&[COMPILER.to_owned()], progress, &log)?;
    }
    Ok(())
}

fn log(workspace: &Workspace) -> Result<PathBuf> {
    let logs = workspace.artifacts().join("log");
    fs::create_dir_all(&logs)?;
    let log = logs.join("fuzz.log");
    fs::write(&log, "")?;
    Ok(log)
}

/// The name and the seed directory of each target, sorted by name.
fn seeds(workspace: &Workspace) -> Result<Vec<(String, PathBuf)>> {
    let dir = workspace.root().join("dev/fuzz/seeds");
    let mut found = Vec::new();
    for entry in fs::read_dir(&dir).with_context(|| format!("cannot read {}", dir.display()))? {
        let entry = entry?;
        found.push((
            entry.file_name().to_string_lossy().into_owned(),
            entry.path(),
        ));
    }
    found.sort();
    Ok(found)
}

/// Builds all targets with this cargo, and returns the directory of the binaries.
pub(crate) fn build(
    workspace: &Workspace,
    mut cargo: Command,
    progress: Progress,
) -> Result<PathBuf> {
    let log = log(workspace)?;
    // A separate target directory: the flags differ from those of the main build, so the two can share nothing.
    let dir = workspace.target()?.join("fuzz");
    cargo
        .args([
            "build",
            "--release",
            "--locked",
            "--bins",
            "--target",
            TRIPLE,
        ])
        .arg("--manifest-path")
        .arg(workspace.root().join("dev/fuzz/Cargo.toml"))
        .arg("--target-dir")
        .arg(&dir)
        .env("RUSTFLAGS", COVERAGE)
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    progress.stage("fuzz targets", || tool::run(&mut cargo, &log))?;
    Ok(dir.join(TRIPLE).join("release"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_seeds_are_within_their_size_limit() {
        let workspace = Workspace::locate().unwrap();
        let size = size_of(&workspace.root().join("dev/fuzz/seeds")).unwrap();
        assert!(size <= SEEDS_MAX, "{size} bytes");
    }

    #[test]
    fn every_target_has_a_directory_of_seeds_and_vice_versa() {
        let workspace = Workspace::locate().unwrap();
        let manifest = fs::read_to_string(workspace.root().join("dev/fuzz/Cargo.toml")).unwrap();
        let manifest: toml::Value = toml::from_str(&manifest).unwrap();
        let bins = manifest["bin"].as_array().unwrap();
        let mut names: Vec<_> = bins
            .iter()
            .map(|bin| bin["name"].as_str().unwrap())
            .collect();
        names.sort_unstable();
        let seeds = seeds(&workspace).unwrap();
        let seeded: Vec<_> = seeds.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, seeded);
    }

    #[test]
    fn executions_are_read_from_the_statistics() {
        let log = "#1 INITED\nstat::number_of_executed_units: 12\nstat::peak_rss_mb: 3\n";
        assert_eq!(executions(log), Some(12));
        assert_eq!(executions("killed"), None);
    }
}
