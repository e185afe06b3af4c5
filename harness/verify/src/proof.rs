//! The result of an attempt to break isolation or confinement, and a JUnit report of findings.

use serde::{Deserialize, Serialize};
use testbed::{
    exit::End,
    junit::{self, Case, Outcome},
};

/// Outcome of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CaseResult {
    /// The attempt was blocked, or a control case worked, and every observation confirms it.
    Pass,
    /// The attempt got through.
    Breach,
    /// The attempt was made, but an observation that would prove the outcome is missing or contradicts it.
    Unproven,
    /// The guest reports the expected outcome, and nothing observed the other end.
    GuestsWord,
    /// The attempt could not be made.
    NotTried,
}

impl CaseResult {
    /// Name in JSON and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Breach => "breach",
            Self::Unproven => "unproven",
            Self::GuestsWord => "guests_word",
            Self::NotTried => "not_tried",
        }
    }

    /// Name in the table on a terminal: in capitals unless the case passed.
    pub(crate) fn sign(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Breach => "BREACH",
            Self::Unproven => "UNPROVEN",
            Self::GuestsWord => "GUEST'S WORD ONLY",
            Self::NotTried => "NOT TRIED",
        }
    }

    /// In JUnit: a breach is a failure, and any other result but a pass is an error.
    pub(crate) fn outcome(self) -> Outcome {
        match self {
            Self::Pass => Outcome::Passed,
            Self::Breach => Outcome::Failed,
            Self::Unproven | Self::GuestsWord | Self::NotTried => Outcome::Error(self.name()),
        }
    }
}

/// [`End::Breach`] if any case is a breach, [`End::Pass`] if there are cases and all pass, else [`End::Inconclusive`].
pub(crate) fn end_of(results: impl Iterator<Item = CaseResult>) -> End {
    let results: Vec<CaseResult> = results.collect();
    if results.contains(&CaseResult::Breach) {
        End::Breach
    } else if !results.is_empty() && results.iter().all(|result| *result == CaseResult::Pass) {
        End::Pass
    } else {
        End::Inconclusive
    }
}

/// Renders a JUnit document of findings. Each finding is a failed case, named by its text before the first colon.
/// Without findings, the only case is `promise`, and it passes.
pub(crate) fn render_findings(suite: &str, promise: &str, findings: &[String]) -> String {
    let case = |name: &str, outcome, message: &str| Case {
        class: suite.to_owned(),
        name: name.to_owned(),
        seconds: None,
        outcome,
        message: message.to_owned(),
    };
    let mut cases: Vec<_> = findings
        .iter()
        .map(|finding| {
            let name = finding.split(':').next().unwrap_or_default();
            case(name, Outcome::Failed, finding)
        })
        .collect();
    if cases.is_empty() {
        cases.push(case(promise, Outcome::Passed, ""));
    }
    junit::render(&[(suite, cases)])
}
