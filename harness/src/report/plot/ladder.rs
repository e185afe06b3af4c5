//! Stacked bars of the steps of a start: one bar for the starts near the median, one for the starts near the 95th
//! percentile, and one for the slowest start.

use std::collections::BTreeMap;

use maud::{Markup, html};
use model::StartPhase;
use stats::chart::{Frame, place};

use super::{Step, step_legend, steps};
use crate::{event::Attempt, report::View};

/// One bar: the mean duration of each step over several starts.
struct Bar {
    name: &'static str,
    steps: Vec<(Step, f64)>,
}

/// Draws the bars from clones that reached first exec.
pub(super) fn draw(view: &View<'_>) -> Markup {
    let mut done: Vec<&Attempt> = view
        .summary
        .clones
        .iter()
        .filter(|a| a.latency_ns(StartPhase::FirstExec).is_some())
        .collect();
    done.sort_by_key(|a| a.latency_ns(StartPhase::FirstExec));
    if done.is_empty() {
        return html! { p { "No start reached first exec." } };
    }
    let bars = bars(&done);
    let total = |bar: &Bar| bar.steps.iter().map(|(_, ms)| ms).sum::<f64>();
    let x_max = bars.iter().map(total).fold(0.0, f64::max) * 1.02;
    let height = 62.0 + 34.0 * bars.len() as f64;
    let frame = Frame::new(height, x_max, 1.0);
    let content = html! {
        @for (row, bar) in bars.iter().enumerate() {
            (draw_bar(&frame, bar, 16.0 + 34.0 * row as f64))
        }
    };
    html! {
        (frame.svg("steps of a start", "ms from the intended start", "", &content))
        (step_legend(done))
    }
}

fn draw_bar(frame: &Frame, bar: &Bar, y: f64) -> Markup {
    let mut from = 0.0;
    let segments: Vec<(f64, f64, Step)> = bar
        .steps
        .iter()
        .map(|(step, ms)| {
            let start = from;
            from += ms;
            (start, *ms, *step)
        })
        .collect();
    html! {
        text class="tick" x=(frame.x(0.0) - 6.0) y=(y + 17.0) text-anchor="end" { (bar.name) }
        @for (start, ms, step) in segments {
            rect x=(place(frame.x(start))) y=(y) height="24"
                width=(place(frame.x(start + ms) - frame.x(start))) style={ "fill:" (step.colour()) } {
                title { (step.name()) ": " (format!("{ms:.2}")) " ms" }
            }
        }
    }
}

/// `done` must be sorted by latency and not be empty. The bar of a quantile averages the tenth of all starts that
/// is nearest to it. The P95 bar needs 100 starts.
fn bars(done: &[&Attempt]) -> Vec<Bar> {
    let around = |centre: usize| {
        let half = (done.len() / 20).max(1);
        let from = centre.saturating_sub(half);
        &done[from..(centre + half).min(done.len())]
    };
    let mut bars = vec![Bar {
        name: "P50",
        steps: mean(around(done.len() / 2)),
    }];
    if done.len() >= 100 {
        bars.push(Bar {
            name: "P95",
            steps: mean(around(done.len() * 95 / 100)),
        });
    }
    bars.push(Bar {
        name: "slowest",
        steps: mean(&done[done.len() - 1..]),
    });
    bars
}

/// Mean milliseconds of each step up to first exec, in the order of the phases.
fn mean(attempts: &[&Attempt]) -> Vec<(Step, f64)> {
    let mut sums: BTreeMap<Option<StartPhase>, u64> = BTreeMap::new();
    for attempt in attempts {
        for step in steps(attempt) {
            *sums.entry(step.until).or_insert(0) += step.ns;
        }
    }
    let n = attempts.len() as f64;
    sums.into_iter()
        .map(|(until, ns)| (Step { until, ns }, ns as f64 / 1e6 / n))
        .collect()
}
