//! Compares figures in documents with the recorded runs that they quote.
//!
//! For each quoted text, `claims.toml` lists the run in `results/` and the key of each figure in that run's report.
//! The report is recomputed from the raw events, so a change of the statistics that changes a published figure is
//! also found. In the figures of README.md and docs/measure/figures.md, every number in the column "measured" must
//! be in the list, and a figure beyond its goal must be marked as missed. Every number of milliseconds or megabytes
//! in the text of these documents must be in the list, and so must every such number in a sentence or row of
//! docs/*.md that names a run. A report shown in a document must match the report of its run.

mod cited;
mod drift;
mod excerpt;
mod goals;
mod write;

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use serde_json::Value;

pub use drift::{Drift, Rerun, drift, runs};
pub use write::write;

use crate::{
    record::RecordError,
    report::document::Document,
    session::{RecordedRun, SessionError},
};

/// Name of the list in the root of the repository.
pub const CLAIMS_FILE: &str = "claims.toml";
/// Documents whose figures must all be in the list, and the marks around the figures.
const COVERED: [&str; 2] = ["README.md", "docs/measure/figures.md"];
const BEGIN: &str = "<!-- figures -->";
const END: &str = "<!-- /figures -->";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Claims {
    claims: Vec<Claim>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Claim {
    /// Documents, relative to the root.
    files: Vec<String>,
    /// Text of each of these documents that contains the figures.
    text: String,
    /// Directory in `results/`.
    run: String,
    values: Vec<Figure>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Figure {
    /// The figure as printed.
    printed: String,
    /// JSON pointer into the report.
    key: String,
    /// JSON pointer to a value that is subtracted.
    #[serde(default)]
    minus: Option<String>,
    /// Factor from the report's unit to the printed one.
    #[serde(default = "one")]
    scale: f64,
    /// Largest accepted difference in the printed unit; half of the last printed digit if absent.
    #[serde(default)]
    tolerance: Option<f64>,
}

fn one() -> f64 {
    1.0
}

impl Claim {
    fn is_of(&self, document: &str) -> bool {
        self.files.iter().any(|file| file == document)
    }

    /// The documents, for messages.
    fn place(&self) -> String {
        self.files.join(", ")
    }
}

/// Result of the comparison.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Number of compared figures.
    pub figures: usize,
    /// One sentence for each figure that differs, cannot be found or is not in the list.
    pub wrong: Vec<String>,
}

/// The list, a document or a run that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ClaimsError {
    #[error("cannot read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot parse {path}")]
    Toml {
        path: PathBuf,
        #[source]
        source: Box<toml::de::Error>,
    },
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error("{0} does not contain a recorded run")]
    NoRun(PathBuf),
}

/// Compares all figures of the repository at `root`.
///
/// # Errors
/// Returns [`ClaimsError`] if the list, a document or a run cannot be read. Differences are not errors.
pub fn verify(root: &Path) -> Result<Checked, ClaimsError> {
    let claims = load(root)?;
    let mut reports = BTreeMap::new();
    let mut checked = Checked::default();
    for claim in &claims.claims {
        if !reports.contains_key(&claim.run) {
            let report = report(&root.join("results").join(&claim.run))?;
            reports.insert(claim.run.clone(), report);
        }
        for file in &claim.files {
            if !read(&root.join(file))?.contains(&claim.text) {
                checked.wrong.push(format!(
                    "{file}: the text {:?} is in {CLAIMS_FILE} and not in the document",
                    claim.text
                ));
            }
        }
        for figure in &claim.values {
            checked.figures += 1;
            let wrong = figure.compare(claim, &reports[&claim.run]);
            checked.wrong.extend(
                wrong.map(|why| {
                    format!("{}: {:?}: {why} ({})", claim.place(), claim.text, claim.run)
                }),
            );
        }
    }
    checked.wrong.extend(cited::missing(root, &claims)?);
    for name in COVERED {
        let covered = read(&root.join(name))?;
        checked.wrong.extend(uncovered(name, &covered, &claims));
        checked
            .wrong
            .extend(uncovered_text(name, &covered, &claims));
    }
    checked.wrong.extend(excerpt::differing(root)?);
    Ok(checked)
}

fn load(root: &Path) -> Result<Claims, ClaimsError> {
    let path = root.join(CLAIMS_FILE);
    toml::from_str(&read(&path)?).map_err(|source| ClaimsError::Toml {
        path,
        source: Box::new(source),
    })
}

fn read(path: &Path) -> Result<String, ClaimsError> {
    fs::read_to_string(path).map_err(|source| ClaimsError::Read {
        path: path.to_owned(),
        source,
    })
}

fn report(dir: &Path) -> Result<Value, ClaimsError> {
    let recorded = RecordedRun::read(dir)?;
    let view = recorded
        .view()
        .ok_or_else(|| ClaimsError::NoRun(dir.to_owned()))?;
    Ok(serde_json::to_value(Document::new(&view)).unwrap_or_default())
}

impl Figure {
    /// The report's value in the printed unit; `None` if the report has no such number.
    fn measured(&self, report: &Value) -> Option<f64> {
        let at = |key: &str| report.pointer(key).and_then(Value::as_f64);
        let minus = self.minus.as_deref().map_or(Some(0.0), at)?;
        Some((at(&self.key)? - minus) * self.scale)
    }

    /// Digits after the decimal point.
    fn decimals(&self) -> usize {
        let after = self.printed.split_once('.').map(|(_, after)| after);
        after.map_or(0, str::len)
    }

    /// Why the figure differs from the run; `None` if it does not.
    fn compare(&self, claim: &Claim, report: &Value) -> Option<String> {
        let printed = &self.printed;
        if !claim.text.contains(printed) {
            return Some(format!("the figure {printed} is not in this text"));
        }
        let Ok(quoted) = printed.parse::<f64>() else {
            return Some(format!("{printed:?} is not a number"));
        };
        let Some(measured) = self.measured(report) else {
            return Some(format!("the report has no number at {}", self.key));
        };
        let half = 0.5 * 10_f64.powi(-i32::try_from(self.decimals()).unwrap_or(0));
        let tolerance = self.tolerance.unwrap_or(half);
        // The factor accepts a value that lies exactly between two printed digits.
        let differs = (measured - quoted).abs() > tolerance * (1.0 + 1e-9);
        differs.then(|| {
            format!(
                "{printed} is printed, {measured} was measured at {}",
                self.key
            )
        })
    }
}

/// A row of figures.
struct Row<'a> {
    measured: Vec<&'a str>,
    /// Empty if the row has no goal.
    goal: &'a str,
}

/// Rows between the marks of a document that were measured in a run. The third column is a goal, unless its heading
/// has a different name; then it is a measured value too.
fn figures(document: &str) -> Vec<Row<'_>> {
    let figures = document.split_once(BEGIN).map_or("", |(_, after)| after);
    let figures = figures
        .split_once(END)
        .map_or(figures, |(before, _)| before);
    let mut rows = Vec::new();
    let mut has_goals = true;
    for line in figures.lines().filter(|line| line.starts_with('|')) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, _, first, second, run, ..] = cells[..] else {
            continue;
        };
        if run.starts_with("run in") {
            has_goals = second == "goal";
        } else if run.contains("core-") || run == "the same" {
            let (measured, goal) = if has_goals {
                (vec![first], second)
            } else {
                (vec![first, second], "")
            };
            rows.push(Row { measured, goal });
        }
    }
    rows
}

/// One sentence for each number in the figures of a document that is not in a claim, and for each figure that is
/// wrongly marked, or not marked, as missed.
fn uncovered(name: &str, document: &str, claims: &Claims) -> Vec<String> {
    let rows = figures(document);
    let mut missing = Vec::new();
    if rows.is_empty() {
        missing.push(format!("{name} has no figures between {BEGIN} and {END}"));
    }
    for row in rows {
        for measured in &row.measured {
            for number in unlisted(name, measured, claims) {
                missing.push(format!(
                    "{name}: {number} in {measured:?} is not in {CLAIMS_FILE}"
                ));
            }
            let wrong = goals::wrong(measured, row.goal);
            missing.extend(wrong.map(|why| format!("{name}: {why}")));
        }
    }
    missing
}

/// The numbers of a cell that are in no claim of the document.
fn unlisted<'a>(name: &str, measured: &'a str, claims: &Claims) -> Vec<&'a str> {
    let mut rest = numbers(measured);
    let of_cell = claims
        .claims
        .iter()
        .filter(|claim| claim.is_of(name) && measured.contains(&claim.text));
    for figure in of_cell.flat_map(|claim| &claim.values) {
        if let Some(place) = rest.iter().position(|number| *number == figure.printed) {
            rest.remove(place);
        }
    }
    rest
}

/// One sentence for each number of milliseconds or megabytes in the text of a document, outside of its figures and
/// code blocks, that is not in a claim.
fn uncovered_text(name: &str, document: &str, claims: &Claims) -> Vec<String> {
    let mut is_code = false;
    let mut is_figures = false;
    let mut missing = Vec::new();
    for line in document.lines() {
        is_code ^= line.starts_with("```");
        is_figures = (is_figures || line.contains(BEGIN)) && !line.contains(END);
        if is_code || (is_figures && line.starts_with('|')) {
            continue;
        }
        for figure in with_units(line) {
            let of_line = |claim: &&Claim| claim.is_of(name) && line.contains(&claim.text);
            let mut listed = claims.claims.iter().filter(of_line);
            if !listed.any(|claim| claim.values.iter().any(|value| value.printed == figure)) {
                missing.push(format!(
                    "{name}: {figure} in {line:?} is not in {CLAIMS_FILE}"
                ));
            }
        }
    }
    missing
}

/// Numbers that are followed by `ms`, `MB` or `per second`.
fn with_units(line: &str) -> Vec<&str> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let pairs = words.windows(2).filter(|pair| {
        let unit = pair[1].trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
        matches!(unit, "ms" | "MB" | "per")
    });
    pairs
        .map(|pair| pair[0].trim_matches(|c: char| !c.is_ascii_digit()))
        .filter(|number| number.parse::<f64>().is_ok())
        .collect()
}

/// The numbers of a cell, without confidence levels and without `code`.
fn numbers(cell: &str) -> Vec<&str> {
    let plain = cell.split('`').step_by(2);
    let words = plain.flat_map(|text| text.split(|c: char| !c.is_ascii_digit() && c != '.'));
    let mut numbers: Vec<&str> = words
        .map(|word| word.trim_matches('.'))
        .filter(|word| !word.is_empty())
        .collect();
    if cell.contains("(95 % ") {
        let level = numbers.iter().position(|number| *number == "95");
        level.map(|level| numbers.remove(level));
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_in_the_text_needs_a_claim() {
        assert_eq!(
            with_units("A start takes 2.3 ms, 5 MB and 4 GiB."),
            ["2.3", "5"]
        );
        let none = Claims { claims: Vec::new() };
        let text = "It takes 2.3 ms.\n```\nprints 9 ms\n```\n";
        let missing = uncovered_text("README.md", text, &none);
        assert_eq!(missing.len(), 1, "{missing:?}");
        assert!(missing[0].contains("2.3"));
    }

    #[test]
    fn numbers_of_a_cell_leave_out_levels_and_code() {
        assert_eq!(
            numbers("5.02 MB (95 % 4.97 to 5.08) over 50, `a399a0e`"),
            ["5.02", "4.97", "5.08", "50"]
        );
        assert_eq!(numbers("yes, 0 of 500 failed."), ["0", "500"]);
    }
}
