//! `cube-bench verify clone-hazards`: what two sandboxes of one memory must not share, and what forks must.
//!
//! ```text
//! list ─► stage: two of one template · two forks of one parent · one that was paused ─► answers
//!                                                                       judge (pure) ◄──┘ ─► findings ─► report
//! ```
//! Everything is asked through E2B's public interface, so that any endpoint can be verified. What could not be
//! tried is no pass.

mod clock;
mod judge;
mod list;
pub mod report;
mod stage;
pub(crate) mod subject;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::conformance::{Programs, VerifyError, at, own_server};
use subject::Account;
use testbed::{
    endpoint::Endpoint,
    exit::End,
    leftovers::{self, RunDir},
    server::Tls,
};

/// Sandboxes of each template that the suite's own server keeps ready: clones come from the pool as well.
const WARM: u32 = 2;

/// What is verified.
#[derive(Clone, Debug)]
pub struct HazardSpec {
    /// For a server of the suite's own.
    pub programs: Programs,
    /// An endpoint that is there already; its key is E2B_API_KEY.
    pub target: Option<String>,
    /// Its data plane; `{id}` stands for the sandbox and `{port}` for the port. `None`: as the target.
    pub sandbox_url: Option<String>,
    /// Where the directory of a server of the suite's own is made.
    pub run_root: PathBuf,
    /// Template id or name.
    pub template: String,
    /// Whether sandboxes are asked, or broken first.
    pub mode: Mode,
}

/// Whether the suite looks for failures or makes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// It looks for them.
    Look,
    /// It makes each, to prove that it would be found: for the suite's own test.
    Sabotage,
}

/// Which sandboxes a finding is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Between {
    /// Two sandboxes of one template.
    Clones,
    /// Two forks of one running sandbox.
    Forks,
    /// One sandbox, before and after a pause.
    Pause,
}

impl Between {
    /// The name in JSON and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Clones => "clones",
            Self::Forks => "forks",
            Self::Pause => "pause",
        }
    }
}

/// What a case found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// As expected.
    Pass,
    /// The template has no such thing, as the list allows.
    Absent,
    /// The hazard is there, and documented as one that stays.
    Known,
    /// The hazard is there.
    Fail,
    /// No answer, or not from all of them.
    NotTried,
}

impl Verdict {
    /// The name in JSON and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Absent => "absent",
            Self::Known => "known",
            Self::Fail => "fail",
            Self::NotTried => "not_tried",
        }
    }
}

/// How much a failure weighs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Weight {
    /// Something is shared that must not be.
    Breach,
    /// A sandbox is not what it should be.
    Gate,
}

/// One case and what it found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// Name of the hazard.
    pub hazard: String,
    /// Which sandboxes.
    pub between: Between,
    /// Why it matters.
    pub why: String,
    /// What is expected of the answers.
    pub expected: String,
    /// See [`Verdict`].
    pub verdict: Verdict,
    /// See [`Weight`].
    pub weight: Weight,
    /// The answers, or why there are none; cut to a few lines.
    pub evidence: Vec<String>,
}

/// Everything that was found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Findings {
    /// [`report::FORMAT`].
    pub format: u32,
    /// The endpoint, or what server it was.
    pub endpoint: String,
    /// Template id or name.
    pub template: String,
    /// In the order in which they were tried.
    pub findings: Vec<Finding>,
}

impl Findings {
    /// A failure outweighs what could not be tried; both outweigh every pass.
    #[must_use]
    pub fn end(&self) -> End {
        let failed = |weight| {
            let mut findings = self.findings.iter();
            findings.any(|f| f.verdict == Verdict::Fail && f.weight == weight)
        };
        let tried = |finding: &Finding| finding.verdict != Verdict::NotTried;
        if failed(Weight::Breach) {
            End::Breach
        } else if failed(Weight::Gate) {
            End::GateFailed
        } else if self.findings.is_empty() || !self.findings.iter().all(tried) {
            End::Inconclusive
        } else {
            End::Pass
        }
    }
}

/// Runs the suite.
///
/// # Errors
/// See [`VerifyError`]; what a case finds is a finding, not an error.
pub fn run(spec: &HazardSpec) -> Result<Findings, VerifyError> {
    let hazards = list::load()?;
    let template = spec.template.clone();
    let (findings, endpoint) = match &spec.target {
        Some(url) => {
            let account = Account {
                api: Endpoint::parse(url)?,
                sandbox_url: spec.sandbox_url.clone(),
                key: std::env::var("E2B_API_KEY").map_err(|_| VerifyError::NoKey)?,
                template,
            };
            (stage::run(&account, &hazards, spec.mode)?, url.clone())
        }
        None => {
            leftovers::sweep(&spec.run_root).map_err(at(&spec.run_root))?;
            let dir = RunDir::create(&spec.run_root).map_err(at(&spec.run_root))?;
            let server = own_server(&spec.programs, dir.path(), Tls::Off, WARM)?;
            let account = Account {
                api: server.endpoint().clone(),
                sandbox_url: None,
                key: server.key().to_owned(),
                template,
            };
            let own = "cube-api of the suite's own".to_owned();
            (stage::run(&account, &hazards, spec.mode)?, own)
        }
    };
    Ok(Findings {
        format: report::FORMAT,
        endpoint,
        template: spec.template.clone(),
        findings,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(verdicts: &[(Verdict, Weight)]) -> Findings {
        let finding = |&(verdict, weight): &(Verdict, Weight)| Finding {
            hazard: "h".to_owned(),
            between: Between::Clones,
            why: "w".to_owned(),
            expected: "e".to_owned(),
            verdict,
            weight,
            evidence: Vec::new(),
        };
        Findings {
            format: report::FORMAT,
            endpoint: String::new(),
            template: String::new(),
            findings: verdicts.iter().map(finding).collect(),
        }
    }

    #[test]
    fn only_what_was_tried_and_held_passes() {
        use Verdict::{Absent, Fail, Known, NotTried, Pass};
        use Weight::{Breach, Gate};
        for (verdicts, end) in [
            (
                &[(Pass, Breach), (Absent, Gate), (Known, Breach)][..],
                End::Pass,
            ),
            (&[(Pass, Breach), (NotTried, Gate)], End::Inconclusive),
            (&[], End::Inconclusive),
            (&[(NotTried, Breach), (Fail, Gate)], End::GateFailed),
            (&[(Fail, Gate), (Fail, Breach)], End::Breach),
        ] {
            assert_eq!(findings(verdicts).end(), end, "{verdicts:?}");
        }
    }
}
