//! The tier `fuzz`: every fuzz target for a while, from the seeds that are kept; and the task `fuzz`, for longer.
//!
//! The targets are built here with the flags that `cargo fuzz` would give, and without a sanitizer, so that the
//! pinned stable compiler does: memory is only ever touched by copy in this project, and what is looked for
//! are panics, hangs and growth. A target that finds something leaves the input below `target/cube/log`.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result, ensure};

use crate::{
    archive,
    progress::Progress,
    tiers::{Counts, Outcome},
    tool,
    workspace::Workspace,
};

/// All targets together.
const TIME: Duration = Duration::from_secs(60);
/// For any one input.
const HANG_SECONDS: u32 = 10;
/// Megabytes that a target may use.
const MEMORY_MB: u32 = 1024;
/// All seeds together, in bytes.
const SEEDS_MAX: u64 = 1 << 20;
/// libFuzzer is C++, and compiled by its crate.
const COMPILER: &str = "g++";
/// Coverage counters and comparisons for libFuzzer.
const COVERAGE: &str = "--cfg fuzzing -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares \
    -Cdebug-assertions=on -Coverflow-checks=on -Ccodegen-units=1";
/// Flags do not reach build scripts when a target is named.
const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// What a long run shall do.
#[derive(Debug)]
pub(crate) struct LongRun {
    /// One target instead of all.
    pub(crate) target: Option<String>,
    /// For each target.
    pub(crate) minutes: u64,
    /// Whether inputs that reach new code become seeds.
    pub(crate) keep: bool,
}

/// Runs the tier.
pub(crate) fn run(workspace: &Workspace, progress: Progress) -> Result<Outcome> {
    let targets = prepare(workspace, progress)?;
    let share = TIME / u32::try_from(targets.len()).unwrap_or(1).max(1);
    let mut counts = Counts::default();
    for target in targets {
        // Its inputs grow in a directory of their own; they are not kept.
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

/// Runs targets for minutes, on corpora that grow from run to run in `target/cube/fuzz`, and writes down how long. A
/// target that fails does not keep the others from running.
///
/// # Errors
/// There is no such target, or one has failed.
pub(crate) fn run_long(workspace: &Workspace, plan: &LongRun, progress: Progress) -> Result<()> {
    let mut targets = prepare(workspace, progress)?;
    if let Some(only) = &plan.target {
        targets.retain(|target| target.name == *only);
        ensure!(!targets.is_empty(), "there is no fuzz target {only}");
    }
    let time = Duration::from_secs(plan.minutes.saturating_mul(60));
    let mut failed = Vec::new();
    for target in &targets {
        let corpus = workspace.artifacts().join("fuzz").join(&target.name);
        fs::create_dir_all(&corpus)?;
        let outcome = target.run(&corpus, time, progress);
        let found = if outcome.is_ok() { "none" } else { "see log" };
        write_down(workspace, target, plan.minutes, found)?;
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
        "{size} bytes of seeds, more than {SEEDS_MAX}"
    );
    Ok(())
}

/// A line of the table of hours.
fn write_down(workspace: &Workspace, target: &Target, minutes: u64, found: &str) -> Result<()> {
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

/// How many inputs a target tried, by the last statistics in its output.
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

/// A target that is built.
#[derive(Debug)]
struct Target {
    name: String,
    program: PathBuf,
    seeds: PathBuf,
    /// Where it leaves inputs that fail.
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

    /// Adds those inputs of a corpus to the seeds that reach code which no seed reaches.
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

/// Builds all targets. One without a seed is none.
fn prepare(workspace: &Workspace, progress: Progress) -> Result<Vec<Target>> {
    let logs = workspace.artifacts().join("log");
    let findings = logs.join("fuzz");
    fs::create_dir_all(&findings)?;
    let log = logs.join("fuzz.log");
    fs::write(&log, "")?;
    if tool::output(Command::new(COMPILER).arg("--version")).is_err() {
        archive::update(progress, &log)?;
        archive::install(&[COMPILER.to_owned()], progress, &log)?;
    }
    let seeds = seeds(workspace)?;
    let binaries = progress.stage("fuzz targets", || build(workspace, &log))?;
    let targets = seeds.into_iter().map(|(name, seeds)| Target {
        program: binaries.join(&name),
        log: logs.join(format!("fuzz-{name}.log")),
        findings: findings.clone(),
        name,
        seeds,
    });
    Ok(targets.collect())
}

/// Names of the targets with their seeds: a target without a seed is not run.
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

/// Builds all targets; the directory of the binaries.
fn build(workspace: &Workspace, log: &Path) -> Result<PathBuf> {
    // Beside the other outputs: the flags differ, so nothing could be shared.
    let dir = workspace.target()?.join("fuzz");
    let mut cargo = workspace.cargo();
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
    tool::run(&mut cargo, log)?;
    Ok(dir.join(TRIPLE).join("release"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kept_seeds_are_small() {
        let workspace = Workspace::locate().unwrap();
        let size = size_of(&workspace.root().join("dev/fuzz/seeds")).unwrap();
        assert!(size <= SEEDS_MAX, "{size} bytes");
    }

    #[test]
    fn every_target_has_seeds_and_every_seed_a_target() {
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
    fn statistics_are_read() {
        let log = "#1 INITED\nstat::number_of_executed_units: 12\nstat::peak_rss_mb: 3\n";
        assert_eq!(executions(log), Some(12));
        assert_eq!(executions("killed"), None);
    }
}
