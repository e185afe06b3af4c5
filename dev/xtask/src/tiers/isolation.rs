//! The tier `isolation`: runs the isolation prover, the confinement prover and the provers of restarts and of
//! lifecycles. Each of their cases counts as a test, and so does each restart and each episode.

use std::{path::Path, process::Command};

use anyhow::{Context, Result};
use serde::{Deserialize, de::IgnoredAny};

use crate::{
    tiers::{Counts, Outcome, TestEnvironment},
    workspace::Workspace,
};

/// A prover of `cube-bench verify`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Prover {
    /// Tries to get around the network isolation from inside sandboxes.
    Isolation,
    /// Tries to get out of a VMM's confinement, as code that has taken over the VMM.
    Confinement,
    /// Restarts a server under load. The long form is `cube-bench verify restarts` with larger numbers.
    Restarts,
    /// Compares responses to random operations with a model. The long form is `cube-bench verify lifecycle
    /// --minutes 60`.
    Lifecycle,
}

impl Prover {
    pub(crate) const ALL: [Self; 4] = [
        Self::Isolation,
        Self::Confinement,
        Self::Restarts,
        Self::Lifecycle,
    ];
    /// Provers that run for each change: more time would not improve their cases.
    pub(crate) const USUAL: [Self; 2] = [Self::Isolation, Self::Confinement];

    /// The name of the subcommand of `cube-bench verify`, which is also the name of its report without the extension.
    fn name(self) -> &'static str {
        match self {
            Self::Isolation => "isolation",
            Self::Confinement => "confinement",
            Self::Restarts => "restarts",
            Self::Lifecycle => "lifecycle",
        }
    }

    /// Options of its run in the tier. Restarts and lifecycles take a minute.
    fn options(self) -> &'static [&'static str] {
        match self {
            Self::Isolation | Self::Confinement => &[],
            Self::Restarts => &[
                "--sandboxes",
                "10",
                "--unplanned",
                "4",
                "--planned",
                "3",
                "--bare",
                "10",
            ],
            Self::Lifecycle => &["--minutes", "1"],
        }
    }

    /// The command `cube-bench verify` on the build outputs, with its reports in `results`.
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

    /// Reads the JSON report that a run wrote to `dir`.
    pub(crate) fn read(self, dir: &Path) -> Result<Proof> {
        let path = dir.join(self.name()).with_extension("json");
        let text =
            std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(serde_json::from_slice(&text)?)
    }

    /// Runs all cases of this prover.
    pub(crate) fn run(
        self,
        workspace: &Workspace,
        environment: &TestEnvironment,
    ) -> Result<Outcome> {
        let binaries = environment.binaries.as_deref();
        let binaries = binaries.context("the release binaries were not built")?;
        let results = workspace.artifacts().join("results").join(self.name());
        // Remove the report of an earlier run, which must not be counted if this run writes none.
        let _ = std::fs::remove_dir_all(&results);
        let done = self
            .command(workspace, binaries, &results)
            .args(self.options())
            .output()
            .context("cannot start cube-bench")?;
        // Standard output is reserved for the summary of all tiers.
        eprint!("{}", String::from_utf8_lossy(&done.stdout));
        eprint!("{}", String::from_utf8_lossy(&done.stderr));
        let counts = count(&self.read(&results)?);
        let name = format!("verify {}", self.name());
        Ok(Outcome::of(&name, done.status, counts))
    }
}

/// The fields of a prover's report that are used here.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Proof {
    pub(crate) cases: Vec<CaseResult>,
    /// Of `restarts` and `lifecycle`; `null` in other reports.
    pub(crate) figures: Option<Figures>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Figures {
    restarts: Vec<IgnoredAny>,
    episodes: u64,
}

#[derive(Debug, Deserialize)]
pub(crate) struct CaseResult {
    pub(crate) case: String,
    pub(crate) class: String,
    pub(crate) verdict: String,
}

/// Counts every verdict other than "pass" as failed, and each restart and episode as passed.
fn count(proof: &Proof) -> Counts {
    let played = |figures: &Figures| {
        u64::try_from(figures.restarts.len()).unwrap_or(u64::MAX) + figures.episodes
    };
    let mut counts = Counts {
        passed: proof.figures.as_ref().map_or(0, played),
        ..Counts::default()
    };
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
    fn every_verdict_other_than_pass_counts_as_failed() {
        let verdicts = ["pass", "breach", "unproven", "not_tried", "pass"];
        let cases = verdicts.map(|verdict| CaseResult {
            case: String::new(),
            class: String::new(),
            verdict: verdict.to_owned(),
        });
        let counts = count(&Proof {
            cases: cases.into_iter().collect(),
            ..Proof::default()
        });
        assert_eq!(counts.to_string(), "2 passed, 3 failed, 0 skipped");
    }

    #[test]
    fn restarts_count_as_passed_and_findings_as_failed() {
        let text = r#"{"cases":[{"class":"restarts","case":"a sandbox is lost","verdict":"fail"}],"figures":{"restarts":[{},{}]}}"#;
        let counts = count(&serde_json::from_str(text).unwrap());
        assert_eq!(counts.to_string(), "2 passed, 1 failed, 0 skipped");
        let text = r#"{"cases":[{"class":"lifecycle","case":"all answers fit the model","verdict":"pass"}],"figures":{"episodes":7}}"#;
        let counts = count(&serde_json::from_str(text).unwrap());
        assert_eq!(counts.to_string(), "8 passed, 0 failed, 0 skipped");
        let counts = count(&serde_json::from_str(r#"{"figures":null}"#).unwrap());
        assert_eq!(counts.to_string(), "0 passed, 0 failed, 0 skipped");
    }
}
