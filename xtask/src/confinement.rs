//! The confinement prover: a part of the tier `isolation`, each case a test.

use std::{path::Path, process::Command};

use anyhow::{Context, Result};

use crate::{
    isolation::{self, Proof},
    tiers::{Outcome, Surroundings},
    workspace::Workspace,
};

const RESULT: &str = "confinement.json";

/// `cube-bench verify confinement` on what was prepared, its reports in `results`.
pub(crate) fn command(workspace: &Workspace, binaries: &Path, results: &Path) -> Command {
    let mut command = Command::new(binaries.join("cube-bench"));
    command
        .current_dir(workspace.root())
        .env("CUBE_ARTIFACTS", workspace.artifacts())
        .env("CUBE_BIN", binaries)
        .args(["verify", "confinement", "--results"])
        .arg(results);
    command
}

/// What a run left in `dir`.
pub(crate) fn read(dir: &Path) -> Result<Proof> {
    Proof::of_file(&dir.join(RESULT))
}

/// Runs it.
pub(crate) fn run(workspace: &Workspace, surroundings: &Surroundings) -> Result<Outcome> {
    let binaries = surroundings.binaries.as_deref();
    let binaries = binaries.context("the prover was not prepared")?;
    let results = workspace.artifacts().join("results/confinement");
    // What an earlier run left must not be counted for this one.
    let _ = std::fs::remove_dir_all(&results);
    let done = command(workspace, binaries, &results)
        .output()
        .context("cannot start cube-bench")?;
    // Standard output is for the summary of all tiers.
    eprint!("{}", String::from_utf8_lossy(&done.stdout));
    eprint!("{}", String::from_utf8_lossy(&done.stderr));
    Ok(Outcome {
        success: done.status.success(),
        counts: isolation::count(&read(&results)?),
    })
}
