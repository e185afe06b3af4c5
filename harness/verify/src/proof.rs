//! The result of an attempt to break isolation or confinement, and a JUnit report of such results.

use std::fmt::Write;

use serde::{Deserialize, Serialize};
use testbed::{exit::End, xml::escape};

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

/// A case as JUnit shows it.
pub(crate) struct JunitCase<'a> {
    pub(crate) class: &'a str,
    pub(crate) name: &'a str,
    pub(crate) result: CaseResult,
    /// Shown unless the case passed.
    pub(crate) message: String,
}

/// Renders a JUnit document of findings. Each finding is a failed case, named by its text before the first colon.
/// Without findings, the only case is `promise`, and it passes.
pub(crate) fn render_findings(suite: &str, promise: &str, findings: &[String]) -> String {
    let case = |name, result, message| JunitCase {
        class: suite,
        name,
        result,
        message,
    };
    let mut cases: Vec<_> = findings
        .iter()
        .map(|finding| {
            let name = finding.split(':').next().unwrap_or_default();
            case(name, CaseResult::Breach, finding.clone())
        })
        .collect();
    if cases.is_empty() {
        cases.push(case(promise, CaseResult::Pass, String::new()));
    }
    render_junit(suite, &cases)
}

/// Renders a JUnit document: a breach is a failure, and any other outcome but a pass is an error.
pub(crate) fn render_junit(suite: &str, cases: &[JunitCase<'_>]) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write_junit(&mut out, suite, cases);
    out
}

fn write_junit(out: &mut String, suite: &str, cases: &[JunitCase<'_>]) -> std::fmt::Result {
    let count = |result| cases.iter().filter(|case| case.result == result).count();
    let (breaches, passes) = (count(CaseResult::Breach), count(CaseResult::Pass));
    writeln!(out, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>")?;
    writeln!(
        out,
        "<testsuites><testsuite name=\"{suite}\" tests=\"{}\" failures=\"{breaches}\" errors=\"{}\">",
        cases.len(),
        cases.len() - breaches - passes,
    )?;
    for case in cases {
        let (class, name) = (case.class, escape(case.name));
        write!(out, "  <testcase classname=\"{class}\" name=\"{name}\">")?;
        let message = escape(&case.message);
        match case.result {
            CaseResult::Pass => {}
            CaseResult::Breach => write!(out, "<failure message=\"{message}\"/>")?,
            CaseResult::Unproven | CaseResult::GuestsWord | CaseResult::NotTried => {
                let kind = case.result.name();
                write!(out, "<error type=\"{kind}\" message=\"{message}\"/>")?;
            }
        }
        writeln!(out, "</testcase>")?;
    }
    writeln!(out, "</testsuite></testsuites>")
}
