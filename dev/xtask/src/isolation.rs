//! The provers: the tier `isolation`, each case a test.

use std::{path::Path, process::Command};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::{
    tiers::{Counts, Outcome, Surroundings},
    workspace::Workspace,
};

/// One of the provers of `cube-bench`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Prover {
    /// Of the network.
    Isolation,
    /// Of what code that has taken a VMM over can do.
    Confinement,
}

impl Prover {
    /// As `cube-bench verify` calls it, and its reports.
    fn name(self) -> &'static str {
        match self {
            Self::Isolation => "isolation",
            Self::Confinement => "confinement",
        }
    }

    /// `cube-bench verify` on what was prepared, its reports in `results`.
    pub(crate) fn command(self, workspace: &Workspace, binaries: &Path, results: &Path) -> Command {
        let mut command = Command::new(binaries.join("cube-bench"));
        command
            .current_dir(workspace.root())
            .env("CUBE_ARTIFACTS", workspace.artifacts())
            .env("CUBE_BIN", binaries)
            .args(["verify", self.name(), "--results"])
            .arg(results);
        command
    }

    /// What a run left in `dir`.
    pub(crate) fn read(self, dir: &Path) -> Result<Proof> {
        let path = dir.join(self.name()).with_extension("json");
        let text = std::fs::read(&path).with_context(|| format!("no {}", path.display()))?;
        Ok(serde_json::from_slice(&text)?)
    }

    /// Runs its part of the tier.
    pub(crate) fn run(self, workspace: &Workspace, surroundings: &Surroundings) -> Result<Outcome> {
        let binaries = surroundings.binaries.as_deref();
        let binaries = binaries.context("the prover was not prepared")?;
        let results = workspace.artifacts().join("results").join(self.name());
        // What an earlier run left must not be counted for this one.
        let _ = std::fs::remove_dir_all(&results);
        let done = self
            .command(workspace, binaries, &results)
            .output()
            .context("cannot start cube-bench")?;
        // Standard output is for the summary of all tiers.
        eprint!("{}", String::from_utf8_lossy(&done.stdout));
        eprint!("{}", String::from_utf8_lossy(&done.stderr));
        Ok(Outcome {
            success: done.status.success(),
            counts: count(&self.read(&results)?),
        })
    }
}

/// What of a prover's JSON is counted.
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

/// All but a pass is a failure.
fn count(proof: &Proof) -> Counts {
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
