//! Reports of a proof: for a terminal, scripts and CI systems. Pure functions.

use std::fmt::Write;

use super::{Judged, Proof, Verdict};
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
    let names = proof.cases.iter().map(|case| case.case.len());
    let width = names.max().unwrap_or(0);
    for case in &proof.cases {
        let sign = match case.verdict {
            Verdict::Pass => "pass",
            Verdict::Breach => "BREACH",
            Verdict::Unproven => "UNPROVEN",
            Verdict::NotTried => "NOT TRIED",
        };
        let (class, name) = (case.class.name(), &case.case);
        let line = format!("{class:<11} {name:<width$}  {sign:<9}  {}", case.inside);
        writeln!(out, "{}", line.trim_end())?;
    }
    for case in failing(proof) {
        writeln!(out, "\n{}: {}", case.case, case.verdict.name())?;
        writeln!(out, "  why it is tried  {}", case.why)?;
        writeln!(out, "  expected         {}", case.expected)?;
        writeln!(out, "  inside           {}", case.inside)?;
        writeln!(out, "  outside          {}", case.outside)?;
        writeln!(out, "  repeat           {}", repeat(case))?;
    }
    let count = |verdict| proof.cases.iter().filter(|c| c.verdict == verdict).count();
    writeln!(
        out,
        "\n{} cases in {:.0} s: {} held, {} breaches, {} unproven, {} not tried",
        proof.cases.len(),
        proof.seconds,
        count(Verdict::Pass),
        count(Verdict::Breach),
        count(Verdict::Unproven),
        count(Verdict::NotTried),
    )
}

fn failing(proof: &Proof) -> impl Iterator<Item = &Judged> {
    let cases = proof.cases.iter();
    cases.filter(|case| case.verdict != Verdict::Pass)
}

fn repeat(case: &Judged) -> String {
    format!("cube-bench verify confinement --case {}", case.case)
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
    let breaches = failing(proof)
        .filter(|c| c.verdict == Verdict::Breach)
        .count();
    let errors = failing(proof).count() - breaches;
    writeln!(out, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>")?;
    writeln!(
        out,
        "<testsuites><testsuite name=\"confinement\" tests=\"{}\" failures=\"{breaches}\" errors=\"{errors}\">",
        proof.cases.len(),
    )?;
    for case in &proof.cases {
        let (class, name) = (case.class.name(), escape(&case.case));
        write!(out, "  <testcase classname=\"{class}\" name=\"{name}\">")?;
        let said = [&case.inside, &case.outside].map(|text| escape(text));
        let why = format!(
            "{}; {}; run again: {}",
            said[0],
            said[1],
            escape(&repeat(case))
        );
        match case.verdict {
            Verdict::Pass => {}
            Verdict::Breach => write!(out, "<failure message=\"{why}\"/>")?,
            Verdict::Unproven | Verdict::NotTried => {
                let kind = case.verdict.name();
                write!(out, "<error type=\"{kind}\" message=\"{why}\"/>")?;
            }
        }
        writeln!(out, "</testcase>")?;
    }
    writeln!(out, "</testsuite></testsuites>")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::confinement::Class;
    use testbed::exit::End;

    fn proof(verdicts: &[Verdict]) -> Proof {
        let judged = |(n, verdict): (usize, &Verdict)| Judged {
            case: format!("case-{n}"),
            class: Class::Files,
            why: "Keys are such files.".into(),
            verdict: *verdict,
            expected: "SIGSYS, EACCES or EPERM".into(),
            inside: match verdict {
                Verdict::Pass => "openat: killed by SIGSYS".into(),
                Verdict::Breach => "it got what it wanted".into(),
                Verdict::Unproven => "openat: ENOENT".into(),
                Verdict::NotTried => "no <clone>".into(),
            },
            outside: match verdict {
                Verdict::Breach => "the file is there".into(),
                _ => String::new(),
            },
        };
        Proof {
            format: FORMAT,
            cases: verdicts.iter().enumerate().map(judged).collect(),
            seconds: 4.2,
        }
    }

    #[test]
    fn reports_name_what_was_tried_and_how_to_repeat_it() {
        let all = [
            Verdict::Pass,
            Verdict::Breach,
            Verdict::Unproven,
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
        assert_eq!(end(&[Verdict::NotTried, Verdict::Breach]), End::Breach);
    }
}
