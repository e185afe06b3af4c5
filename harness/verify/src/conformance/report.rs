//! Renders the matrix for a terminal, for scripts, for CI systems and as Markdown. The functions are pure.

use std::fmt::Write;

use super::matrix::{Cell, CellResult, Matrix};
use testbed::junit::{self, Case, Outcome};

/// Format number of the JSON document.
pub const FORMAT: u32 = 1;

/// Number of green cells, and of all cells.
fn counts(matrix: &Matrix) -> (usize, usize) {
    let green = matrix.cells.iter().filter(|c| c.result.is_green()).count();
    (green, matrix.cells.len())
}

fn sign(matrix: &Matrix, feature: &str, sdk: &str) -> &'static str {
    match matrix.cell(feature, sdk).map(|cell| cell.result) {
        Some(CellResult::Pass) => "pass",
        Some(CellResult::Absent) => "absent",
        Some(CellResult::Fail) => "FAIL",
        Some(CellResult::TimedOut) => "TIMEOUT",
        Some(CellResult::NotRun) => "NOT RUN",
        None => "",
    }
}

/// For a terminal: the matrix, then the reason for each cell that is not green.
#[must_use]
pub fn terminal(matrix: &Matrix) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write_terminal(&mut out, matrix);
    out
}

fn write_terminal(out: &mut String, matrix: &Matrix) -> std::fmt::Result {
    let names = matrix.features.iter().map(|(name, _)| name.len());
    let width = names.max().unwrap_or(0).max(7) + 2;
    let mut line = |first: &str, cells: &[&str]| {
        let mut text = format!("{first:<width$}");
        for cell in cells {
            text.push_str(&format!("{cell:<15}"));
        }
        writeln!(out, "{}", text.trim_end())
    };
    let sdks: Vec<&str> = matrix.sdks.iter().map(String::as_str).collect();
    line("feature", &sdks)?;
    for (feature, _) in &matrix.features {
        let row: Vec<_> = sdks.iter().map(|sdk| sign(matrix, feature, sdk)).collect();
        if row.iter().any(|sign| !sign.is_empty()) {
            line(feature, &row)?;
        }
    }
    for cell in matrix.cells.iter().filter(|c| !c.result.is_green()) {
        let must = if cell.must { "" } else { " (not required)" };
        writeln!(
            out,
            "\n{} with {}{must}: {}",
            cell.feature,
            cell.sdk,
            cell.result.name()
        )?;
        writeln!(out, "  {}", cell.why)?;
    }
    let (green, all) = counts(matrix);
    writeln!(
        out,
        "\n{green} of {all} cells are green; {}",
        matrix.endpoint
    )
}

/// For scripts: one JSON document.
#[must_use]
pub fn json(matrix: &Matrix) -> String {
    // Serialization cannot fail: every field is a plain value.
    let mut text = serde_json::to_string_pretty(matrix).unwrap_or_default();
    text.push('\n');
    text
}

/// For CI systems: one JUnit suite for each SDK, with one test case for each cell.
#[must_use]
pub fn junit(matrix: &Matrix) -> String {
    let case = |cell: &Cell| Case {
        class: cell.sdk.clone(),
        name: cell.feature.clone(),
        seconds: Some(cell.seconds.unwrap_or_default()),
        outcome: match cell.result {
            CellResult::Pass => Outcome::Passed,
            CellResult::Absent => Outcome::Skipped,
            CellResult::Fail => Outcome::Failed,
            CellResult::TimedOut | CellResult::NotRun => Outcome::Error(cell.result.name()),
        },
        message: cell.why.clone(),
    };
    let mut suites = Vec::new();
    for sdk in &matrix.sdks {
        let cells = matrix.cells.iter().filter(|cell| cell.sdk == *sdk);
        suites.push((sdk.as_str(), cells.map(case).collect()));
    }
    junit::render(&suites)
}

/// For issues and documentation: Markdown tables.
#[must_use]
pub fn markdown(matrix: &Matrix) -> String {
    let mut out = String::new();
    let _ = write_markdown(&mut out, matrix);
    out
}

fn write_markdown(out: &mut String, matrix: &Matrix) -> std::fmt::Result {
    let (green, all) = counts(matrix);
    writeln!(
        out,
        "{green} of {all} cells are green; {}.\n",
        matrix.endpoint
    )?;
    writeln!(
        out,
        "| feature | {} | why it is tested |",
        matrix.sdks.join(" | ")
    )?;
    writeln!(out, "|---|{}---|", "---|".repeat(matrix.sdks.len()))?;
    for (feature, why) in &matrix.features {
        let row: Vec<_> = matrix
            .sdks
            .iter()
            .map(|sdk| sign(matrix, feature, sdk))
            .collect();
        writeln!(out, "| {feature} | {} | {why} |", row.join(" | "))?;
    }
    let reds: Vec<_> = matrix
        .cells
        .iter()
        .filter(|c| !c.result.is_green())
        .collect();
    if !reds.is_empty() {
        writeln!(
            out,
            "\n| feature | SDK | verdict | reason |\n|---|---|---|---|"
        )?;
    }
    for cell in reds {
        let why = cell.why.replace('|', "\\|").replace(['\n', '\r'], " ");
        writeln!(
            out,
            "| {} | {} | {} | {why} |",
            cell.feature,
            cell.sdk,
            cell.result.name()
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use testbed::exit::End;

    fn matrix() -> Matrix {
        let cell = |feature: &str, sdk: &str, must, result, why: &str| Cell {
            feature: feature.to_owned(),
            sdk: sdk.to_owned(),
            must,
            result,
            why: why.to_owned(),
            seconds: Some(0.25),
        };
        Matrix {
            format: FORMAT,
            endpoint: "http://127.0.0.1:1".to_owned(),
            sdks: vec!["python-2".to_owned(), "cli-1".to_owned()],
            features: vec![
                ("create".to_owned(), "needed by every program".to_owned()),
                ("logs".to_owned(), "only the client reads them".to_owned()),
                ("fork".to_owned(), "several continuations".to_owned()),
            ],
            cells: vec![
                cell("create", "python-2", true, CellResult::Pass, ""),
                cell("create", "cli-1", true, CellResult::Absent, ""),
                cell(
                    "logs",
                    "cli-1",
                    false,
                    CellResult::Fail,
                    "said <no> | \"really\"",
                ),
            ],
        }
    }

    #[test]
    fn reports_show_every_cell() {
        insta::assert_snapshot!(terminal(&matrix()));
        insta::assert_snapshot!(markdown(&matrix()));
        insta::assert_snapshot!(junit(&matrix()));
    }

    #[test]
    fn only_required_cells_fail_the_suite() {
        let mut matrix = matrix();
        assert_eq!(matrix.end(), End::Pass);
        matrix.cells[2].must = true;
        assert_eq!(matrix.end(), End::GateFailed);
        matrix.cells.clear();
        assert_eq!(matrix.end(), End::GateFailed, "nothing was verified");
    }
}
