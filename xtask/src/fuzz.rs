//! The tier `fuzz`: every fuzz target for a while, from the seeds that are kept.
//!
//! The targets are built here with the flags that `cargo fuzz` would give, and without a sanitizer, so that the
//! pinned stable compiler does: memory is only ever touched by copy in this project, and what is looked for
//! are panics, hangs and growth. A target that finds something leaves the input below `target/cube/log`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result};

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

/// Runs the tier.
pub(crate) fn run(workspace: &Workspace, progress: Progress) -> Result<Outcome> {
    let log = workspace.artifacts().join("log/fuzz.log");
    let findings = workspace.artifacts().join("log/fuzz");
    fs::create_dir_all(&findings)?;
    fs::write(&log, "")?;
    if tool::output(Command::new(COMPILER).arg("--version")).is_err() {
        archive::update(progress, &log)?;
        archive::install(&[COMPILER.to_owned()], progress, &log)?;
    }
    let seeds = seeds(workspace)?;
    let binaries = progress.stage("fuzz targets", || build(workspace, &log))?;
    let share = TIME / u32::try_from(seeds.len()).unwrap_or(1).max(1);
    let mut counts = Counts::default();
    for (name, seeds) in seeds {
        let mut target = target(&binaries.join(&name), &seeds, share);
        // Its inputs grow in a directory of their own; they are not kept.
        let corpus = tempfile::tempdir()?;
        target.arg(corpus.path()).arg(&seeds);
        target.arg(format!("-artifact_prefix={}/{name}-", findings.display()));
        match progress.stage(&format!("fuzz {name}"), || tool::run(&mut target, &log)) {
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

/// Names of the targets with their seeds: a target without a seed is not run.
fn seeds(workspace: &Workspace) -> Result<Vec<(String, PathBuf)>> {
    let dir = workspace.root().join("fuzz/seeds");
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
        .arg(workspace.root().join("fuzz/Cargo.toml"))
        .arg("--target-dir")
        .arg(&dir)
        .env("RUSTFLAGS", COVERAGE)
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    tool::run(&mut cargo, log)?;
    Ok(dir.join(TRIPLE).join("release"))
}

fn target(program: &Path, seeds: &Path, time: Duration) -> Command {
    let mut command = Command::new(program);
    command.args([
        format!("-max_total_time={}", time.as_secs().max(1)),
        format!("-timeout={HANG_SECONDS}"),
        format!("-rss_limit_mb={MEMORY_MB}"),
        "-print_final_stats=1".to_owned(),
    ]);
    command.current_dir(seeds);
    command
}
