//! Reports of findings: for a terminal, scripts and CI systems. Pure functions.

use std::fmt::Write;

use super::{Finding, Findings, Verdict};
use testbed::xml::escape;

/// Format of the JSON document.
pub const FORMAT: u32 = 1;

fn count(findings: &Findings, verdict: Verdict) -> usize {
    let all = findings.findings.iter();
    all.filter(|finding| finding.verdict == verdict).count()
}

fn sign(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Pass => "pass",
        Verdict::Absent => "absent",
        Verdict::Known => "known",
        Verdict::Fail => "FAIL",
        Verdict::NotTried => "NOT TRIED",
    }
}

/// For a terminal: a line for each, and everything about those that do not pass.
#[must_use]
pub fn terminal(findings: &Findings) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write_terminal(&mut out, findings);
    out
}

fn write_terminal(out: &mut String, findings: &Findings) -> std::fmt::Result {
    for finding in &findings.findings {
        let Finding {
            hazard, between, ..
        } = finding;
        let (between, sign) = (between.name(), sign(finding.verdict));
        writeln!(out, "{hazard:<28}{between:<8}{sign}")?;
    }
    let plain = |finding: &&Finding| matches!(finding.verdict, Verdict::Pass | Verdict::Absent);
    for finding in findings.findings.iter().filter(|f| !plain(f)) {
        let (hazard, between) = (&finding.hazard, finding.between.name());
        let verdict = finding.verdict.name();
        writeln!(out, "\n{hazard} of {between}: {verdict}")?;
        writeln!(out, "  why       {}", finding.why)?;
        writeln!(out, "  expected  {}", finding.expected)?;
        for evidence in &finding.evidence {
            writeln!(out, "  found     {evidence}")?;
        }
    }
    let of = |verdict| count(findings, verdict);
    writeln!(
        out,
        "\n{} pass, {} absent, {} known, {} fail, {} not tried; template {}, {}",
        of(Verdict::Pass),
        of(Verdict::Absent),
        of(Verdict::Known),
        of(Verdict::Fail),
        of(Verdict::NotTried),
        findings.template,
        findings.endpoint,
    )
}

/// One JSON document.
#[must_use]
pub fn json(findings: &Findings) -> String {
    // Every field is a plain value, so that this cannot fail.
    let mut text = serde_json::to_string_pretty(findings).unwrap_or_default();
    text.push('\n');
    text
}

/// One test case for each finding.
#[must_use]
pub fn junit(findings: &Findings) -> String {
    let mut out = String::new();
    let _ = write_junit(&mut out, findings);
    out
}

fn write_junit(out: &mut String, findings: &Findings) -> std::fmt::Result {
    writeln!(out, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>")?;
    writeln!(
        out,
        "<testsuites><testsuite name=\"clone-hazards\" tests=\"{}\" failures=\"{}\" errors=\"{}\" skipped=\"{}\">",
        findings.findings.len(),
        count(findings, Verdict::Fail),
        count(findings, Verdict::NotTried),
        count(findings, Verdict::Absent) + count(findings, Verdict::Known),
    )?;
    for finding in &findings.findings {
        let text = format!("{}: {}", finding.expected, finding.evidence.join("; "));
        let text = escape(&text);
        let inner = match finding.verdict {
            Verdict::Pass => String::new(),
            Verdict::Absent | Verdict::Known => format!("<skipped message=\"{text}\"/>"),
            Verdict::Fail => format!("<failure message=\"{text}\"/>"),
            Verdict::NotTried => format!("<error type=\"not_tried\" message=\"{text}\"/>"),
        };
        let (class, name) = (finding.between.name(), escape(&finding.hazard));
        writeln!(
            out,
            "  <testcase classname=\"{class}\" name=\"{name}\">{inner}</testcase>"
        )?;
    }
    writeln!(out, "</testsuite></testsuites>")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hazards::{Between, Weight};

    #[test]
    fn reports_show_every_finding() {
        let finding = |hazard: &str, verdict, evidence: &str| Finding {
            hazard: hazard.to_owned(),
            between: Between::Forks,
            why: "it matters".to_owned(),
            expected: "both differ".to_owned(),
            verdict,
            weight: Weight::Breach,
            evidence: vec![evidence.to_owned(), "b".to_owned()],
        };
        let findings = Findings {
            format: FORMAT,
            endpoint: "http://127.0.0.1:1".to_owned(),
            template: "base".to_owned(),
            findings: vec![
                finding("urandom", Verdict::Pass, "a"),
                finding("seed-files", Verdict::Absent, "says nothing"),
                finding("python-hash", Verdict::Known, "b"),
                finding("disk", Verdict::Fail, "<b> & \"b\""),
                finding("python-ssl", Verdict::NotTried, "no answer: x"),
            ],
        };
        insta::assert_snapshot!(terminal(&findings));
        insta::assert_snapshot!(junit(&findings));
        assert!(json(&findings).contains("\"verdict\": \"not_tried\""));
    }
}
