//! Runs the confinement prover, `cube-verify confinement`, on clones of the steps' templates.

use std::{
    collections::BTreeSet,
    fmt, fs,
    os::unix::fs::symlink,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::config::Config;

/// The class of cases that inspect a VMM and each of its threads through /proc.
pub(crate) const STATE_CLASS: &str = "state";

/// The template's name for the prover.
const TEMPLATE: &str = "base";

/// Number of passed cases and of their classes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Passed {
    pub(crate) cases: usize,
    pub(crate) classes: usize,
}

impl fmt::Display for Passed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} cases in {} classes", self.cases, self.classes)
    }
}

/// Runs the prover's cases and classes in `cases`, or all of them if it is empty, on clones of `template`.
///
/// # Errors
/// Returns an error if the prover cannot run, or if a case does not pass.
pub(crate) fn prove(config: &Config, template: &Path, cases: &[String]) -> Result<Passed> {
    let dir = tempfile::tempdir_in(&config.work)?;
    let templates = dir.path().join("templates");
    fs::create_dir(&templates)?;
    symlink(template, templates.join(TEMPLATE))?;
    let mut prover = Command::new(&config.verify);
    prover
        .args(["confinement", "--direct", "--template", TEMPLATE])
        .arg("--artifacts")
        .arg(dir.path())
        .arg("--vmm")
        .arg(&config.vmm)
        .arg("--results")
        .arg(dir.path())
        .stdin(Stdio::null());
    for case in cases {
        prover.arg("--case").arg(case);
    }
    // The prover's output stays on the console, which is logged.
    let status = prover
        .status()
        .with_context(|| format!("cannot start {}", config.verify.display()))?;
    let report = dir.path().join("confinement.json");
    let report = fs::read(&report)
        .with_context(|| format!("the prover ended with {status} (reason above) and no report"))?;
    let passed = check_report(&serde_json::from_slice(&report)?)?;
    ensure!(
        status.success(),
        "the prover reported no failed case, but ended with {status}"
    );
    Ok(passed)
}

/// Counts the cases and classes of a report in which every case passed.
///
/// # Errors
/// Returns an error if a case did not pass, or if the report contains no cases.
fn check_report(proof: &Value) -> Result<Passed> {
    let cases = proof["cases"]
        .as_array()
        .context("the prover's report has no list of cases")?;
    let word = |case: &Value, key: &str| case[key].as_str().unwrap_or("?").to_owned();
    let failed = cases.iter().filter(|case| case["verdict"] != "pass");
    let failed: Vec<_> = failed
        .map(|case| format!("{} ({})", word(case, "case"), word(case, "verdict")))
        .collect();
    ensure!(failed.is_empty(), "failed cases: {}", failed.join(", "));
    ensure!(!cases.is_empty(), "the prover ran no cases");
    let classes: BTreeSet<_> = cases.iter().map(|case| case["class"].as_str()).collect();
    Ok(Passed {
        cases: cases.len(),
        classes: classes.len(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn case(class: &str, verdict: &str) -> Value {
        json!({ "case": format!("{class}-a"), "class": class, "verdict": verdict })
    }

    #[test]
    fn a_report_with_a_case_that_did_not_pass_is_an_error() {
        let check = |cases: &[Value]| check_report(&json!({ "cases": cases }));
        let (files, signals) = (case("files", "pass"), case("signals", "pass"));
        let passed = check(&[files.clone(), signals.clone(), files.clone()]).unwrap();
        assert_eq!((passed.cases, passed.classes), (3, 2));
        for verdict in ["breach", "unproven", "not_tried"] {
            let error = check(&[files.clone(), case("code", verdict)]).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!("failed cases: code-a ({verdict})")
            );
        }
        assert!(check(&[]).is_err());
        assert!(check_report(&json!({})).is_err());
    }
}
