//! The board: runs of many hosts and platforms on one static page. A section for each question, which is a scenario; a
//! row for each run, ordered by host class and date.
//!
//! Unlike the history, which shows one host over time, the board compares nothing by itself: rows of different host
//! classes stand beside each other with their intervals.

use maud::html;
use stats::quantile::Quantile;

use super::{
    document::{CLONE_ROW, Document},
    history::Entry,
    html::{self, date},
    memory::MemoryDocument,
    phase::PhaseDocument,
    section::{Column, Section},
};
use crate::check::Division;

/// Renders the page.
#[must_use]
pub fn render(entries: &[Entry]) -> String {
    let mut runs: Vec<(&Document, &Entry)> = entries
        .iter()
        .filter_map(|entry| Some((entry.run.as_ref().ok()?, entry)))
        .collect();
    runs.sort_by_key(|(d, _)| (d.scenario.clone(), d.place(), d.started_unix_ms));
    let unread = entries.iter();
    let unread = unread.filter_map(|entry| Some((&entry.name, entry.run.as_ref().err()?)));
    let body = html! {
        header {
            h1 { "Board" }
            p { (runs.len()) " recorded runs, a section for each question. Times are ms from the intended start, P50 / P95 with the 95 % "
                "interval of P95. Warm: from a pool. Restored: restored for the create, with the template in the page cache. Cold: "
                "with the template dropped from the page cache. Compare rows of one host class only." }
        }
        @for question in runs.chunk_by(|a, b| a.0.scenario == b.0.scenario) { (html::section(&section(question))) }
        @for (name, why) in unread { p { code { (name) } ": " (why) } }
    };
    html::page("Board", &body)
}

fn section(runs: &[(&Document, &Entry)]) -> Section {
    let title = runs
        .first()
        .map_or(String::new(), |(d, _)| d.scenario.clone());
    let number = |title: &str| Column::Number(title.to_owned());
    let text = |title: &str| Column::Text(title.to_owned());
    Section {
        title,
        columns: vec![
            text("date"),
            text("division"),
            text("grade"),
            number("n (failed)"),
            number("create answered, warm"),
            number("create answered, restored"),
            number("first output, warm"),
            number("first output, restored"),
            number("first output, cold"),
            number("memory: MemAvailable lost per additional sandbox, MB"),
            text("record"),
        ],
        rows: runs.iter().map(|(d, entry)| row(d, entry)).collect(),
        notes: Vec::new(),
    }
}

fn row(d: &Document, entry: &Entry) -> Vec<String> {
    let failed: u64 = d.failures.values().sum();
    let division = match &entry.division {
        Some(Division::Closed { .. }) => "closed",
        Some(Division::Open { .. }) => "open",
        None => "unknown",
    };
    let record = d.record_sha256.as_deref().unwrap_or_default();
    let [created, first] = ["replied", "first_exec"];
    vec![
        d.place(),
        date(d.started_unix_ms),
        division.to_owned(),
        d.host.grade.clone(),
        format!("{} ({failed})", d.n),
        cell(warm(d, created)),
        cell(restored(d, created)),
        cell(warm(d, first)),
        cell(restored(d, first)),
        cell(d.cold.as_ref()),
        d.memory.as_ref().map_or(String::new(), megabytes),
        record.chars().take(16).collect(),
    ]
}

fn warm<'a>(d: &'a Document, phase: &str) -> Option<&'a PhaseDocument> {
    d.starts.get("warm")?.get(phase)
}

/// Of the server if it restores sandboxes, else of clones without a server.
fn restored<'a>(d: &'a Document, phase: &str) -> Option<&'a PhaseDocument> {
    let alone = d.start_name.as_deref() == Some(CLONE_ROW);
    let is_direct = d.beside_name.as_deref() == Some("direct");
    let rows = [
        d.starts.get("restored"),
        Some(&d.phases).filter(|_| alone),
        d.beside.as_ref().filter(|_| is_direct),
    ];
    rows.into_iter()
        .flatten()
        .find_map(|phases| phases.get(phase))
}

/// Empty for a value that the run does not have.
fn cell(phase: Option<&PhaseDocument>) -> String {
    phase.map_or(String::new(), |p| {
        let [p50, p95] = [Quantile::P50, Quantile::P95].map(|quantile| p.cell(quantile));
        match p.p95_interval() {
            interval if interval.is_empty() => format!("{p50} / {p95}"),
            interval => format!("{p50} / {p95} ({interval})"),
        }
    })
}

fn megabytes(memory: &MemoryDocument) -> String {
    let mb = |bytes: f64| format!("{:.3}", bytes / 1e6);
    let slope = memory.slope_bytes_per_clone.map_or(String::new(), mb);
    match memory.slope_ci95 {
        Some([low, high]) => format!("{slope} ({}–{})", mb(low), mb(high)),
        None => slope,
    }
}
