//! What each task does, from its preconditions to its last line.

use std::{
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::{Context, Result};

use crate::{
    host, prepare,
    prepare::Freshness,
    progress::Progress,
    tiers::{self, Outcome, Surroundings, Tier},
    tool,
    workspace::Workspace,
};

/// Prepares and runs one scenario; the exit code is cube-bench's own.
pub(crate) fn bench(
    workspace: &Workspace,
    scenario: &Path,
    arguments: &[String],
    progress: Progress,
) -> Result<ExitCode> {
    let scenario = absolute(workspace, scenario);
    let binaries = prepare::all(workspace, progress, Freshness::Keep)?;
    let status = Command::new(binaries.bench())
        .current_dir(workspace.root())
        .env("CUBE_ARTIFACTS", workspace.artifacts())
        .env("CUBE_BIN", &binaries.dir)
        .arg("run")
        .arg(&scenario)
        .args(arguments)
        .status()
        .context("cannot start cube-bench")?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    // Ended by a signal: as a shell says it for an interrupt.
    Ok(code.map_or(ExitCode::from(130), ExitCode::from))
}

/// As the person who typed it means it: from where they stand, or from the checkout's root.
fn absolute(workspace: &Workspace, path: &Path) -> PathBuf {
    if path.exists() {
        std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
    } else {
        workspace.root().join(path)
    }
}

/// Lints, then the tests of the tiers asked for; the last line on standard output is the summary.
pub(crate) fn test(workspace: &Workspace, tiers: &[Tier], progress: Progress) -> Result<ExitCode> {
    let surroundings = surroundings(workspace, tiers, progress)?;
    lint(workspace, progress)?;
    finish(&tiers::run(workspace, tiers, &surroundings)?, tiers)
}

/// The long tests.
pub(crate) fn soak(workspace: &Workspace, progress: Progress) -> Result<ExitCode> {
    let surroundings = surroundings(workspace, &[Tier::Soak], progress)?;
    let outcome = tiers::run(workspace, &[Tier::Soak], &surroundings)?;
    finish(&outcome, &[Tier::Soak])
}

/// Prepares what the tiers need and no more.
fn surroundings(workspace: &Workspace, tiers: &[Tier], progress: Progress) -> Result<Surroundings> {
    let artifacts = workspace.artifacts();
    let needs_machine = tiers.iter().any(|t| [Tier::Kvm, Tier::Soak].contains(t));
    if tiers.contains(&Tier::Net) {
        host::check_system()?;
    }
    let binaries = if needs_machine {
        Some(prepare::all(workspace, progress, Freshness::Keep)?.dir)
    } else {
        None
    };
    Ok(Surroundings {
        artifacts,
        binaries,
    })
}

fn lint(workspace: &Workspace, progress: Progress) -> Result<()> {
    let log = workspace.artifacts().join("log/lint.log");
    std::fs::create_dir_all(workspace.artifacts().join("log"))?;
    std::fs::write(&log, "")?;
    progress.stage("format", || {
        tool::run(workspace.cargo().args(["fmt", "--all", "--check"]), &log)
    })?;
    progress.stage("clippy", || {
        let mut clippy = workspace.cargo();
        clippy.args([
            "clippy",
            "--workspace",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ]);
        tool::run(&mut clippy, &log)
    })
}

fn finish(outcome: &Outcome, tiers: &[Tier]) -> Result<ExitCode> {
    for tier in Tier::USUAL.iter().filter(|tier| !tiers.contains(tier)) {
        eprintln!("tier {tier:?}: skipped, not asked for");
    }
    println!("{}", outcome.counts);
    let code = if outcome.success { 0 } else { 1 };
    Ok(ExitCode::from(code))
}
