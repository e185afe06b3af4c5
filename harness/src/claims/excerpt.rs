//! The shortened reports that documents show.

use std::path::Path;

use super::{ClaimsError, cited::documents, read};
use crate::{report::terminal, session::RecordedRun};

/// Text before the name of the run whose report is in the next code block.
const SHOWS: &str = "Shortened report of a published run (`results/";

/// One sentence for each line of a report in `docs/` that is not in the report of its run. Lines of dots mark
/// omitted lines.
pub(super) fn differing(root: &Path) -> Result<Vec<String>, ClaimsError> {
    let mut differing = Vec::new();
    for file in documents(root)? {
        differing.extend(of_document(root, &file, &read(&root.join(&file))?)?);
    }
    Ok(differing)
}

fn of_document(root: &Path, file: &str, document: &str) -> Result<Vec<String>, ClaimsError> {
    let Some((_, after)) = document.split_once(SHOWS) else {
        return Ok(Vec::new());
    };
    let run = after.split('`').next().unwrap_or_default();
    let shown = after.split("```\n").nth(1).unwrap_or_default();
    let dir = root.join("results").join(run);
    let recorded = RecordedRun::read(&dir)?;
    let view = recorded.view().ok_or(ClaimsError::NoRun(dir))?;
    let report = terminal::render(&view);
    let report: Vec<&str> = report.lines().map(str::trim_end).collect();
    let lines = shown.lines().map(str::trim_end);
    let missing = lines.filter(|line| line.trim() != "…" && !report.contains(line));
    Ok(missing
        .map(|line| format!("{file}: the report of {run} has no line {line:?}"))
        .collect())
}
