//! Renders the results for a terminal, for scripts and for CI systems. The functions are pure.

use std::fmt::Write;

use testbed::junit::{self, Case};

use super::{evaluate::CaseReport, spec::Proof};
use crate::proof::CaseResult;

/// Format number of the JSON document.
pub const FORMAT: u32 = 1;

/// For a terminal: a line for each case, then details of those that did not pass.
#[must_use]
pub fn terminal(proof: &Proof) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write_terminal(&mut out, proof);
    out
}

fn write_terminal(out: &mut String, proof: &Proof) -> std::fmt::Result {
    let width = proof
        .cases
        .iter()
        .map(|case| case.case.len())
        .max()
        .unwrap_or(0);
    for case in &proof.cases {
        writeln!(
            out,
            "{:<9} {:<width$}  {}",
            case.class.name(),
            case.case,
            case.result.sign()
        )?;
    }
    for case in proof
        .cases
        .iter()
        .filter(|case| case.result != CaseResult::Pass)
    {
        let [outside, host, neighbour] = case.arrived;
        writeln!(
            out,
            "\n{}: {}: {}",
            case.case,
            case.result.name(),
            case.problems.join("; ")
        )?;
        writeln!(out, "  why it is tried  {}", case.why)?;
        writeln!(out, "  tried            {}", case.tried)?;
        writeln!(out, "  the guest saw    {}", case.guest)?;
        writeln!(
            out,
            "  arrived          {outside} outside, {host} at the host, {neighbour} at the neighbour"
        )?;
        writeln!(out, "  repeat           {}", repeat(proof, case))?;
    }
    let count = |result| {
        proof
            .cases
            .iter()
            .filter(|case| case.result == result)
            .count()
    };
    writeln!(
        out,
        "\n{} cases in {:.0} s: {} as expected, {} breaches, {} unproven, {} the guest's word only, {} not tried",
        proof.cases.len(),
        proof.seconds,
        count(CaseResult::Pass),
        count(CaseResult::Breach),
        count(CaseResult::Unproven),
        count(CaseResult::GuestsWord),
        count(CaseResult::NotTried),
    )
}

fn repeat(proof: &Proof, case: &CaseReport) -> String {
    let target = proof.target.as_ref();
    let target = target.map_or_else(String::new, |url| format!(" --target {url}"));
    format!("cube-bench verify isolation{target} --case {}", case.case)
}

/// For scripts: one JSON document.
#[must_use]
pub fn json(proof: &Proof) -> String {
    // Serialization cannot fail: every field is a plain value.
    let mut text = serde_json::to_string_pretty(proof).unwrap_or_default();
    text.push('\n');
    text
}

/// For CI systems: one JUnit test case for each case.
#[must_use]
pub fn junit(proof: &Proof) -> String {
    let message = |case: &CaseReport| {
        let problems = case.problems.join("; ");
        format!("{problems}; run again: {}", repeat(proof, case))
    };
    let cases: Vec<_> = proof
        .cases
        .iter()
        .map(|case| Case {
            class: case.class.name().to_owned(),
            name: case.case.clone(),
            seconds: None,
            outcome: case.result.outcome(),
            message: message(case),
        })
        .collect();
    junit::render(&[(proof.scope.name(), cases)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isolation::{cases::Class, spec::Scope};
    use testbed::exit::End;

    fn proof(results: &[CaseResult]) -> Proof {
        let judged = |(n, result): (usize, &CaseResult)| CaseReport {
            case: format!("case-{n}"),
            class: Class::Host,
            why: "a host has services".into(),
            result: *result,
            tried: "Tcp(192.0.2.2:5000)".into(),
            guest: "timeout: no answer".into(),
            arrived: [u64::from(*result == CaseResult::Breach), 0, 0],
            problems: match result {
                CaseResult::Pass => Vec::new(),
                CaseResult::Breach => vec!["1 packets arrived outside".into()],
                CaseResult::Unproven => vec!["no event with the reason \"host\"".into()],
                CaseResult::GuestsWord => vec!["only the guest's end was observed".into()],
                CaseResult::NotTried => vec!["no <device>".into()],
            },
        };
        Proof {
            format: FORMAT,
            scope: Scope::Isolation,
            target: None,
            cases: results.iter().enumerate().map(judged).collect(),
            seconds: 61.4,
        }
    }

    #[test]
    fn reports_name_each_attempt_and_the_command_that_repeats_it() {
        let all = [
            CaseResult::Pass,
            CaseResult::Breach,
            CaseResult::Unproven,
            CaseResult::GuestsWord,
            CaseResult::NotTried,
        ];
        insta::assert_snapshot!("terminal", terminal(&proof(&all)));
        insta::assert_snapshot!("junit", junit(&proof(&all)));
        let read: Proof = serde_json::from_str(&json(&proof(&all))).unwrap();
        assert_eq!(read, proof(&all));
    }

    #[test]
    fn a_breach_outweighs_other_results_and_an_empty_run_does_not_pass() {
        let end = |results: &[CaseResult]| proof(results).end();
        assert_eq!(end(&[CaseResult::Pass]), End::Pass);
        assert_eq!(end(&[]), End::Inconclusive);
        assert_eq!(
            end(&[CaseResult::Pass, CaseResult::Unproven]),
            End::Inconclusive
        );
        assert_eq!(end(&[CaseResult::NotTried]), End::Inconclusive);
        assert_eq!(
            end(&[CaseResult::Pass, CaseResult::GuestsWord]),
            End::Inconclusive
        );
        assert_eq!(
            end(&[CaseResult::NotTried, CaseResult::Breach]),
            End::Breach
        );
    }
}
