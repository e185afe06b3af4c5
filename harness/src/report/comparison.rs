//! HTML page that compares two recorded runs: verdicts, and both distributions in one plot.

use maud::{DOCTYPE, Markup, PreEscaped, html};
use model::StartPhase;
use stats::chart::{Frame, legend};

use super::terminal::milliseconds;
use crate::{
    compare::{Comparison, Side},
    summary::fold::Summary,
};

const STYLE: &str = include_str!("html.css");
/// Colours of the first and the second run.
const COLOURS: [&str; 2] = ["var(--p1)", "var(--p7)"];

/// Renders the page. `names` are the names of the runs.
#[must_use]
pub fn render(comparison: &Comparison, sides: [Side<'_>; 2], names: [&str; 2]) -> String {
    let [a, b] = sides;
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (comparison.scenario) " – comparison – cube-bench" }
                style { (PreEscaped(STYLE)) }
            }
            body {
                header {
                    h1 { (comparison.scenario) }
                    p { "B against A; a slowdown of more than " (format!("{:.0}", comparison.margin * 100.0)) " % fails." }
                    p { "A: " code { (names[0]) } br; "B: " code { (names[1]) } }
                }
                section { h2 { "Verdicts" } (verdicts(comparison)) }
                @for phase in [StartPhase::FirstExec, StartPhase::Replied] {
                    @if let Some(plot) = distributions(phase, [a.summary, b.summary]) {
                        section { h2 { "Cumulative distribution of " (phase.name()) } (plot) }
                    }
                }
                section {
                    p { "The runs were not interleaved: p does not account for changes of the host between them. "
                        code { "cube-bench ab" } " compares two builds in one run." }
                }
            }
        }
    };
    page.into_string()
}

fn verdicts(comparison: &Comparison) -> Markup {
    let f = &comparison.failures;
    html! {
        table {
            thead { tr { th { "verdict" } th { "metric" } th.n { "A" } th.n { "B" } th.n { "change" } th.n { "p" } th.n { "detectable" } th.n { "n" } } }
            tbody {
                tr {
                    td.(class(f.verdict.name())) { (f.verdict.name()) }
                    td { "failed starts" }
                    td.n { (f.a) } td.n { (f.b) } td.n {} td.n { (format!("{:.4}", f.p)) } td.n {}
                    td.n { (f.a_n) " / " (f.b_n) }
                }
                @for m in &comparison.metrics {
                    tr {
                        td.(class(m.verdict.name())) { (m.verdict.name()) }
                        td { code { (m.metric) } }
                        td.n { (milliseconds(m.a_ms)) " ms" }
                        td.n { @match m.b_ms { Some(ms) => { (milliseconds(ms)) " ms" } None => "failed" } }
                        td.n { @if let Some(ms) = m.b_ms { (format!("{:+.1} %", (ms / m.a_ms - 1.0) * 100.0)) } }
                        td.n { (format!("{:.4}", m.p_adjusted)) }
                        td.n { (milliseconds(m.detectable_ms)) " ms" }
                        td.n { (m.a_n) " / " (m.b_n) }
                    }
                }
            }
        }
        @if comparison.metrics.is_empty() { p { "No quantile has enough samples in both runs." } }
    }
}

/// CSS class for the verdict's colour, as for gates.
fn class(verdict: &str) -> &str {
    match verdict {
        "pass" => "met",
        "fail" => "MISSED",
        other => other,
    }
}

/// Both distributions; `None` if neither run reached the phase.
fn distributions(phase: StartPhase, runs: [&Summary; 2]) -> Option<Markup> {
    let samples = runs.map(|run| run.phase(phase));
    let longest = samples.iter().filter_map(|s| s.finite().last()).max()?;
    let frame = Frame::new(320.0, *longest as f64 / 1e6 * 1.02, 100.0);
    let curves = samples.iter().zip(COLOURS).map(|(samples, colour)| {
        let ms: Vec<f64> = samples.finite().iter().map(|ns| *ns as f64 / 1e6).collect();
        (frame.distribution(&ms, samples.n()), colour)
    });
    let content = html! {
        @for (path, colour) in curves {
            path class="curve" style={ "stroke:" (colour) } d=(path) {}
        }
    };
    let entries: Vec<(String, String)> = ["A", "B"]
        .iter()
        .zip(&samples)
        .zip(COLOURS)
        .map(|((name, samples), colour)| {
            (format!("{name} (n = {})", samples.n()), colour.to_owned())
        })
        .collect();
    Some(html! {
        (frame.svg("cumulative distributions of two runs", "ms from the intended start", "% of starts", &content))
        (legend(&entries))
    })
}
