//! The report as one HTML page without scripts and external files, for light and dark mode.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::{
    View, density,
    document::{Document, PhaseDocument},
    plot,
    terminal::{mb, milliseconds, quantity},
};
use crate::scenario::Quantile;

const STYLE: &str = include_str!("html.css");

#[must_use]
pub fn render(view: &View<'_>) -> String {
    let d = Document::new(view);
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (d.scenario) " – cube-bench" }
                style { (PreEscaped(STYLE)) }
            }
            body {
                (head(view, &d))
                @if let Some(peers) = &d.peers { (peers.html()) }
                (gates(view))
                section { h2 { "Latency" } (latency(&d)) }
                (costs(&d))
                (ratios(&d))
                (faults(&d))
                (ramp(view, &d))
                section { h2 { "Cumulative distribution" } (plot::cdf::draw(view)) }
                section { h2 { "Phases of a start" } (plot::ladder::draw(view)) }
                section { h2 { "A typical round" } (plot::timeline::draw(view)) }
                @if d.memory.is_some() {
                    section { h2 { "Memory" } (plot::memory::draw(view)) (ledger(&d)) }
                }
                (failures(view))
                (host(view, &d))
            }
        }
    };
    page.into_string()
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

fn gates(view: &View<'_>) -> Markup {
    html! {
        @if !view.gates.is_empty() {
            section {
                h2 { "Gates" }
                table {
                    thead { tr { th { "verdict" } th { "gate" } th.n { "measured" } th.n { "limit" } th.n { "n" } th { "reason" } } }
                    tbody {
                        @for gate in &view.gates {
                            tr {
                                td.(gate.verdict.word()) { (gate.verdict.word()) }
                                td { (gate.name) br; code { (gate.metric) } }
                                td.n { (quantity(gate.measured, &gate.unit)) }
                                td.n { (quantity(Some(gate.limit), &gate.unit)) }
                                td.n { (gate.n) }
                                td { (gate.reason) }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn latency(d: &Document) -> Markup {
    html! {
        table {
            thead { tr { th { "ms from the intended start" } th.n { "n" } th.n { "P50" } th.n { "P95" } th.n { "P99" } th.n { "max" } th.n { "P95, 95 % interval" } } }
            tbody {
                @for (name, p) in d.rows() {
                    tr {
                        td { (name) }
                        td.n { (p.n) }
                        td.n { (cell(p, p.p50_ms, Quantile::P50)) }
                        td.n { (cell(p, p.p95_ms, Quantile::P95)) }
                        td.n { (cell(p, p.p99_ms, Quantile::P99)) }
                        td.n { (cell(p, p.max_ms, Quantile::Max)) }
                        td.n { @if let Some([low, high]) = p.p95_ci95_ms { (milliseconds(low)) " – " (milliseconds(high)) } }
                    }
                }
            }
        }
    }
}

/// Plots each start over the number of living sandboxes or over time. A single quantile over all of them would hide
/// a slow end.
fn ramp(view: &View<'_>, d: &Document) -> Markup {
    html! {
        @if let Some(plot) = plot::ramp::draw(view) {
            section {
                h2 { @if d.levels.is_empty() { "Ramp" } @else { "Density" } }
                (plot)
                @if !d.levels.is_empty() { (density::table(&d.levels)) }
            }
        }
    }
}

fn costs(d: &Document) -> Markup {
    let rows = d.cost_rows();
    html! {
        @if !rows.is_empty() {
            section {
                h2 { "Cost" }
                table { tbody { @for (name, value) in rows { tr { td { (name) } td { (value) } } } } }
            }
        }
    }
}

fn ratios(d: &Document) -> Markup {
    html! {
        @if let Some(names) = d.ratio_columns() {
            section {
                h2 { "Ratios of turns" }
                table {
                    thead { tr { @for name in names { th { (name) } } } }
                    tbody { @for row in d.ratio_rows() { tr { @for cell in row { td { (cell) } } } } }
                }
            }
        }
    }
}

fn faults(d: &Document) -> Markup {
    let rows = d.fault_rows();
    html! {
        @if !rows.is_empty() {
            section {
                h2 { "Page faults" }
                table {
                    thead { tr { th { "mean of one VMM" } th.n {} th.n { (d.beside_name.as_deref().unwrap_or_default()) } } }
                    tbody {
                        @for (name, ours, theirs) in rows {
                            tr { td { (name) } td.n { (ours) } td.n { (theirs) } }
                        }
                    }
                }
            }
        }
    }
}

/// Formats a quantile: milliseconds, `failed`, or `n/a` with too few samples.
pub(super) fn cell(p: &PhaseDocument, ms: Option<f64>, quantile: Quantile) -> String {
    match ms {
        Some(ms) => milliseconds(ms),
        None if p.n >= quantile.needs() => "failed".to_owned(),
        None => format!("n/a (n = {})", p.n),
    }
}

fn ledger(d: &Document) -> Markup {
    html! {
        @if let Some(memory) = &d.memory {
            p {
                "One more clone takes " strong { (mb(memory.slope_bytes_per_clone)) }
                @if let Some([low, high]) = memory.slope_ci95 {
                    " (95 % " (mb(Some(low))) " to " (mb(Some(high))) ")"
                }
                ". The lines up to the residue add up to this number."
            }
            table {
                tbody {
                    @for (name, bytes) in memory.ledger.parts() {
                        tr { td { (name) } td.n { (mb(bytes)) } }
                    }
                    @for (name, value) in memory.rows() {
                        tr { td { (name) } td { (value) } }
                    }
                }
            }
        }
    }
}

fn failures(view: &View<'_>) -> Markup {
    let counts = view.summary.failures();
    let examples = view.summary.failure_examples();
    html! {
        @if !examples.is_empty() {
            section {
                h2 { "Failures" }
                table {
                    thead { tr { th { "cause" } th.n { "measured starts" } th { "first message" } } }
                    tbody {
                        @for (cause, message) in examples {
                            tr {
                                td.fail { (cause.name()) }
                                td.n { (counts.get(&cause).copied().unwrap_or(0)) }
                                td { (message) }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn host(view: &View<'_>, d: &Document) -> Markup {
    let facts = view.facts;
    let or_unknown = |text: &Option<String>| text.clone().unwrap_or_else(|| "unknown".to_owned());
    let rows = [
        ("CPU", or_unknown(&facts.cpu_model)),
        ("kernel", or_unknown(&facts.kernel)),
        ("probe", facts.probe.why.clone()),
        ("clock source", or_unknown(&facts.clock_source)),
        (
            "transparent huge pages",
            or_unknown(&facts.transparent_huge_pages),
        ),
        (
            "stolen CPU time",
            d.host
                .steal_share
                .map_or("unknown".to_owned(), |s| format!("{:.2} %", s * 100.0)),
        ),
        ("commit", or_unknown(&facts.commit)),
        ("programs", d.host.programs()),
        (
            "load before the run",
            facts
                .load_1min
                .map_or("unknown".to_owned(), |load| format!("{load:.2}")),
        ),
        (
            "API",
            facts.endpoint.clone().unwrap_or_else(|| "none".to_owned()),
        ),
        (
            "page cache",
            facts
                .template
                .as_ref()
                .map_or(String::new(), |t| t.page_cache.clone()),
        ),
    ];
    html! {
        section {
            h2 { "Host" }
            @if !d.host.grade_reasons.is_empty() {
                p { "Graded " (d.host.grade) " because:" }
                ul { @for reason in &d.host.grade_reasons { li { (reason) } } }
            }
            @if let Some(interference) = &d.interference {
                ul { @for sentence in interference.sentences() { li { (sentence) } } }
            }
            table { tbody { @for (name, value) in rows { tr { td { (name) } td { (value) } } } } }
            p { "Reproduce: " code { (view.reproduce) } }
        }
    }
}
