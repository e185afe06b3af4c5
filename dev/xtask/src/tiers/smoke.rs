//! The tier `bench`: `cube-bench` starts a few real VMs, and compares the figures in the documents with the
//! published runs. Each gate of the run and each figure counts as a test.

use std::{
    path::Path,
    process::{Command, Output},
};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::{
    tiers::{Counts, Outcome, TestEnvironment, blocks::Blocks},
    workspace::Workspace,
};

/// Takes only seconds.
const SCENARIO: &str = "scenarios/00-smoke.toml";
/// The second part, as it appears in documents.
pub(crate) const CLAIMS: &str = "target/cube/bin/cube-bench verify-claims";

/// Runs both parts, and plans the scenarios that documents run.
pub(crate) fn run(workspace: &Workspace, environment: &TestEnvironment) -> Result<Outcome> {
    let binaries = environment.binaries.as_deref();
    let binaries = binaries.context("the release binaries were not built")?;
    let mut outcome = smoke(workspace, binaries)?.and(claims(workspace, binaries)?);
    for scenario in Blocks::load(workspace)?.scenarios() {
        outcome = outcome.and(plan(workspace, binaries, &scenario)?);
    }
    Ok(outcome)
}

/// Whether a scenario can be planned. Running it would take minutes and use the same code as the smoke scenario.
fn plan(workspace: &Workspace, binaries: &Path, scenario: &Path) -> Result<Outcome> {
    let done = bench(workspace, binaries)
        .arg("plan")
        .arg(scenario)
        .output()
        .context("cannot start cube-bench")?;
    let counts = Counts {
        passed: u64::from(done.status.success()),
        ..Counts::default()
    };
    eprintln!("plan of {}: {}", scenario.display(), done.status);
    Ok(judge("cube-bench plan", &done, counts))
}

fn smoke(workspace: &Workspace, binaries: &Path) -> Result<Outcome> {
    let results = workspace.artifacts().join("results/smoke");
    // The events of an earlier run must not be counted if this run writes none.
    let _ = std::fs::remove_dir_all(&results);
    let done = bench(workspace, binaries)
        .args(["run", SCENARIO, "--format", "json", "--results"])
        .arg(&results)
        .output()
        .context("cannot start cube-bench")?;
    let counts = gates(&done.stdout);
    eprintln!("{SCENARIO}: {counts}, {}", done.status);
    Ok(judge(SCENARIO, &done, counts))
}

fn claims(workspace: &Workspace, binaries: &Path) -> Result<Outcome> {
    let done = bench(workspace, binaries)
        .args(["verify-claims", "--root"])
        .arg(workspace.root())
        .output()
        .context("cannot start cube-bench")?;
    let text = String::from_utf8_lossy(&done.stdout);
    // Standard output is reserved for the summary of all tiers.
    eprint!("{text}");
    Ok(judge("verify-claims", &done, figures(&text)))
}

fn judge(name: &str, done: &Output, counts: Counts) -> Outcome {
    eprint!("{}", String::from_utf8_lossy(&done.stderr));
    Outcome::of(name, done.status, counts)
}

fn bench(workspace: &Workspace, binaries: &Path) -> Command {
    let mut command = Command::new(binaries.join("cube-bench"));
    command
        .current_dir(workspace.root())
        .env("CUBE_ARTIFACTS", workspace.artifacts())
        .env("CUBE_BIN", binaries);
    command
}

/// The fields of a report that are used here.
#[derive(Deserialize)]
struct Report {
    gates: Vec<Gate>,
}

#[derive(Deserialize)]
struct Gate {
    verdict: String,
}

/// Every verdict other than "met" counts as failed, and so does a run without a report.
fn gates(report: &[u8]) -> Counts {
    let mut counts = Counts::default();
    match serde_json::from_slice::<Report>(report) {
        Ok(report) if !report.gates.is_empty() => {
            for gate in report.gates {
                match gate.verdict.as_str() {
                    "met" => counts.passed += 1,
                    _ => counts.failed += 1,
                }
            }
        }
        Ok(_) | Err(_) => counts.failed = 1,
    }
    counts
}

/// Parsed from the last line, "75 figures compared, 2 faults". A fault can concern the text instead of a figure.
fn figures(text: &str) -> Counts {
    let words: Vec<&str> = text.lines().last().unwrap_or_default().split(' ').collect();
    let number = |at: usize| words.get(at)?.parse::<u64>().ok();
    match (number(0), number(3)) {
        (Some(figures), Some(faults)) => Counts {
            passed: figures.saturating_sub(faults),
            failed: faults,
            skipped: 0,
        },
        _ => Counts {
            failed: 1,
            ..Counts::default()
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gates_and_figures_are_counted_and_missing_ones_are_failures() {
        let report = br#"{"format":3,"gates":[{"verdict":"met"},{"verdict":"missed"},{"verdict":"inconclusive"}]}"#;
        assert_eq!(gates(report).to_string(), "1 passed, 2 failed, 0 skipped");
        for none in [&b""[..], b"{\"gates\":[]}", b"{}"] {
            assert_eq!(gates(none).to_string(), "0 passed, 1 failed, 0 skipped");
        }
        let text = "README.md: a fault\n75 figures compared, 1 faults\n";
        assert_eq!(figures(text).to_string(), "74 passed, 1 failed, 0 skipped");
        assert_eq!(figures("").to_string(), "0 passed, 1 failed, 0 skipped");
    }

    #[test]
    fn a_bench_that_fails_with_all_gates_met_is_a_failure() {
        let bench = |status: u8| {
            let script = format!(r#"echo '{{"gates":[{{"verdict":"met"}}]}}'; exit {status}"#);
            let done = Command::new("sh").args(["-c", &script]).output().unwrap();
            let Outcome { success, counts } = judge("bench", &done, gates(&done.stdout));
            (success, counts.to_string())
        };
        assert_eq!(bench(0), (true, "1 passed, 0 failed, 0 skipped".to_owned()));
        assert_eq!(
            bench(1),
            (false, "1 passed, 1 failed, 0 skipped".to_owned())
        );
    }
}
