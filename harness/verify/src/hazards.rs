//! `cube-bench verify clone-hazards`: what two sandboxes of one memory image must not share, and what forks must share.
//!
//! ```text
//! list ─► stage: two clones of a template · two forks of a parent · one paused sandbox ─► answers
//!                                                                    evaluate (pure) ◄──┘ ─► findings ─► report
//! ```
//! The suite uses only E2B's public interface, so it can verify any endpoint. A hazard that could not be tried is not a
//! pass.

mod clock;
mod evaluate;
mod list;
mod probe;
pub mod report;
mod stage;

use serde::{Deserialize, Serialize};
use testbed::{api::Api, endpoint::Endpoint, exit::End, server::LocalServer};

use crate::{
    sandbox::Account,
    setup::{DOMAIN, Setup, VerifyError, api_of, key_from_environment},
};

/// Sandboxes of each template that the suite's server keeps ready, so that some clones come from the warm pool.
const WARM: u32 = 2;
/// Lifetime of each sandbox, in seconds.
const LIFETIME_S: u32 = 900;

/// Options of the suite.
#[derive(Clone, Debug)]
pub struct HazardSpec {
    pub setup: Setup,
    /// URL of an endpoint that already runs; its key is `E2B_API_KEY`. `None`: the suite starts a server.
    pub target: Option<String>,
    /// Data plane of the target, with the placeholders `{id}` and `{port}`. `None`: the target's own address.
    pub sandbox_url: Option<String>,
    pub mode: Mode,
}

/// Whether the suite looks for hazards or causes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Look,
    /// Causes each hazard first, for the test that the suite would find it.
    Sabotage,
}

/// The sandboxes that a finding compares.
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
    /// Name in JSON and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Clones => "clones",
            Self::Forks => "forks",
            Self::Pause => "pause",
        }
    }
}

/// Result of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HazardResult {
    /// The hazard is not there.
    Pass,
    /// The template lacks what the hazard is about, which the list allows.
    Absent,
    /// The hazard is there, and is documented as one that remains.
    Known,
    /// The hazard is there.
    Fail,
    /// Not every sandbox gave an answer.
    NotTried,
}

impl HazardResult {
    /// Name in JSON and reports.
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

/// Severity of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Weight {
    /// The sandboxes share something that they must not share.
    Breach,
    /// A sandbox does not work as it should.
    Gate,
}

/// A case and its result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// Name of the hazard.
    pub hazard: String,
    pub between: Between,
    /// Why it matters.
    pub why: String,
    /// The relation that is expected between the answers.
    pub expected: String,
    #[serde(rename = "verdict")]
    pub result: HazardResult,
    pub weight: Weight,
    /// The answers, or why there are none; at most a few lines.
    pub evidence: Vec<String>,
}

/// Results of a run of the suite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Findings {
    /// Always [`report::FORMAT`].
    pub format: u32,
    /// URL of the endpoint, or a description of the server.
    pub endpoint: String,
    /// Template id or name.
    pub template: String,
    pub findings: Vec<Finding>,
}

impl Findings {
    /// A failure outweighs a case that was not tried, and both outweigh a pass.
    #[must_use]
    pub fn end(&self) -> End {
        let failed = |weight| {
            let mut findings = self.findings.iter();
            findings.any(|f| f.result == HazardResult::Fail && f.weight == weight)
        };
        let tried = |finding: &Finding| finding.result != HazardResult::NotTried;
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
/// Returns a [`VerifyError`] if the suite could not start. A hazard that is found is a finding, not an error.
pub fn run(spec: &HazardSpec) -> Result<Findings, VerifyError> {
    let hazards = list::load()?;
    let account = |api| Account {
        api,
        template: spec.setup.template.clone(),
        lifetime_s: LIFETIME_S,
    };
    let (findings, endpoint) = match &spec.target {
        Some(url) => {
            let account = account(Api {
                control: Endpoint::parse(url)?,
                sandbox_url: spec.sandbox_url.clone(),
                key: key_from_environment()?,
                timeout: probe::TIMEOUT,
            });
            (stage::run(&account, &hazards, spec.mode)?, url.clone())
        }
        None => {
            let dir = spec.setup.run_dir()?;
            let mut options = spec.setup.server(WARM)?;
            options.domain = Some(DOMAIN.to_owned());
            let server = LocalServer::start(dir.path(), options)?;
            let account = account(api_of(&server, probe::TIMEOUT));
            let own = "cube-api of the suite's own".to_owned();
            (stage::run(&account, &hazards, spec.mode)?, own)
        }
    };
    Ok(Findings {
        format: report::FORMAT,
        endpoint,
        template: spec.setup.template.clone(),
        findings,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(results: &[(HazardResult, Weight)]) -> Findings {
        let finding = |&(result, weight): &(HazardResult, Weight)| Finding {
            hazard: "h".to_owned(),
            between: Between::Clones,
            why: "w".to_owned(),
            expected: "e".to_owned(),
            result,
            weight,
            evidence: Vec::new(),
        };
        Findings {
            format: report::FORMAT,
            endpoint: String::new(),
            template: String::new(),
            findings: results.iter().map(finding).collect(),
        }
    }

    #[test]
    fn the_suite_passes_only_if_every_hazard_was_tried_and_none_found() {
        use HazardResult::{Absent, Fail, Known, NotTried, Pass};
        use Weight::{Breach, Gate};
        for (results, end) in [
            (
                &[(Pass, Breach), (Absent, Gate), (Known, Breach)][..],
                End::Pass,
            ),
            (&[(Pass, Breach), (NotTried, Gate)], End::Inconclusive),
            (&[], End::Inconclusive),
            (&[(NotTried, Breach), (Fail, Gate)], End::GateFailed),
            (&[(Fail, Gate), (Fail, Breach)], End::Breach),
        ] {
            assert_eq!(findings(results).end(), end, "{results:?}");
        }
    }
}
