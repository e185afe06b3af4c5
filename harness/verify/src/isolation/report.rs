//! Reports of a proof: for a terminal, scripts and CI systems. Pure functions.

use std::fmt::Write;

use super::{
    Proof,
    judge::{Judged, Verdict},
};
use testbed::xml::escape;

/// Format of the JSON document.
pub const FORMAT: u32 = 1;

/// For a terminal.
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
        let sign = match case.verdict {
            Verdict::Pass => "pass",
            Verdict::Breach => "BREACH",
            Verdict::Unproven => "UNPROVEN",
            Verdict::GuestsWord => "GUEST'S WORD ONLY",
            Verdict::NotTried => "NOT TRIED",
        };
        writeln!(
            out,
            "{:<9} {:<width$}  {}",
            case.class.name(),
            case.case,
            sign
        )?;
    }
    for case in proof
        .cases
        .iter()
        .filter(|case| case.verdict != Verdict::Pass)
    {
        let [outside, host, neighbour] = case.arrived;
        writeln!(
            out,
            "\n{}: {}: {}",
            case.case,
            case.verdict.name(),
            case.wrong.join("; ")
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
    let count = |verdict| {
        proof
            .cases
            .iter()
            .filter(|case| case.verdict == verdict)
            .count()
    };
    writeln!(
        out,
        "\n{} cases in {:.0} s: {} as expected, {} breaches, {} unproven, {} the guest's word only, {} not tried",
        proof.cases.len(),
        proof.seconds,
        count(Verdict::Pass),
        count(Verdict::Breach),
        count(Verdict::Unproven),
        count(Verdict::GuestsWord),
        count(Verdict::NotTried),
    )
}

fn repeat(proof: &Proof, case: &Judged) -> String {
    let target = proof.target.as_ref();
    let target = target.map_or_else(String::new, |url| format!(" --target {url}"));
    format!("cube-bench verify isolation{target} --case {}", case.case)
}

/// One JSON document.
#[must_use]
pub fn json(proof: &Proof) -> String {
    // Every field is a plain value, so that this cannot fail.
    let mut text = serde_json::to_string_pretty(proof).unwrap_or_default();
    text.push('\n');
    text
}

/// One test case for each case.
#[must_use]
pub fn junit(proof: &Proof) -> String {
    let mut out = String::new();
    let _ = write_junit(&mut out, proof);
    out
}

fn write_junit(out: &mut String, proof: &Proof) -> std::fmt::Result {
    let breaches = proof
        .cases
        .iter()
        .filter(|case| case.verdict == Verdict::Breach)
        .count();
    let passes = proof
        .cases
        .iter()
        .filter(|case| case.verdict == Verdict::Pass)
        .count();
    writeln!(out, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>")?;
    writeln!(
        out,
        "<testsuites><testsuite name=\"{}\" tests=\"{}\" failures=\"{breaches}\" errors=\"{}\">",
        proof.scope.name(),
        proof.cases.len(),
        proof.cases.len() - breaches - passes,
    )?;
    for case in &proof.cases {
        let (class, name) = (case.class.name(), escape(&case.case));
        write!(out, "  <testcase classname=\"{class}\" name=\"{name}\">")?;
        let why = escape(&format!(
            "{}; run again: {}",
            case.wrong.join("; "),
            repeat(proof, case)
        ));
        match case.verdict {
            Verdict::Pass => {}
            Verdict::Breach => write!(out, "<failure message=\"{why}\"/>")?,
            Verdict::Unproven | Verdict::GuestsWord | Verdict::NotTried => {
                write!(
                    out,
                    "<error type=\"{}\" message=\"{why}\"/>",
                    case.verdict.name()
                )?;
            }
        }
        writeln!(out, "</testcase>")?;
    }
    writeln!(out, "</testsuite></testsuites>")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isolation::{Scope, cases::Class};
    use testbed::exit::End;

    fn proof(verdicts: &[Verdict]) -> Proof {
        let judged = |(n, verdict): (usize, &Verdict)| Judged {
            case: format!("case-{n}"),
            class: Class::Host,
            why: "a host has services".into(),
            verdict: *verdict,
            tried: "Tcp(192.0.2.2:5000)".into(),
            guest: "timeout: no answer".into(),
            arrived: [u64::from(*verdict == Verdict::Breach), 0, 0],
            wrong: match verdict {
                Verdict::Pass => Vec::new(),
                Verdict::Breach => vec!["1 packets arrived outside".into()],
                Verdict::Unproven => vec!["no event with the reason \"host\"".into()],
                Verdict::GuestsWord => vec!["nobody looked at the other end".into()],
                Verdict::NotTried => vec!["no <card>".into()],
            },
        };
        Proof {
            format: FORMAT,
            scope: Scope::Isolation,
            target: None,
            cases: verdicts.iter().enumerate().map(judged).collect(),
            seconds: 61.4,
        }
    }

    #[test]
    fn reports_name_what_was_tried_and_how_to_repeat_it() {
        let all = [
            Verdict::Pass,
            Verdict::Breach,
            Verdict::Unproven,
            Verdict::GuestsWord,
            Verdict::NotTried,
        ];
        insta::assert_snapshot!("terminal", terminal(&proof(&all)));
        insta::assert_snapshot!("junit", junit(&proof(&all)));
        let read: Proof = serde_json::from_str(&json(&proof(&all))).unwrap();
        assert_eq!(read, proof(&all));
    }

    #[test]
    fn a_breach_is_worse_than_a_doubt_and_nothing_is_no_pass() {
        let end = |verdicts: &[Verdict]| proof(verdicts).end();
        assert_eq!(end(&[Verdict::Pass]), End::Pass);
        assert_eq!(end(&[]), End::Inconclusive);
        assert_eq!(end(&[Verdict::Pass, Verdict::Unproven]), End::Inconclusive);
        assert_eq!(end(&[Verdict::NotTried]), End::Inconclusive);
        assert_eq!(
            end(&[Verdict::Pass, Verdict::GuestsWord]),
            End::Inconclusive
        );
        assert_eq!(end(&[Verdict::NotTried, Verdict::Breach]), End::Breach);
    }
}
