//! The plots of a report. Colours are CSS variables, so that the same drawing works in light and dark mode.

mod cdf;
mod ladder;
mod memory;
mod ramp;
mod systems;
mod timeline;

use maud::Markup;
use model::StartPhase;
use stats::chart::legend;

use super::{View, document::Document};
use crate::event::Attempt;

/// All plots of a run with their titles.
pub(super) fn all(view: &View<'_>, d: &Document) -> Vec<(&'static str, Markup)> {
    // A single quantile over starts that slow down would hide a slow end.
    let ramp = if d.levels.is_empty() {
        "Ramp"
    } else {
        "Density"
    };
    let plots = [
        ("Systems", d.peers.as_ref().and_then(systems::draw)),
        (ramp, ramp::draw(view)),
        ("Cumulative distribution", Some(cdf::draw(view))),
        ("Phases of a start", Some(ladder::draw(view))),
        ("A typical round", Some(timeline::draw(view))),
        ("Memory", d.memory.as_ref().map(|_| memory::draw(view))),
    ];
    let plots = plots.into_iter();
    plots
        .filter_map(|(title, plot)| Some((title, plot?)))
        .collect()
}

/// A step of a start: the time between two consecutive stamps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    /// Phase at the end of the step; `None` for the wait between intended and actual start.
    until: Option<StartPhase>,
    ns: u64,
}

impl Step {
    fn name(self) -> &'static str {
        self.until.map_or("waiting to start", StartPhase::name)
    }

    fn colour(self) -> String {
        match self.until {
            None => "var(--wait)".to_owned(),
            Some(phase) => phase_colour(phase),
        }
    }
}

fn phase_colour(phase: StartPhase) -> String {
    let index = StartPhase::ALL.iter().position(|p| *p == phase);
    format!("var(--p{})", index.unwrap_or(0))
}

/// The steps of a start in chronological order, from the intended start to the last stamp.
fn steps(attempt: &Attempt) -> Vec<Step> {
    let mut stamps: Vec<(Option<StartPhase>, u64)> = attempt
        .timeline
        .iter()
        .map(|(phase, at)| (Some(phase), at))
        .collect();
    stamps.push((None, attempt.actual_ns));
    stamps.sort_by_key(|(phase, at)| (*at, *phase));
    let mut from = attempt.intended_ns;
    stamps
        .into_iter()
        .map(|(until, at)| {
            let ns = at.saturating_sub(from);
            from = from.max(at);
            Step { until, ns }
        })
        .collect()
}

/// A legend of the steps that occur in these starts, in the order of the phases.
fn step_legend<'a>(attempts: impl IntoIterator<Item = &'a Attempt>) -> Markup {
    let mut kinds: Vec<Step> = attempts.into_iter().flat_map(steps).collect();
    kinds.sort_by_key(|step| step.until);
    kinds.dedup_by_key(|step| step.until);
    let entries: Vec<(String, String)> = kinds
        .into_iter()
        .map(|step| (step.name().to_owned(), step.colour()))
        .collect();
    legend(&entries)
}
