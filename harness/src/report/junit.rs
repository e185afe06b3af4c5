//! The report as JUnit XML for CI systems, with one test case for each gate. A missed gate is a failure, whatever the
//! host; an inconclusive one is an error. Neither passes.

use testbed::junit::{self, Case, Outcome};

use super::View;
use crate::gate::{GateResult, Verdict};

#[must_use]
pub fn render(view: &View<'_>) -> String {
    let suite = &view.scenario.name;
    let case = |gate: &GateResult| Case {
        class: suite.clone(),
        name: gate.name.clone(),
        seconds: None,
        outcome: match gate.verdict {
            Verdict::Met => Outcome::Passed,
            Verdict::Missed => Outcome::Failed,
            Verdict::Inconclusive => Outcome::Error("inconclusive"),
            Verdict::OtherHost => Outcome::Skipped,
        },
        message: format!("{}; reproduce: {}", gate.reason, view.reproduce),
    };
    junit::render(&[(suite, view.gates.iter().map(case).collect())])
}
