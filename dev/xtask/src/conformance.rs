//! The official SDKs against a real server, each cell of the matrix a test: the tier `e2b`, and the code
//! interpreter's part of the tier `interpreter`, whose template it needs.

use std::{path::Path, process::Command};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::{
    prepare,
    progress::Progress,
    tiers::{Counts, Outcome, Surroundings},
    workspace::Workspace,
};

/// A part of the suite that a tier runs; the other versions are for `cargo xtask verify`.
#[derive(Debug)]
pub(crate) struct Part {
    /// As `cube-bench verify e2b --area` takes it.
    area: &'static str,
    sdks: &'static [&'static str],
    /// Below the artifacts.
    results: &'static str,
}

/// What needs no further template.
pub(crate) const SANDBOX: Part = Part {
    area: "sandbox",
    sdks: &["python-2.63.0", "python-2.45.1", "js-2.51.0"],
    results: "results/conformance",
};

/// The SDKs that have a package for the code interpreter.
pub(crate) const INTERPRETER: Part = Part {
    area: "interpreter",
    sdks: &["python-2.63.0", "js-2.51.0"],
    results: "results/conformance-interpreter",
};

/// What of `matrix.json` is counted.
#[derive(Debug, Deserialize)]
struct Matrix {
    cells: Vec<Cell>,
}

#[derive(Debug, Deserialize)]
struct Cell {
    must: bool,
    verdict: String,
}

/// `cube-bench verify e2b` on what was prepared.
pub(crate) fn command(workspace: &Workspace, binaries: &Path) -> Command {
    let mut command = Command::new(binaries.join("cube-bench"));
    command
        .current_dir(workspace.root())
        .env("CUBE_ARTIFACTS", workspace.artifacts())
        .env("CUBE_BIN", binaries)
        .args(["verify", "e2b"]);
    command
}

/// Installs the SDKs and runs a part of the suite.
pub(crate) fn run(
    workspace: &Workspace,
    part: &Part,
    surroundings: &Surroundings,
    progress: Progress,
) -> Result<Outcome> {
    prepare::sdks(workspace, progress)?;
    let binaries = surroundings.binaries.as_deref();
    let binaries = binaries.context("the suite was not prepared")?;
    let results = workspace.artifacts().join(part.results);
    let mut command = command(workspace, binaries);
    command.args(["--area", part.area]);
    command.arg("--results").arg(&results);
    for sdk in part.sdks {
        command.args(["--sdk", sdk]);
    }
    command.args(["--jobs", &part.sdks.len().to_string()]);
    // Standard output is for the summary of all tiers.
    let done = command.output().context("cannot start cube-bench")?;
    eprint!("{}", String::from_utf8_lossy(&done.stdout));
    eprint!("{}", String::from_utf8_lossy(&done.stderr));
    let path = results.join("matrix.json");
    let text = std::fs::read(&path).with_context(|| format!("no {}", path.display()))?;
    let matrix: Matrix = serde_json::from_slice(&text)?;
    Ok(Outcome {
        success: done.status.success(),
        counts: count(&matrix),
    })
}

/// Absent features and those that nothing hangs on are skipped, unless they pass.
fn count(matrix: &Matrix) -> Counts {
    let mut counts = Counts::default();
    for cell in &matrix.cells {
        let place = match cell.verdict.as_str() {
            "pass" => &mut counts.passed,
            "absent" => &mut counts.skipped,
            _ if !cell.must => &mut counts.skipped,
            _ => &mut counts.failed,
        };
        *place += 1;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_counted_as_tests() {
        let cells = [
            ("pass", true),
            ("pass", false),
            ("absent", true),
            ("fail", false),
            ("fail", true),
            ("not_run", true),
        ];
        let cells = cells.map(|(verdict, must)| Cell {
            must,
            verdict: verdict.to_owned(),
        });
        let counts = count(&Matrix {
            cells: cells.into_iter().collect(),
        });
        assert_eq!(counts.to_string(), "2 passed, 2 failed, 2 skipped");
    }
}
