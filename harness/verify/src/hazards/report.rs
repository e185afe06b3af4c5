//! Renders the findings for a terminal, for scripts and for CI systems. The functions are pure.

use std::fmt::Write;

use super::finding::{Finding, Findings, HazardResult};
use testbed::xml::escape;

/// Format number of the JSON document.
pub const FORMAT: u32 = 1;

fn count(findings: &Findings, result: HazardResult) -> usize {
    let all = findings.findings.iter();
    all.filter(|finding| finding.result == result).count()
}

fn sign(result: HazardResult) -> &'static str {
    match result {
        HazardResult::Pass => "pass",
        HazardResult::Absent => "absent",
        HazardResult::Known => "known",
        HazardResult::Fail => "FAIL",
        HazardResult::NotTried => "NOT TRIED",
    }
}

/// For a terminal: a line for each finding, then details of those that did not pass.
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
        let (between, sign) = (between.name(), sign(finding.result));
        writeln!(out, "{hazard:<28}{between:<8}{sign}")?;
    }
    let is_fine =
        |finding: &&Finding| matches!(finding.result, HazardResult::Pass | HazardResult::Absent);
    for finding in findings.findings.iter().filter(|f| !is_fine(f)) {
        let (hazard, between) = (&finding.hazard, finding.between.name());
        let result = finding.result.name();
        writeln!(out, "\n{hazard} of {between}: {result}")?;
        writeln!(out, "  why       {}", finding.why)?;
        writeln!(out, "  expected  {}", finding.expected)?;
        for evidence in &finding.evidence {
            writeln!(out, "  found     {evidence}")?;
        }
    }
    let of = |result| count(findings, result);
    writeln!(
        out,
        "\n{} pass, {} absent, {} known, {} fail, {} not tried; template {}, {}",
        of(HazardResult::Pass),
        of(HazardResult::Absent),
        of(HazardResult::Known),
        of(HazardResult::Fail),
        of(HazardResult::NotTried),
        findings.template,
        findings.endpoint,
    )
}

/// For scripts: one JSON document.
#[must_use]
pub fn json(findings: &Findings) -> String {
    // Serialization cannot fail: every field is a plain value.
    let mut text = serde_json::to_string_pretty(findings).unwrap_or_default();
    text.push('\n');
    text
}

/// For CI systems: one JUnit test case for each finding.
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
        count(findings, HazardResult::Fail),
        count(findings, HazardResult::NotTried),
        count(findings, HazardResult::Absent) + count(findings, HazardResult::Known),
    )?;
    for finding in &findings.findings {
        let text = format!("{}: {}", finding.expected, finding.evidence.join("; "));
        let text = escape(&text);
        let inner = match finding.result {
            HazardResult::Pass => String::new(),
            HazardResult::Absent | HazardResult::Known => format!("<skipped message=\"{text}\"/>"),
            HazardResult::Fail => format!("<failure message=\"{text}\"/>"),
            HazardResult::NotTried => format!("<error type=\"not_tried\" message=\"{text}\"/>"),
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
    use crate::hazards::finding::{Between, Weight};

    #[test]
    fn reports_show_every_finding() {
        let finding = |hazard: &str, result, evidence: &str| Finding {
            hazard: hazard.to_owned(),
            between: Between::Forks,
            why: "it matters".to_owned(),
            expected: "both differ".to_owned(),
            result,
            weight: Weight::Breach,
            evidence: vec![evidence.to_owned(), "b".to_owned()],
        };
        let findings = Findings {
            format: FORMAT,
            endpoint: "http://127.0.0.1:1".to_owned(),
            template: "base".to_owned(),
            findings: vec![
                finding("urandom", HazardResult::Pass, "a"),
                finding("seed-files", HazardResult::Absent, "the answer is empty"),
                finding("python-hash", HazardResult::Known, "b"),
                finding("disk", HazardResult::Fail, "<b> & \"b\""),
                finding("python-ssl", HazardResult::NotTried, "no answer: x"),
            ],
        };
        insta::assert_snapshot!(terminal(&findings));
        insta::assert_snapshot!(junit(&findings));
        assert!(json(&findings).contains("\"verdict\": \"not_tried\""));
    }
}
