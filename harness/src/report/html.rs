//! The report as one HTML page without scripts and external files, for light and dark mode.

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
            @for (title, drawing) in plot::all(view, &d) { section { h2 { (title) } (drawing) } }
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

/// A section with its heading.
pub(super) fn section(section: &Section) -> Markup {
    html! {
        section { h2 { (section.title) } (table(section)) }
    }
}

/// The table and the remarks of a section.
pub(super) fn table(section: &Section) -> Markup {
    let columns = &section.columns;
    html! {
        @if !section.rows.is_empty() {
            table {
                @if section.has_header() {
                    thead { tr { th {} @for column in columns { th.n[is_number(column)] { (column.title()) } } } }
                }
                tbody {
                    @for row in &section.rows {
                        tr { td { (row[0]) } @for (column, cell) in columns.iter().zip(&row[1..]) { (cell_of(column, cell)) } }
                    }
                }
            }
        }
        @if !section.notes.is_empty() { ul { @for note in &section.notes { li { (note) } } } }
    }
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
                span.{ "grade " (d.host.grade) } { "host graded " (d.host.grade) }
                span { "platform " (d.host.platform.as_deref().unwrap_or("unknown")) }
                span { (d.host.cores) " cores" }
                @if d.ended != "complete" { span.fail { "ended early: " (d.ended) } }
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

fn tile(name: &str, value: Option<f64>, unit: &str) -> Markup {
    html! {
        div {
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
    let rows = [
        ("CPU", or_unknown(&facts.cpu_model)),
        ("kernel", or_unknown(&facts.kernel)),
        ("probe", facts.probe.why.clone()),
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
        ..Section::list("host", rows.map(|(name, value)| (name.to_owned(), value)))
    }
}
