//! Runs the conformance suite: the official SDKs against a real server. Each cell of the feature matrix counts as a
//! test. The area `sandbox` is the tier `e2b`; the area `interpreter` belongs to the tier `interpreter`, whose template
//! it needs.

use std::{path::Path, process::Command};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::{
    prepare,
    progress::Progress,
    tiers::{Counts, Outcome, TestEnvironment},
    workspace::Workspace,
};

/// The part of the suite that a tier runs. `cargo xtask verify` runs the other SDK versions as well.
#[derive(Debug)]
pub(crate) struct Part {
    /// Value of the option `cube-bench verify e2b --area`.
    area: &'static str,
    sdks: &'static [&'static str],
    /// Directory of the results, relative to the artifacts.
    results: &'static str,
}

/// The features that need no template other than `base`.
pub(crate) const SANDBOX: Part = Part {
    area: "sandbox",
    sdks: &["python-2.63.0", "python-2.45.1", "js-2.51.0"],
    results: "results/conformance",
};

/// The same for each change, with one SDK of each language.
pub(crate) const SANDBOX_USUAL: Part = Part {
    sdks: &["python-2.63.0", "js-2.51.0"],
    ..SANDBOX
};

/// The features of the code interpreter, for the SDK versions that have a code interpreter package.
pub(crate) const INTERPRETER: Part = Part {
    area: "interpreter",
    sdks: &["python-2.63.0", "js-2.51.0"],
    results: "results/conformance-interpreter",
};

/// The fields of `matrix.json` that are counted here.
#[derive(Debug, Deserialize)]
struct Matrix {
    cases: Vec<Cell>,
}

#[derive(Debug, Deserialize)]
struct Cell {
    /// Whether a failure of this cell fails the suite.
    required: bool,
    verdict: String,
}

/// The command `cube-bench verify e2b` on the build outputs.
pub(crate) fn command(workspace: &Workspace, binaries: &Path) -> Command {
    let mut command = Command::new(binaries.join("cube-bench"));
    command
        .current_dir(workspace.root())
        .env("CUBE_ARTIFACTS", workspace.artifacts())
        .env("CUBE_BIN", binaries)
        .args(["verify", "e2b"]);
    command
}

/// Installs the SDKs and runs one part of the suite.
pub(crate) fn run(
    workspace: &Workspace,
    part: &Part,
    environment: &TestEnvironment,
    progress: Progress,
) -> Result<Outcome> {
    prepare::sdks(workspace, progress)?;
    let binaries = environment.binaries.as_deref();
    let binaries = binaries.context("the release binaries were not built")?;
    let results = workspace.artifacts().join(part.results);
    let mut command = command(workspace, binaries);
    command.args(["--area", part.area]);
    command.arg("--results").arg(&results);
    for sdk in part.sdks {
        command.args(["--sdk", sdk]);
    }
    command.args(["--jobs", &part.sdks.len().to_string()]);
    // Standard output is reserved for the summary of all tiers.
    let done = command.output().context("cannot start cube-bench")?;
    eprint!("{}", String::from_utf8_lossy(&done.stdout));
    eprint!("{}", String::from_utf8_lossy(&done.stderr));
    let path = results.join("matrix.json");
    let text = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let matrix: Matrix = serde_json::from_slice(&text)?;
    Ok(Outcome::of("verify e2b", done.status, count(&matrix)))
}

/// Counts a cell that passed as passed. Counts any other cell as skipped if its feature is absent or not required, and
/// as failed otherwise.
fn count(matrix: &Matrix) -> Counts {
    let mut counts = Counts::default();
    for cell in &matrix.cases {
        let place = match cell.verdict.as_str() {
            "pass" => &mut counts.passed,
            "absent" => &mut counts.skipped,
            _ if !cell.required => &mut counts.skipped,
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
    fn only_required_cells_count_as_failed() {
        let cells = [
            ("pass", true),
            ("pass", false),
            ("absent", true),
            ("fail", false),
            ("fail", true),
            ("not_run", true),
        ];
        let cells = cells.map(|(verdict, must)| Cell {
            required: must,
            verdict: verdict.to_owned(),
        });
        let counts = count(&Matrix {
            cases: cells.into_iter().collect(),
        });
        assert_eq!(counts.to_string(), "2 passed, 2 failed, 2 skipped");
    }
}
