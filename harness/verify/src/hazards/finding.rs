//! Options and results of the clone hazard suite.

use serde::{Deserialize, Serialize};
use testbed::exit::End;

/// Whether the suite looks for hazards or causes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Look,
    /// Causes each hazard first, to test that the suite finds it.
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
    /// The hazard was not found.
    Pass,
    /// The template lacks the subject of the hazard, as the list allows.
    Absent,
    /// The hazard was found, and the list explains why it is accepted.
    Known,
    /// The hazard was found, and is for the template's author to judge.
    Warned,
    /// The hazard was found.
    Fail,
    /// Not every sandbox gave an output.
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
            Self::Warned => "warned",
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
    /// Why the hazard matters.
    pub why: String,
    /// Expected relation between the outputs.
    pub expected: String,
    #[serde(rename = "verdict")]
    pub result: HazardResult,
    pub weight: Weight,
    /// The outputs, or why there are none; at most a few lines.
    pub evidence: Vec<String>,
}

/// Results for one template.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OfTemplate {
    /// Template id or name.
    pub template: String,
    pub findings: Vec<Finding>,
}

/// Results of a run of the suite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Findings {
    /// Always [`super::report::FORMAT`].
    pub format: u32,
    /// URL of the endpoint, or a description of the server.
    pub endpoint: String,
    pub templates: Vec<OfTemplate>,
}

impl Findings {
    /// The findings of all templates.
    pub fn all(&self) -> impl Iterator<Item = &Finding> {
        self.templates.iter().flat_map(|of| &of.findings)
    }

    /// A failed case outweighs an untried case, and both outweigh a pass. A template without cases, and a run
    /// without templates, are inconclusive.
    #[must_use]
    pub fn end(&self) -> End {
        let failed = |weight| {
            let mut findings = self.all();
            findings.any(|f| f.result == HazardResult::Fail && f.weight == weight)
        };
        let is_tried = |finding: &Finding| finding.result != HazardResult::NotTried;
        let is_complete =
            |of: &OfTemplate| !of.findings.is_empty() && of.findings.iter().all(is_tried);
        if failed(Weight::Breach) {
            End::Breach
        } else if failed(Weight::Gate) {
            End::GateFailed
        } else if self.templates.is_empty() || !self.templates.iter().all(is_complete) {
            End::Inconclusive
        } else {
            End::Pass
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(results: &[(HazardResult, Weight)]) -> OfTemplate {
        let finding = |&(result, weight): &(HazardResult, Weight)| Finding {
            hazard: "h".to_owned(),
            between: Between::Clones,
            why: "w".to_owned(),
            expected: "e".to_owned(),
            result,
            weight,
            evidence: Vec::new(),
        };
        OfTemplate {
            template: String::new(),
            findings: results.iter().map(finding).collect(),
        }
    }

    fn end(templates: Vec<OfTemplate>) -> End {
        let findings = Findings {
            format: 2,
            endpoint: String::new(),
            templates,
        };
        findings.end()
    }

    #[test]
    fn the_suite_passes_only_if_every_hazard_was_tried_and_none_found() {
        use HazardResult::{Absent, Fail, Known, NotTried, Pass, Warned};
        use Weight::{Breach, Gate};
        for (results, end_of_run) in [
            (
                &[
                    (Pass, Breach),
                    (Absent, Gate),
                    (Known, Breach),
                    (Warned, Breach),
                ][..],
                End::Pass,
            ),
            (&[(Pass, Breach), (NotTried, Gate)], End::Inconclusive),
            (&[], End::Inconclusive),
            (&[(NotTried, Breach), (Fail, Gate)], End::GateFailed),
            (&[(Fail, Gate), (Fail, Breach)], End::Breach),
        ] {
            assert_eq!(end(vec![of(results)]), end_of_run, "{results:?}");
        }
        assert_eq!(end(vec![]), End::Inconclusive);
        let both = vec![of(&[(Pass, Breach)]), of(&[])];
        assert_eq!(end(both), End::Inconclusive);
        let both = vec![of(&[(Pass, Breach)]), of(&[(Fail, Breach)])];
        assert_eq!(end(both), End::Breach);
    }
}
