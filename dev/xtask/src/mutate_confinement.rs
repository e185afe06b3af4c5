//! `cargo xtask mutate-confinement`: which layer of a VMM's confinement holds which attempt?
//!
//! ```text
//! cube-vmm --features weaken ─► a script that sets CUBE_VMM_LAYERS ─► cube-bench verify confinement --direct
//!                               none · each layer alone · all         └─► one column of the matrix
//! ```
//! Without any layer every attempt has to succeed: one that fails there proves nothing about a VMM that has them. With
//! all layers every attempt has to be held, and each by at least one layer alone. The VMM of this task is another
//! program than the released one, which does not know the variable; the prover looks for that.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::{
    binaries,
    isolation::{Judged, Proof, Prover},
    prepare::{self, Freshness},
    progress::Progress,
    workspace::Workspace,
};

/// The layers as the VMM names them.
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
/// Cases that are no attempts.
const NO_ATTEMPT: &str = "state";
const TABLE: &str = "results/confinement-matrix.md";

/// Verdicts of one attempt by column.
type Row<'a> = BTreeMap<&'a str, String>;

/// All columns, by attempt, in the order of the prover.
#[derive(Debug, Default)]
struct Matrix<'a> {
    attempts: Vec<String>,
    rows: BTreeMap<String, Row<'a>>,
}

/// Tries every attempt under none, each and all of the layers. Whether each is proved to be held.
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

/// One column.
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
    let said = String::from_utf8_lossy(&done.stderr);
    prover
        .read(dir.path())
        .with_context(|| said.trim().to_owned())
}

/// A VMM is started without any environment: the script gives it the one variable.
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
        let attempts = proof.cases.iter().filter(|case| case.class != NO_ATTEMPT);
        for Judged { case, verdict, .. } in attempts {
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

    /// Markdown: a row for each attempt, a column for each set of layers.
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

    /// What is not proved, a line each.
    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        for attempt in &self.attempts {
            if !self.is(attempt, NONE, "breach") {
                faults.push(format!(
                    "{attempt}: cannot be shown: it fails without any layer"
                ));
            }
            if !self.is_held(attempt, ALL) {
                faults.push(format!("{attempt}: not held by all layers together"));
            }
            if !LAYERS.iter().any(|layer| self.is_held(attempt, layer)) {
                faults.push(format!("{attempt}: no layer alone holds it"));
            }
        }
        if self.attempts.is_empty() {
            faults.push("nothing was tried".to_owned());
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proof(verdicts: &[(&str, &str)]) -> Proof {
        let case = |(case, verdict): &(&str, &str)| Judged {
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
        }
    }

    #[test]
    fn an_attempt_is_proved_by_success_without_and_refusal_with_layers() {
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
        assert_eq!(matrix.faults(), ["write: no layer alone holds it"]);
        matrix.add("seccomp", &proof(&[("write", "pass")]));
        assert_eq!(matrix.faults(), Vec::<String>::new());
        matrix.add(NONE, &proof(&[("read", "unproven")]));
        assert_eq!(matrix.faults().len(), 1);
        let rendered = matrix.render();
        let line = "| `read` | ? | held | · | · | · | · | · | held |";
        assert!(rendered.contains(line), "{rendered}");
    }

    #[test]
    fn nothing_tried_is_a_fault() {
        assert_eq!(Matrix::default().faults(), ["nothing was tried"]);
    }
}
