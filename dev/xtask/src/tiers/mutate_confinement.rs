//! `cargo xtask mutate-confinement`: finds out which layer of a VMM's confinement stops which attempt to escape.
//!
//! ```text
//! cube-vmm --features weaken ─► a script that sets CUBE_VMM_LAYERS ─► cube-bench verify confinement --direct
//!                               none · each layer alone · all         └─► one column of the matrix
//! ```
//! Without any layer, every attempt must succeed: an attempt that fails anyway proves nothing about the layers. With
//! all layers, every attempt must be stopped, and at least one layer must stop it alone. The VMM of this task is a
//! special build; the released one ignores the variable, and the prover has a case that checks this.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::{
    prepare::{self, Freshness},
    progress::Progress,
    stages::binaries,
    tiers::isolation::{CaseResult, Proof, Prover},
    workspace::Workspace,
};

/// The layers, by the names that `CUBE_VMM_LAYERS` accepts.
const LAYERS: [&str; 6] = [
    "uid",
    "capabilities",
    "limits",
    "dumpable",
    "landlock",
    "seccomp",
];
const NONE: &str = "none";
const ALL: &str = "all";
/// The class of cases that inspect a VMM's state and are not attempts to escape.
const STATE_CLASS: &str = "state";
const TABLE: &str = "results/confinement-matrix.md";

/// Verdicts of one attempt, by column.
type Row<'a> = BTreeMap<&'a str, String>;

#[derive(Debug, Default)]
struct Matrix<'a> {
    /// Names of the attempts, in the prover's order.
    attempts: Vec<String>,
    rows: BTreeMap<String, Row<'a>>,
}

/// Runs every attempt without layers, with each layer alone, and with all layers. Prints the matrix and its faults.
/// Returns true if there are no faults.
pub(crate) fn run(workspace: &Workspace, progress: Progress) -> Result<bool> {
    let prepared = prepare::all(workspace, progress, Freshness::Keep)?.dir;
    let log = workspace.artifacts().join("log/mutate-confinement.log");
    fs::write(&log, "")?;
    let vmm = binaries::build_weak_vmm(workspace, progress, &log)?;
    let mut matrix = Matrix::default();
    for column in columns() {
        let proof = progress.stage(column, || {
            prove(workspace, &prepared, &vmm, column).with_context(|| format!("layers: {column}"))
        })?;
        matrix.add(column, &proof);
    }
    let table = matrix.render();
    let path = workspace.artifacts().join(TABLE);
    fs::write(&path, &table).with_context(|| format!("cannot write {}", path.display()))?;
    print!("{table}");
    let faults = matrix.faults();
    for fault in &faults {
        println!("{fault}");
    }
    println!(
        "{} attempts, {} faults",
        matrix.attempts.len(),
        faults.len()
    );
    Ok(faults.is_empty())
}

fn columns() -> impl Iterator<Item = &'static str> {
    [NONE].into_iter().chain(LAYERS).chain([ALL])
}

/// Runs the prover on a VMM with the layers of one column.
fn prove(workspace: &Workspace, binaries: &Path, vmm: &Path, column: &str) -> Result<Proof> {
    let dir = tempfile::tempdir()?;
    let script = script(dir.path(), vmm, column)?;
    let prover = Prover::Confinement;
    let done = prover
        .command(workspace, binaries, dir.path())
        .arg("--direct")
        .arg("--vmm")
        .arg(script)
        .output()
        .context("cannot start cube-bench")?;
    let stderr = String::from_utf8_lossy(&done.stderr);
    prover
        .read(dir.path())
        .with_context(|| format!("the prover wrote no report: {}", stderr.trim()))
}

/// Writes a script that starts the VMM with `CUBE_VMM_LAYERS` set. A script is needed because the prover starts VMMs
/// with an empty environment.
fn script(dir: &Path, vmm: &Path, column: &str) -> Result<PathBuf> {
    let layers = match column {
        NONE => String::new(),
        ALL => LAYERS.join(","),
        layer => layer.to_owned(),
    };
    let path = dir.join("cube-vmm");
    let text = format!(
        "#!/bin/sh\nCUBE_VMM_LAYERS='{layers}' exec '{}' \"$@\"\n",
        vmm.display()
    );
    fs::write(&path, text)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    Ok(path)
}

impl<'a> Matrix<'a> {
    fn add(&mut self, column: &'a str, proof: &Proof) {
        let attempts = proof.cases.iter().filter(|case| case.class != STATE_CLASS);
        for CaseResult { case, verdict, .. } in attempts {
            if !self.rows.contains_key(case) {
                self.attempts.push(case.clone());
            }
            let row = self.rows.entry(case.clone()).or_default();
            row.insert(column, verdict.clone());
        }
    }

    fn is(&self, attempt: &str, column: &str, verdict: &str) -> bool {
        let row = self.rows.get(attempt);
        row.is_some_and(|row| row.get(column).is_some_and(|found| found == verdict))
    }

    fn is_held(&self, attempt: &str, column: &str) -> bool {
        self.is(attempt, column, "pass")
    }

    /// Renders a Markdown table: a row for each attempt, a column for each set of layers.
    fn render(&self) -> String {
        let mut out = String::from("| attempt |");
        for column in columns() {
            out += &format!(" {column} |");
        }
        out += &format!("\n|---|{}\n", "---|".repeat(columns().count()));
        for attempt in &self.attempts {
            out += &format!("| `{attempt}` |");
            for column in columns() {
                let held = self.is_held(attempt, column);
                let reached = self.is(attempt, column, "breach");
                out += match (held, reached) {
                    (true, _) => " held |",
                    (_, true) => " · |",
                    (false, false) => " ? |",
                };
            }
            out.push('\n');
        }
        out += "| **held** |";
        for column in columns() {
            let held = self.attempts.iter().filter(|a| self.is_held(a, column));
            out += &format!(" {} |", held.count());
        }
        out.push('\n');
        out
    }

    /// One line for each rule that an attempt violates: it must succeed without layers, be stopped by all layers
    /// together, and be stopped by at least one layer alone.
    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        for attempt in &self.attempts {
            if !self.is(attempt, NONE, "breach") {
                faults.push(format!(
                    "{attempt}: proves nothing: it fails even without any layer"
                ));
            }
            if !self.is_held(attempt, ALL) {
                faults.push(format!("{attempt}: all layers together do not stop it"));
            }
            if !LAYERS.iter().any(|layer| self.is_held(attempt, layer)) {
                faults.push(format!("{attempt}: no single layer stops it"));
            }
        }
        if self.attempts.is_empty() {
            faults.push("the prover ran no attempts".to_owned());
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proof(verdicts: &[(&str, &str)]) -> Proof {
        let case = |(case, verdict): &(&str, &str)| CaseResult {
            case: (*case).to_owned(),
            class: if case.starts_with("state") {
                "state"
            } else {
                "files"
            }
            .to_owned(),
            verdict: (*verdict).to_owned(),
        };
        Proof {
            cases: verdicts.iter().map(case).collect(),
            ..Proof::default()
        }
    }

    #[test]
    fn an_attempt_must_succeed_without_layers_and_fail_with_them() {
        let mut matrix = Matrix::default();
        let reached = [
            ("read", "breach"),
            ("write", "breach"),
            ("state-user", "breach"),
        ];
        for column in columns().filter(|column| *column != ALL) {
            matrix.add(column, &proof(&reached));
        }
        matrix.add("uid", &proof(&[("read", "pass")]));
        matrix.add(ALL, &proof(&[("read", "pass"), ("write", "pass")]));
        assert_eq!(matrix.faults(), ["write: no single layer stops it"]);
        matrix.add("seccomp", &proof(&[("write", "pass")]));
        assert_eq!(matrix.faults(), Vec::<String>::new());
        matrix.add(NONE, &proof(&[("read", "unproven")]));
        assert_eq!(matrix.faults().len(), 1);
        let rendered = matrix.render();
        let line = "| `read` | ? | held | · | · | · | · | · | held |";
        assert!(rendered.contains(line), "{rendered}");
    }

    #[test]
    fn a_run_without_attempts_is_a_fault() {
        assert_eq!(Matrix::default().faults(), ["the prover ran no attempts"]);
    }
}
