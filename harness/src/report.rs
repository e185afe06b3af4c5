//! Reports: pure functions of a summary, the host's facts and the judged gates.

pub mod doctor;
pub mod document;
pub mod html;
pub mod junit;
pub mod markdown;
mod plot;
pub mod terminal;
pub mod turns;

use model::StartPhase;
use testbed::exit::End;

use crate::{
    event::{EndReason, FailureCause},
    gate::{self, GateOutcome, GateResult},
    host::{
        facts::HostFacts,
        grade::{self, Graded, NoiseLevel},
    },
    scenario::Scenario,
    stats::fold::Summary,
};

/// All that a reporter may look at.
#[derive(Clone, Debug)]
pub struct View<'a> {
    /// What was run.
    pub scenario: &'a Scenario,
    /// The command that does it again.
    pub reproduce: &'a str,
    /// Folded events.
    pub summary: &'a Summary,
    /// Where it ran.
    pub facts: &'a HostFacts,
    /// How quiet it was.
    pub noise: NoiseLevel,
    /// What its numbers are worth.
    pub graded: Graded,
    /// In the scenario's order.
    pub gates: Vec<GateResult>,
}

/// Files that every run leaves beside its events, with what they hold.
#[must_use]
pub fn files(view: &View<'_>) -> [(&'static str, String); 4] {
    [
        ("report.json", document::Document::new(view).render()),
        ("report.md", markdown::render(view)),
        ("report.html", html::render(view)),
        ("report.xml", junit::render(view)),
    ]
}

impl<'a> View<'a> {
    /// Grades and judges. `None` for a summary without a start.
    #[must_use]
    pub fn new(summary: &'a Summary, facts: &'a HostFacts) -> Option<Self> {
        let started = summary.started.as_ref()?;
        let noise = NoiseLevel::of(&summary.noise);
        let graded = grade::grade(facts, noise);
        Some(Self {
            scenario: &started.scenario,
            reproduce: &started.reproduce,
            gates: gate::judge(&started.scenario.gates, summary, graded.grade),
            summary,
            facts,
            noise,
            graded,
        })
    }

    /// How the run ended.
    #[must_use]
    pub fn end(&self) -> End {
        let clones = &self.summary.clones;
        let none_replied = !clones.is_empty()
            && clones
                .iter()
                .all(|clone| clone.timeline.at(StartPhase::Replied).is_none());
        let breach = FailureCause::Breach;
        let is_breached = self.summary.failures().contains_key(&breach)
            || self.summary.after_hold_failures.contains_key(&breach);
        match end_of_run(self.summary.ended.as_ref(), &self.gates) {
            End::Pass | End::GateFailed | End::Inconclusive if is_breached => End::Breach,
            End::Pass | End::GateFailed | End::Inconclusive if none_replied => {
                End::TargetUnreachable
            }
            end => end,
        }
    }
}

/// The end that follows from how the run ended and from its gates. A run without an end was killed.
fn end_of_run(ended: Option<&EndReason>, gates: &[GateResult]) -> End {
    let any = |verdict| gates.iter().any(|gate| gate.verdict == verdict);
    match ended {
        Some(EndReason::Interrupted) | None => End::Interrupted,
        Some(EndReason::Broken { .. }) => End::Bug,
        Some(EndReason::Complete | EndReason::MemoryShare) if any(GateOutcome::Fail) => {
            End::GateFailed
        }
        Some(EndReason::Complete | EndReason::MemoryShare) if any(GateOutcome::Inconclusive) => {
            End::Inconclusive
        }
        Some(EndReason::Complete | EndReason::MemoryShare) => End::Pass,
    }
}
