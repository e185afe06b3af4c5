//! Cumulative distribution of latencies.

use maud::{Markup, html};
use model::StartPhase;
use stats::chart::{Frame, legend, place};

use super::phase_colour;
use crate::{
    report::View,
    scenario::{Limit, Metric},
    summary::fold,
};
use stats::quantile::Samples;

struct Curve {
    name: String,
    colour: String,
    samples: Samples,
}

/// Draws curves of `replied` and `first_exec` for each origin and a curve of the baseline. The limits of gates on
/// phases are vertical lines.
pub(super) fn draw(view: &View<'_>) -> Markup {
    let curves = curves(view);
    let longest = curves
        .iter()
        .filter_map(|c| c.samples.finite().last())
        .max()
        .copied()
        .unwrap_or(0);
    let limits: Vec<f64> = limits_ms(view);
    let x_max = limits.iter().copied().fold(longest as f64 / 1e6, f64::max) * 1.02;
    let frame = Frame::new(320.0, x_max, 100.0);
    let entries: Vec<(String, String)> = curves
        .iter()
        .map(|c| {
            (
                format!("{} (n = {})", c.name, c.samples.n()),
                c.colour.clone(),
            )
        })
        .collect();
    let content = html! {
        @for limit in limits {
            @let x = place(frame.x(limit));
            line class="limit" x1=(x) x2=(x) y1=(place(frame.y(100.0))) y2=(place(frame.y(0.0))) {}
        }
        @for curve in &curves {
            path class="curve" style={ "stroke:" (curve.colour) } d=(path(&frame, &curve.samples)) {}
        }
    };
    html! {
        (frame.svg("cumulative distribution of latencies", "ms from the intended start", "% of starts", &content))
        (legend(&entries))
    }
}

fn curves(view: &View<'_>) -> Vec<Curve> {
    let mut kinds: Vec<_> = view
        .summary
        .by_start()
        .into_iter()
        .map(|(kind, clones)| (format!("{} ", fold::start_name(kind)), clones))
        .collect();
    if kinds.is_empty() {
        kinds.push((String::new(), view.summary.clones.iter().collect()));
    }
    let mut curves = Vec::new();
    for (kind, clones) in kinds {
        for (phase, samples) in fold::ladder(&clones) {
            if matches!(phase, StartPhase::Replied | StartPhase::FirstExec) {
                curves.push(Curve {
                    name: format!("{kind}{}", phase.name()),
                    colour: phase_colour(phase),
                    samples,
                });
            }
        }
    }
    curves.push(Curve {
        name: "host process".to_owned(),
        colour: "var(--wait)".to_owned(),
        samples: view.summary.baseline_samples(),
    });
    curves.retain(|c| !c.samples.finite().is_empty());
    curves
}

fn limits_ms(view: &View<'_>) -> Vec<f64> {
    view.scenario
        .gates
        .iter()
        .filter_map(|gate| match (gate.metric, gate.limit) {
            (Metric::Phase(..), Limit::Nanoseconds(ns)) => Some(ns as f64 / 1e6),
            _ => None,
        })
        .collect()
}

/// The curve of the finite samples. It ends below 100 % if starts failed.
fn path(frame: &Frame, samples: &Samples) -> String {
    let finite = samples.finite().iter();
    let ms: Vec<f64> = finite.map(|ns| *ns as f64 / 1e6).collect();
    frame.distribution(&ms, samples.n())
}
