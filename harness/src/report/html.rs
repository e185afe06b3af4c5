//! The report as one HTML page without scripts and external files, for light and dark mode.

use std::time::{Duration, UNIX_EPOCH};

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::{
    View,
    document::Document,
    plot,
    section::{Column, Section},
    sections,
};

const STYLE: &str = include_str!("html.css");

#[must_use]
pub fn render(view: &View<'_>) -> String {
    let d = Document::new(view);
    page(
        &d.scenario,
        &html! {
            (head(view, &d))
            @if !view.gates.is_empty() { (section(&sections::gates(view, &d))) }
            @for results in sections::results(view, &d) { (section(&results)) }
            @for (title, drawing) in plot::all(view, &d) { section id=(anchor(title)) { h2 { (title) } (drawing) } }
            (section(&host(view, &d)))
            p { "Reproduce: " code { (view.reproduce) } }
        },
    )
}

/// A complete page.
pub(super) fn page(title: &str, body: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) " – cube-bench" }
                style { (PreEscaped(STYLE)) }
            }
            body { (body) }
        }
    };
    page.into_string()
}

/// A section with its heading. It and each of its rows have an anchor.
pub(super) fn section(section: &Section) -> Markup {
    let id = anchor(&section.title);
    html! {
        section id=(id) { h2 { (section.title) } (rows(section, Some(&id))) }
    }
}

/// The name of a figure in the address of a page: its words, without values that follow a colon or a bracket.
fn anchor(title: &str) -> String {
    let name = title.split_once([':', '(']).map_or(title, |(name, _)| name);
    words(name)
}

fn words(text: &str) -> String {
    let words = text.split(|c: char| !c.is_alphanumeric());
    let words: Vec<String> = words
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
        .collect();
    words.join("-")
}

/// The table and the remarks of a section.
pub(super) fn table(section: &Section) -> Markup {
    rows(section, None)
}

/// `anchors` is the prefix of the anchors of the rows.
fn rows(section: &Section, anchors: Option<&str>) -> Markup {
    let columns = &section.columns;
    let id = |row: &[String]| anchors.map(|prefix| format!("{prefix}.{}", words(&row[0])));
    html! {
        @if !section.rows.is_empty() {
            table {
                @if section.has_header() {
                    thead { tr { th {} @for column in columns { th.n[is_number(column)] { (column.title()) } } } }
                }
                tbody {
                    @for row in &section.rows {
                        tr id=[id(row)] { td { (linked(&row[0], id(row))) } @for (column, cell) in columns.iter().zip(&row[1..]) { (cell_of(column, cell)) } }
                    }
                }
            }
        }
        @if !section.notes.is_empty() { ul { @for note in &section.notes { li { (note) } } } }
    }
}

/// A name that links to its own anchor, so that a reader can copy the address.
fn linked(name: &str, id: Option<String>) -> Markup {
    html! { @if let Some(id) = id { a href={ "#" (id) } { (name) } } @else { (name) } }
}

fn is_number(column: &Column) -> bool {
    matches!(column, Column::Number(_))
}

fn cell_of(column: &Column, cell: &str) -> Markup {
    match column {
        Column::Number(_) => html! { td.n { (cell) } },
        Column::Text(_) | Column::Remark(_) => html! { td { (cell) } },
        Column::Verdict(_) => html! { td.(cell) { (cell) } },
    }
}

fn head(view: &View<'_>, d: &Document) -> Markup {
    html! {
        header {
            h1 { (d.scenario) }
            p { (view.scenario.description) }
            p.facts {
                span { "n = " (d.n) }
                span { (date(d.started_unix_ms)) }
                span.{ "grade " (d.host.grade) } { "host graded " (d.host.grade) }
                @if d.ended != "complete" { span.fail { "ended early: " (d.ended) } }
            }
            p.facts { span { (d.place()) } }
            p.facts { span { "build: " (build(d)) } }
            @if let Some(record) = &d.record_sha256 {
                p.facts { span { "record: SHA-256 " code { (record) } } }
                p.facts {
                    span {
                        "Verify this page: " code { "cube-bench check DIR" } " recomputes report.json from the record in "
                        "DIR and prints its hash; " code { "cube-bench report DIR" } " writes this page again."
                    }
                }
            }
        }
        section.tiles {
            @for (kind, p) in d.first_execs() {
                (tile(&format!("{kind}first exec P50"), p.p50_ms, "ms"))
                (tile(&format!("{kind}first exec P95"), p.p95_ms, "ms"))
                (tile(&format!("{kind}first exec P99"), p.p99_ms, "ms"))
            }
            @if d.cost.drain_per_s.is_some() { (tile("drain rate", d.cost.drain_per_s, "per second")) }
            (tile("sustainable rate", d.cost.sustainable_per_s, "per second"))
            @if let Some(memory) = &d.memory {
                (tile("one more clone", memory.slope_bytes_per_clone.map(|b| b / 1e6), "MB"))
            }
        }
    }
}

/// The instant of a start in UTC.
pub(super) fn date(unix_ms: u64) -> String {
    let at = UNIX_EPOCH + Duration::from_millis(unix_ms);
    humantime::format_rfc3339_seconds(at).to_string()
}

/// The measured programs, or at least the commit of the source tree.
fn build(d: &Document) -> String {
    let commit = d.host.commit.as_deref().unwrap_or("unknown commit");
    if d.host.binaries.is_empty() {
        return commit.to_owned();
    }
    format!("{} ({commit})", d.host.programs())
}

fn tile(name: &str, value: Option<f64>, unit: &str) -> Markup {
    html! {
        div id=(words(name)) {
            small { (name) }
            strong { @match value { Some(v) => (format!("{v:.1}")), None => "n/a" } }
            @if value.is_some() { " " (unit) }
        }
    }
}

/// The facts about the host, and why it has its grade.
fn host(view: &View<'_>, d: &Document) -> Section {
    let facts = view.facts;
    let or_unknown = |text: &Option<String>| text.clone().unwrap_or_else(|| "unknown".to_owned());
    let load = facts.load_1min.map(|load| format!("{load:.2}"));
    let steal = d.host.steal_share;
    let steal = steal.map(|share| format!("{:.2} %", share * 100.0));
    let template = facts.template.as_ref();
    let title = match d.target {
        Some(_) => "host of the client",
        None => "host",
    };
    let rows = [
        ("CPU", or_unknown(&facts.cpu_model)),
        ("kernel", or_unknown(&facts.kernel)),
        (
            "probe",
            match d.target {
                Some(_) => "the sandboxes run elsewhere".to_owned(),
                None => facts.probe.why.clone(),
            },
        ),
        ("clock source", or_unknown(&facts.clock_source)),
        (
            "transparent huge pages",
            or_unknown(&facts.transparent_huge_pages),
        ),
        ("stolen CPU time", or_unknown(&steal)),
        ("commit", or_unknown(&facts.commit)),
        ("programs", d.host.programs()),
        ("load before the run", or_unknown(&load)),
        (
            "API",
            facts.endpoint.clone().unwrap_or_else(|| "none".to_owned()),
        ),
        (
            "page cache",
            template.map_or(String::new(), |t| t.page_cache.clone()),
        ),
    ];
    Section {
        notes: d.host.grade_reasons.clone(),
        ..Section::list(title, rows.map(|(name, value)| (name.to_owned(), value)))
    }
}
