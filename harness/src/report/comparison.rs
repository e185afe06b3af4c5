//! HTML page that compares two recorded runs: verdicts, and both distributions in one plot.

use maud::{Markup, html};
use model::StartPhase;
use stats::chart::{Frame, legend};

use super::html;
use crate::{
    compare::{Comparison, Side},
    summary::fold::Summary,
};

/// Colours of the first and the second run.
const COLOURS: [&str; 2] = ["var(--p1)", "var(--p7)"];

/// Renders the page. `names` are the names of the runs.
#[must_use]
pub fn render(comparison: &Comparison, sides: [Side<'_>; 2], names: [&str; 2]) -> String {
    let [a, b] = sides;
    html::page(
        &format!("{} – comparison", comparison.scenario),
        &html! {
            header {
                h1 { (comparison.scenario) }
                p { "B against A; an increase of more than " (format!("{:.0}", comparison.margin * 100.0)) " % fails." }
                p { "A: " code { (names[0]) } br; "B: " code { (names[1]) } }
            }
            (html::section(&comparison.section()))
            @for phase in [StartPhase::FirstExec, StartPhase::Replied] {
                @if let Some(plot) = distributions(phase, [a.summary, b.summary]) {
                    section { h2 { "Cumulative distribution of " (phase.name()) } (plot) }
                }
            }
        },
    )
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
