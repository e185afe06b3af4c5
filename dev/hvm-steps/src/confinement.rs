//! `cube-bench verify confinement` on clones of the steps' templates: what can a VMM do here that was taken over?

use std::{
    collections::BTreeSet,
    fmt, fs,
    os::unix::fs::symlink,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::steps::Places;

/// The class of cases that look at what /proc has of VMMs and each of their threads.
pub(crate) const STATE: &str = "state";

/// Name under which the prover finds the template.
const TEMPLATE: &str = "base";

/// How much was held.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) cases: usize,
    pub(crate) classes: usize,
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} cases of {} classes", self.cases, self.classes)
    }
}

/// Tries these cases and classes on clones of `template`; none: all.
///
/// # Errors
/// The prover cannot run, or a case was not held.
pub(crate) fn prove(places: &Places, template: &Path, cases: &[String]) -> Result<Held> {
    let dir = tempfile::tempdir_in(&places.work)?;
    let templates = dir.path().join("templates");
    fs::create_dir(&templates)?;
    symlink(template, templates.join(TEMPLATE))?;
    let mut prover = Command::new(&places.bench);
    prover
        .args(["verify", "confinement", "--direct", "--template", TEMPLATE])
        .arg("--artifacts")
        .arg(dir.path())
        .arg("--vmm")
        .arg(&places.vmm)
        .arg("--results")
        .arg(dir.path())
        .stdin(Stdio::null());
    for case in cases {
        prover.arg("--case").arg(case);
    }
    // Its report belongs to the console's log.
    let status = prover
        .status()
        .with_context(|| format!("cannot start {}", places.bench.display()))?;
    let report = dir.path().join("confinement.json");
    let report = fs::read(&report)
        .with_context(|| format!("the prover ended with {status} (reason above) and no report"))?;
    let held = judge(&serde_json::from_slice(&report)?)?;
    ensure!(
        status.success(),
        "the prover reports no failed case and ended with {status}"
    );
    Ok(held)
}

/// Counts the cases, all of which must be held.
fn judge(proof: &Value) -> Result<Held> {
    let cases = proof["cases"]
        .as_array()
        .context("a report without cases")?;
    let word = |case: &Value, key: &str| case[key].as_str().unwrap_or("?").to_owned();
    let failed = cases.iter().filter(|case| case["verdict"] != "pass");
    let failed: Vec<_> = failed
        .map(|case| format!("{} ({})", word(case, "case"), word(case, "verdict")))
        .collect();
    ensure!(failed.is_empty(), "not held: {}", failed.join(", "));
    ensure!(!cases.is_empty(), "the prover tried nothing");
    let classes: BTreeSet<_> = cases.iter().map(|case| case["class"].as_str()).collect();
    Ok(Held {
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
    fn one_case_that_is_not_held_fails_the_proof() {
        let judged = |cases: &[Value]| judge(&json!({ "cases": cases }));
        let (files, signals) = (case("files", "pass"), case("signals", "pass"));
        let held = judged(&[files.clone(), signals.clone(), files.clone()]).unwrap();
        assert_eq!((held.cases, held.classes), (3, 2));
        for verdict in ["breach", "unproven", "not_tried"] {
            let error = judged(&[files.clone(), case("code", verdict)]).unwrap_err();
            assert_eq!(error.to_string(), format!("not held: code-a ({verdict})"));
        }
        assert!(judged(&[]).is_err());
        assert!(judge(&json!({})).is_err());
    }
}
