//! A JUnit report of findings.

use testbed::junit::{self, Case, Outcome};

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
