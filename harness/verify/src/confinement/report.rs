//! Renders the results for a terminal, for scripts and for CI systems. The functions are pure.

use std::fmt::Write;

use testbed::junit::{self, Case};

use super::spec::{CaseReport, Proof};
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
    let names = proof.cases.iter().map(|case| case.case.len());
    let width = names.max().unwrap_or(0);
    for case in &proof.cases {
        let (class, name, sign) = (case.class.name(), &case.case, case.result.sign());
        let line = format!("{class:<11} {name:<width$}  {sign:<9}  {}", case.inside);
        writeln!(out, "{}", line.trim_end())?;
    }
    for case in failing(proof) {
        writeln!(out, "\n{}: {}", case.case, case.result.name())?;
        writeln!(out, "  why it is tried  {}", case.why)?;
        writeln!(out, "  expected         {}", case.expected)?;
        writeln!(out, "  inside           {}", case.inside)?;
        writeln!(out, "  outside          {}", case.outside)?;
        writeln!(out, "  repeat           {}", repeat(case))?;
    }
    let count = |result| proof.cases.iter().filter(|c| c.result == result).count();
    writeln!(
        out,
        "\n{} cases in {:.0} s: {} held, {} breaches, {} unproven, {} not tried",
        proof.cases.len(),
        proof.seconds,
        count(CaseResult::Pass),
        count(CaseResult::Breach),
        count(CaseResult::Unproven),
        count(CaseResult::NotTried),
    )
}

fn failing(proof: &Proof) -> impl Iterator<Item = &CaseReport> {
    let cases = proof.cases.iter();
    cases.filter(|case| case.result != CaseResult::Pass)
}

fn repeat(case: &CaseReport) -> String {
    format!("cube-bench verify confinement --case {}", case.case)
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
        let (inside, outside) = (&case.inside, &case.outside);
        format!("{inside}; {outside}; run again: {}", repeat(case))
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
    junit::render(&[("confinement", cases)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::confinement::attempts::Class;
    use testbed::exit::End;

    fn proof(results: &[CaseResult]) -> Proof {
        let judged = |(n, result): (usize, &CaseResult)| CaseReport {
            case: format!("case-{n}"),
            class: Class::Files,
            why: "Keys are such files.".into(),
            result: *result,
            expected: "SIGSYS, EACCES or EPERM".into(),
            inside: match result {
                CaseResult::Pass => "openat: killed by SIGSYS".into(),
                CaseResult::Breach => "the attempt succeeded".into(),
                CaseResult::Unproven => "openat: ENOENT".into(),
                CaseResult::NotTried => "no <clone>".into(),
                CaseResult::GuestsWord => unreachable!("not a result of this suite"),
            },
            outside: match result {
                CaseResult::Breach => "the file is there".into(),
                _ => String::new(),
            },
        };
        Proof {
            format: FORMAT,
            cases: results.iter().enumerate().map(judged).collect(),
            seconds: 4.2,
        }
    }

    #[test]
    fn reports_name_each_attempt_and_the_command_that_repeats_it() {
        let all = [
            CaseResult::Pass,
            CaseResult::Breach,
            CaseResult::Unproven,
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
        assert_eq!(
            end(&[CaseResult::NotTried, CaseResult::Breach]),
            End::Breach
        );
    }
}
