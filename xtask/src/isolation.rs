//! The isolation prover: the tier `isolation`, each case a test.

use std::{path::Path, process::Command};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::{
    tiers::{Counts, Outcome, Surroundings},
    workspace::Workspace,
};

/// What of `isolation.json` is counted.
#[derive(Debug, Deserialize)]
pub(crate) struct Proof {
    pub(crate) cases: Vec<Judged>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Judged {
    pub(crate) case: String,
    pub(crate) class: String,
    pub(crate) verdict: String,
}

impl Proof {
    /// The one that a run left in `dir`.
    pub(crate) fn read(dir: &Path) -> Result<Self> {
        Self::of_file(&dir.join("isolation.json"))
    }

    /// The one in a file.
    pub(crate) fn of_file(path: &Path) -> Result<Self> {
        let text = std::fs::read(path).with_context(|| format!("no {}", path.display()))?;
        Ok(serde_json::from_slice(&text)?)
    }
}

/// `cube-bench verify isolation` on what was prepared, its reports in `results`.
pub(crate) fn command(workspace: &Workspace, binaries: &Path, results: &Path) -> Command {
    let mut command = Command::new(binaries.join("cube-bench"));
    command
        .current_dir(workspace.root())
        .env("CUBE_ARTIFACTS", workspace.artifacts())
        .env("CUBE_BIN", binaries)
        .args(["verify", "isolation", "--results"])
        .arg(results);
    command
}

/// Runs the tier.
pub(crate) fn run(workspace: &Workspace, surroundings: &Surroundings) -> Result<Outcome> {
    let binaries = surroundings.binaries.as_deref();
    let binaries = binaries.context("the prover was not prepared")?;
    let results = workspace.artifacts().join("results/isolation");
    // What an earlier run left must not be counted for this one.
    let _ = std::fs::remove_dir_all(&results);
    // Standard output is for the summary of all tiers.
    let done = command(workspace, binaries, &results)
        .output()
        .context("cannot start cube-bench")?;
    eprint!("{}", String::from_utf8_lossy(&done.stdout));
    eprint!("{}", String::from_utf8_lossy(&done.stderr));
    Ok(Outcome {
        success: done.status.success(),
        counts: count(&Proof::read(&results)?),
    })
}

/// All but a pass is a failure.
pub(crate) fn count(proof: &Proof) -> Counts {
    let mut counts = Counts::default();
    for case in &proof.cases {
        match case.verdict.as_str() {
            "pass" => counts.passed += 1,
            _ => counts.failed += 1,
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_but_a_pass_is_a_failure() {
        let verdicts = ["pass", "breach", "unproven", "not_tried", "pass"];
        let cases = verdicts.map(|verdict| Judged {
            case: String::new(),
            class: String::new(),
            verdict: verdict.to_owned(),
        });
        let counts = count(&Proof {
            cases: cases.into_iter().collect(),
        });
        assert_eq!(counts.to_string(), "2 passed, 3 failed, 0 skipped");
    }
}
