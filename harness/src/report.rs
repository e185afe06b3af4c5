//! Reports: pure functions of a summary, the facts about the host and the evaluated gates.

pub mod badge;
pub mod board;
pub mod cluster;
pub mod comparison;
pub mod cost;
pub mod density;
pub mod doctor;
pub mod document;
mod hgrm;
pub mod history;
pub mod html;
mod interference;
pub mod junit;
pub mod load;
pub mod markdown;
pub mod memory;
pub mod peers;
pub mod phase;
mod plot;
pub mod section;
mod sections;
pub mod terminal;
pub mod turns;
pub(crate) mod units;
pub mod work;

use model::StartPhase;
use testbed::exit::End;

use crate::{
    event::{EndReason, FailureCause},
    gate::{self, GateResult, Verdict},
    host::{
        facts::HostFacts,
        grade::{self, Grade, Graded, NoiseLevel},
    },
    scenario::{Arrival, Scenario},
    summary::{self, fold::Summary},
};
use stats::bootstrap::PUBLISHED_ROUNDS;

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
    pub strictness: Strictness,
    /// SHA-256 of the uncompressed events; `None` if they come from no file.
    pub record: Option<&'a str>,
}

/// Effect of a missed time or rate on a host that is not graded publishable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strictness {
    /// The run is inconclusive, because the host may be the cause.
    Excused,
    /// The run fails, as with `--strict` and in CI.
    Strict,
}

/// Names and contents of the report files that are written to the results directory of a run.
#[must_use]
pub fn files(view: &View<'_>) -> Vec<(String, String)> {
    let reports = [
        ("report.json", document::Document::new(view).render()),
        ("report.md", markdown::render(view)),
        ("report.html", html::render(view)),
        ("report.xml", junit::render(view)),
    ];
    let mut files: Vec<_> = reports.map(|(name, text)| (name.to_owned(), text)).into();
    files.extend(hgrm::files(view));
    files
}

impl<'a> View<'a> {
    /// Grades the host and evaluates the gates. Returns `None` if the summary has no start event.
    #[must_use]
    pub fn new(summary: &'a Summary, facts: &'a HostFacts) -> Option<Self> {
        let started = summary.started.as_ref()?;
        let noise = NoiseLevel::of(&summary.noise);
        let mut graded = grade::grade(facts, noise);
        if let Some(reason) = too_few_bursts(&started.scenario) {
            graded.lower_to(Grade::Indicative, reason);
        }
        if let Some((grade, reason)) = disturbed(summary) {
            graded.lower_to(grade, reason);
        }
        Some(Self {
            scenario: &started.scenario,
            reproduce: &started.reproduce,
            gates: gate::judge(
                &started.scenario.gates,
                summary,
                graded.grade,
                Some(&facts.class()),
            ),
            summary,
            facts,
            noise,
            graded,
            strictness: Strictness::Excused,
            record: None,
        })
    }

    /// Whether a missed gate is excused by the host's grade instead of failing the run.
    #[must_use]
    pub fn is_excused(&self) -> bool {
        let missed = |gate: &GateResult| gate.verdict == Verdict::Missed && !gate.decisive;
        self.strictness == Strictness::Excused && self.gates.iter().any(missed)
    }

    /// Exit status of the run. If the run ended normally, a breach, and otherwise a target whose creates all
    /// failed, takes precedence over the gates. A run without a single start that counts is never a pass.
    #[must_use]
    pub fn end(&self) -> End {
        let clones = &self.summary.clones;
        let all_missing =
            !self.summary.systems.is_empty() && summary::peers::reference(self.summary).is_none();
        let none_replied = all_missing
            || !clones.is_empty()
                && clones
                    .iter()
                    .all(|clone| clone.timeline.at(StartPhase::Replied).is_none());
        let none_counted = clones.is_empty() && self.summary.peers.values().all(Vec::is_empty);
        let breach = FailureCause::Breach;
        let is_breached = self.summary.failures().contains_key(&breach)
            || self.summary.after_hold_failures.contains_key(&breach);
        match end_of_run(self.summary.ended.as_ref(), &self.gates, self.strictness) {
            End::Pass | End::GateFailed | End::Inconclusive if is_breached => End::Breach,
            End::Pass | End::GateFailed | End::Inconclusive if none_replied => {
                End::TargetUnreachable
            }
            End::Pass if none_counted => End::Inconclusive,
            end => end,
        }
    }
}

/// Reason why the quantiles of a scenario may not be published on any host; `None` if they may.
fn too_few_bursts(scenario: &Scenario) -> Option<String> {
    let few =
        matches!(scenario.arrival, Arrival::Burst { .. }) && scenario.rounds < PUBLISHED_ROUNDS;
    few.then(|| {
        format!(
            "the scenario has {} rounds of bursts, at least {PUBLISHED_ROUNDS} are needed for its intervals",
            scenario.rounds
        )
    })
}

/// Grade of a run that lost more than a quarter of its repetitions to interference; otherwise `None`.
fn disturbed(summary: &Summary) -> Option<(Grade, String)> {
    let all = summary.interference.repetitions();
    let left_out = summary.interference.repetitions_left_out;
    let grade = match (left_out * 2 > all, left_out * 4 > all) {
        (true, _) => Grade::Unfit,
        (false, true) => Grade::Indicative,
        (false, false) => return None,
    };
    Some((
        grade,
        format!("{left_out} of {all} repetitions were disturbed by other programs"),
    ))
}

/// Derives the exit status from the end of the run and from its gates. `ended` is `None` if the run was killed,
/// which counts as interrupted.
fn end_of_run(ended: Option<&EndReason>, gates: &[GateResult], strictness: Strictness) -> End {
    let any = |verdict| gates.iter().any(|gate| gate.verdict == verdict);
    let failed = gates.iter().any(|gate| {
        let counts = gate.decisive || strictness == Strictness::Strict;
        gate.verdict == Verdict::Missed && counts
    });
    match ended {
        Some(EndReason::Interrupted) | None => End::Interrupted,
        Some(EndReason::Broken { .. }) => End::Bug,
        Some(EndReason::Complete | EndReason::MemoryShare | EndReason::Limit { .. }) if failed => {
            End::GateFailed
        }
        Some(EndReason::Complete | EndReason::MemoryShare | EndReason::Limit { .. })
            if any(Verdict::Missed) || any(Verdict::Inconclusive) =>
        {
            End::Inconclusive
        }
        Some(EndReason::Complete | EndReason::MemoryShare | EndReason::Limit { .. }) => End::Pass,
    }
}
