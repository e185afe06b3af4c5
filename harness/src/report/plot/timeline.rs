//! Timeline of one round: a bar for each clone, from its intended start to its last stamp.

use maud::{Markup, html};
use model::StartPhase;
use stats::chart::{Frame, place};

use super::{step_legend, steps};
use crate::{event::Attempt, report::View};

/// Maximum number of bars. More would be indistinguishable.
const LINES: usize = 200;

/// Draws a typical round: the measured round whose slowest clone is the median of the slowest clones of all rounds.
pub(super) fn draw(view: &View<'_>) -> Markup {
    let Some((round, base_ns)) = typical_round(view) else {
        return html! { p { "No round was measured." } };
    };
    let mut clones: Vec<&Attempt> = view
        .summary
        .clones
        .iter()
        .filter(|a| a.round == round)
        .collect();
    clones.sort_by_key(|a| (a.intended_ns, a.arrival));
    clones.truncate(LINES);
    let end_ns = clones
        .iter()
        .filter_map(|a| end(a))
        .max()
        .unwrap_or(base_ns);
    let row = (600.0 / clones.len() as f64).clamp(2.5, 12.0);
    let height = 62.0 + row * clones.len() as f64;
    let x_max = end_ns.saturating_sub(base_ns) as f64 / 1e6;
    let frame = Frame::new(height, x_max * 1.02, 1.0);
    let content = html! {
        @for (index, clone) in clones.iter().enumerate() {
            (line(&frame, clone, base_ns, frame.top() + row * index as f64, row * 0.8))
        }
    };
    html! {
        (frame.svg("timeline of a round", &format!("ms since the base of round {round}"), "", &content))
        (step_legend(clones))
    }
}

fn line(frame: &Frame, clone: &Attempt, base_ns: u64, y: f64, thick: f64) -> Markup {
    let mut from = clone.intended_ns.saturating_sub(base_ns) as f64 / 1e6;
    html! {
        @for step in steps(clone) {
            @let start = from;
            @let ms = step.ns as f64 / 1e6;
            @let () = from += ms;
            rect x=(place(frame.x(start))) y=(place(y)) height=(place(thick))
                width=(place(frame.x(start + ms) - frame.x(start))) style={ "fill:" (step.colour()) } {}
        }
        @if clone.failure.is_some() {
            text class="failed" x=(place(frame.x(from) + 3.0)) y=(place(y + thick)) { "failed" }
        }
    }
}

fn end(clone: &Attempt) -> Option<u64> {
    clone.timeline.iter().map(|(_, at)| at).max()
}

fn typical_round(view: &View<'_>) -> Option<(u32, u64)> {
    let mut rounds: Vec<(Option<u64>, u32, u64)> = view
        .summary
        .rounds
        .iter()
        .map(|(round, times)| {
            let own = view.summary.clones.iter().filter(|a| a.round == *round);
            let slowest = own
                .filter_map(|a| a.latency_ns(StartPhase::FirstExec))
                .max();
            (slowest, *round, times.base_ns)
        })
        .collect();
    rounds.sort_unstable();
    rounds
        .get(rounds.len().saturating_sub(1) / 2)
        .map(|(_, round, base)| (*round, *base))
}
