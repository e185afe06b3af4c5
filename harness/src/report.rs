//! Reports: pure functions of a summary, the facts about the host and the evaluated gates.

pub mod doctor;
pub mod document;
pub mod html;
pub mod junit;
pub mod markdown;
mod plot;
pub mod terminal;
pub mod turns;
pub mod work;

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

/// The input of all reporters.
#[derive(Clone, Debug)]
pub struct View<'a> {
    pub scenario: &'a Scenario,
    /// Command line that repeats the run.
    pub reproduce: &'a str,
    pub summary: &'a Summary,
    pub facts: &'a HostFacts,
    /// Mean activity of the host during the run.
    pub noise: NoiseLevel,
    pub graded: Graded,
    /// In the order of the scenario.
    pub gates: Vec<GateResult>,
}

/// Names and contents of the report files that are written to the results directory of a run.
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
    /// Grades the host and evaluates the gates. Returns `None` if the summary has no start event.
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

    /// Exit status of the run. For a run that ended normally, a breach, and otherwise a target that answered no create,
    /// takes precedence over the gates.
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

/// Exit status that follows from the end of the run and from its gates. `ended` is `None` if the run was killed, which
/// counts as interrupted.
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
