//! Renders the findings for a terminal, for scripts and for CI systems. The functions are pure.

use std::fmt::Write;

use super::finding::{Finding, Findings, HazardResult, OfTemplate};
use testbed::junit::{self, Case, Outcome};

/// Format number of the JSON document.
pub const FORMAT: u32 = 2;

fn sign(result: HazardResult) -> &'static str {
    match result {
        HazardResult::Pass => "pass",
        HazardResult::Absent => "absent",
        HazardResult::Known => "known",
        HazardResult::Warned => "WARNED",
        HazardResult::Fail => "FAIL",
        HazardResult::NotTried => "NOT TRIED",
    }
}

/// For a terminal: for each template, a line for each finding, then details of those that did not pass.
#[must_use]
pub fn terminal(findings: &Findings) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = findings
        .templates
        .iter()
        .try_for_each(|of| write_terminal(&mut out, of, &findings.endpoint));
    out
}

fn write_terminal(out: &mut String, of: &OfTemplate, endpoint: &str) -> std::fmt::Result {
    for finding in &of.findings {
        let Finding {
            hazard, between, ..
        } = finding;
        let (between, sign) = (between.name(), sign(finding.result));
        writeln!(out, "{hazard:<28}{between:<8}{sign}")?;
    }
    let is_fine =
        |finding: &&Finding| matches!(finding.result, HazardResult::Pass | HazardResult::Absent);
    for finding in of.findings.iter().filter(|f| !is_fine(f)) {
        let (hazard, between) = (&finding.hazard, finding.between.name());
        let result = finding.result.name();
        writeln!(out, "\n{hazard} of {between}: {result}")?;
        writeln!(out, "  why       {}", finding.why)?;
        writeln!(out, "  expected  {}", finding.expected)?;
        for evidence in &finding.evidence {
            writeln!(out, "  found     {evidence}")?;
        }
    }
    let number = |result| of.findings.iter().filter(|f| f.result == result).count();
    writeln!(
        out,
        "\n{} pass, {} absent, {} known, {} warned, {} fail, {} not tried; template {}, {endpoint}",
        number(HazardResult::Pass),
        number(HazardResult::Absent),
        number(HazardResult::Known),
        number(HazardResult::Warned),
        number(HazardResult::Fail),
        number(HazardResult::NotTried),
        of.template,
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
    let mut cases = Vec::new();
    for of in &findings.templates {
        cases.extend(of.findings.iter().map(|finding| Case {
            class: format!("{}.{}", of.template, finding.between.name()),
            name: finding.hazard.clone(),
            seconds: None,
            outcome: match finding.result {
                HazardResult::Pass => Outcome::Passed,
                HazardResult::Absent | HazardResult::Known | HazardResult::Warned => {
                    Outcome::Skipped
                }
                HazardResult::Fail => Outcome::Failed,
                HazardResult::NotTried => Outcome::Error("not_tried"),
            },
            message: format!("{}: {}", finding.expected, finding.evidence.join("; ")),
        }));
    }
    junit::render(&[("clone-hazards", cases)])
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
            templates: vec![
                OfTemplate {
                    template: "other".to_owned(),
                    findings: vec![finding("answers", HazardResult::Warned, "b")],
                },
                OfTemplate {
                    template: "base".to_owned(),
                    findings: vec![
                        finding("urandom", HazardResult::Pass, "a"),
                        finding("seed-files", HazardResult::Absent, "the answer is empty"),
                        finding("python-hash", HazardResult::Known, "b"),
                        finding("disk", HazardResult::Fail, "<b> & \"b\""),
                        finding("python-ssl", HazardResult::NotTried, "no answer: x"),
                    ],
                },
            ],
        };
        insta::assert_snapshot!(terminal(&findings));
        insta::assert_snapshot!(junit(&findings));
        assert!(json(&findings).contains("\"verdict\": \"not_tried\""));
    }
}
