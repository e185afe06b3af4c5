//! `cube-bench saturate`: the highest rate of an open loop whose P95 stays within a bound.
//!
//! Each trial is one recorded run of the scenario with an open loop at the tried rate. [`search`] chooses the next
//! rate, and all output is a function of the recorded runs.

pub mod search;

use std::{path::PathBuf, sync::atomic::AtomicBool, time::Duration};

use serde::{Deserialize, Serialize};
use stats::rank::nearest_rank;

use crate::{
    event::{Attempt, EndReason},
    plan::MAX_OPEN_WORKERS,
    record::{self, RecordError},
    scenario::{Arrival, Scenario, Spacing},
    session::{self, SessionError, Settings},
    summary::{
        fold::{self, Summary},
        load,
    },
};
use search::{Saturation, Search, Verdict};
use stats::quantile::INFINITE;

/// Format of the JSON document.
pub const FORMAT: u32 = 1;
/// Minimum number of starts in a trial; a P95 needs 100.
pub const LEAST_STARTS: u32 = 100;
/// The harness is saturated if the P95 of its own delay exceeds this share of the bound.
const GENERATOR_SHARE: f64 = 0.1;

/// Options of a search.
#[derive(Clone, Debug)]
pub struct Options {
    pub search: Search,
    /// Bound on the P95 of first exec.
    pub p95: Duration,
    /// Length of a trial.
    pub trial: Duration,
    /// Directory of the recorded trials.
    pub results: PathBuf,
}

/// One trial.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    pub rate_per_s: f64,
    pub verdict: Verdict,
    pub n: usize,
    pub failed: usize,
    /// P95 of first exec; `null` if it lies among failures.
    pub p95_ms: Option<f64>,
    /// Share of starts from a warm slot, 0 to 1; `null` if the target does not report it.
    pub hit_rate: Option<f64>,
    /// CPU time of the target per start, until the pool is full again; `null` if it was not measured.
    pub cpu_ms_per_start: Option<f64>,
    /// P95 of the time between the intended and the actual start of arrivals that found a free worker: the delay
    /// caused by the harness.
    pub generator_p95_ms: Option<f64>,
    /// Directory of the recorded run.
    pub run: PathBuf,
}

/// The JSON document.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SaturationReport {
    /// [`FORMAT`].
    pub format: u32,
    pub scenario: String,
    pub p95_bound_ms: f64,
    #[serde(rename = "result")]
    pub found: Saturation,
    /// In the order in which they ran.
    pub trials: Vec<Trial>,
}

/// A search that could not be completed.
#[derive(Debug, thiserror::Error)]
pub enum SaturateError {
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("the trial at {rate_per_s} starts per second ended early: {why}")]
    Ended { rate_per_s: f64, why: String },
}

/// Runs trials until the search ends.
///
/// # Errors
/// Returns [`SaturateError`] if a trial cannot start, cannot be recorded, or does not complete.
pub fn run(
    scenario: &Scenario,
    settings: &Settings,
    options: &Options,
    interrupted: &AtomicBool,
) -> Result<SaturationReport, SaturateError> {
    let mut trials = Vec::new();
    let found = options.search.run(|rate_per_s| {
        let run = options.results.join(format!("trial-{:03}", trials.len()));
        let settings = Settings {
            results: Some(run.clone()),
            ..settings.clone()
        };
        let trial = at_rate(scenario, rate_per_s, options.trial);
        session::run_until(&trial, &settings, interrupted)?;
        let summary = fold::fold(&record::read(&run)?);
        // With clones that accumulate, failed starts end the run after its only round.
        let is_whole = matches!(
            summary.ended,
            Some(EndReason::Complete | EndReason::Limit { .. })
        );
        if !is_whole {
            let why = format!("{:?}", summary.ended);
            return Err(SaturateError::Ended { rate_per_s, why });
        }
        let trial = Trial::new(rate_per_s, &summary, options.p95, run);
        eprintln!("cube-bench: {}", trial.describe());
        let verdict = trial.verdict;
        trials.push(trial);
        Ok(verdict)
    })?;
    Ok(SaturationReport {
        format: FORMAT,
        scenario: scenario.name.clone(),
        p95_bound_ms: options.p95.as_secs_f64() * 1e3,
        found,
        trials,
    })
}

/// The scenario of a trial: one round of an open loop with Poisson arrivals. Interference does not discard it,
/// because the search has no other round to fall back on; the report of each trial shows the interference.
fn at_rate(scenario: &Scenario, rate_per_s: f64, length: Duration) -> Scenario {
    let starts = (rate_per_s * length.as_secs_f64()).ceil();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the command line limits rate and length"
    )]
    let starts = (starts as u32).max(LEAST_STARTS);
    Scenario {
        rounds: 1,
        warmup_rounds: scenario.warmup_rounds.min(1),
        cold_rounds: 0,
        mode: scenario.mode.target_only(),
        baseline: None,
        gates: Vec::new(),
        interference: None,
        steady: None,
        arrival: Arrival::Open {
            starts,
            rate_per_s,
            spacing: Spacing::Poisson,
        },
        ..scenario.clone()
    }
}

impl Trial {
    fn new(rate_per_s: f64, summary: &Summary, bound: Duration, run: PathBuf) -> Self {
        let at = load::at_rate(rate_per_s, summary);
        let ms = |ns: u64| (ns != INFINITE).then_some(ns as f64 / 1e6);
        let mut delays = generator_delays(&summary.clones);
        delays.sort_unstable();
        let p95_ms = nearest_rank(at.first_exec.all(), 950).and_then(ms);
        let generator_p95_ms = nearest_rank(&delays, 950).and_then(ms);
        let bound_ms = bound.as_secs_f64() * 1e3;
        let holds = at.failed == 0 && p95_ms.is_some_and(|ms| ms <= bound_ms);
        // If no worker was free, the target is slower than the arrivals, which is the target's saturation.
        let is_late = generator_p95_ms.is_some_and(|ms| ms > bound_ms * GENERATOR_SHARE);
        Self {
            rate_per_s,
            verdict: match (holds, is_late) {
                (true, _) => Verdict::Holds,
                (false, true) => Verdict::Generator,
                (false, false) => Verdict::Misses,
            },
            n: at.first_exec.n(),
            failed: at.failed,
            p95_ms,
            hit_rate: at.hit_rate,
            cpu_ms_per_start: at.cpu_ns_per_start.map(|ns| ns / 1e6),
            generator_p95_ms,
            run,
        }
    }

    fn describe(&self) -> String {
        let ms = |value: Option<f64>| value.map_or("n/a".to_owned(), |ms| format!("{ms:.2} ms"));
        let warm = self.hit_rate.map_or(String::new(), |share| {
            format!(", {:.1} % warm", share * 100.0)
        });
        let verdict = match self.verdict {
            Verdict::Holds => "holds",
            Verdict::Misses => "misses",
            Verdict::Generator => "the harness is saturated",
        };
        format!(
            "{:.1} starts per second: P95 {}, {} of {} failed{warm}, {} of CPU per start, harness late by {} (P95): {verdict}",
            self.rate_per_s,
            ms(self.p95_ms),
            self.failed,
            self.n,
            ms(self.cpu_ms_per_start),
            ms(self.generator_p95_ms),
        )
    }
}

/// Delays between intended and actual start of arrivals that did not have to wait for a worker, because fewer than
/// all workers were busy at the intended start. The target causes the delays of the others.
fn generator_delays(attempts: &[Attempt]) -> Vec<u64> {
    let workers = usize::try_from(MAX_OPEN_WORKERS)
        .unwrap_or(usize::MAX)
        .min(attempts.len());
    let mut ends: Vec<u64> = attempts.iter().map(|a| a.ended_ns).collect();
    let mut begins: Vec<u64> = attempts.iter().map(|a| a.actual_ns).collect();
    ends.sort_unstable();
    begins.sort_unstable();
    let busy_at = |ns: u64| {
        let begun = begins.partition_point(|begin| *begin < ns);
        begun - ends.partition_point(|end| *end <= ns).min(begun)
    };
    let free = attempts.iter().filter(|a| busy_at(a.intended_ns) < workers);
    free.map(|a| a.actual_ns.saturating_sub(a.intended_ns))
        .collect()
}

impl SaturationReport {
    /// The report for a terminal.
    #[must_use]
    pub fn render(&self) -> String {
        use search::Ended;
        let mut out = format!(
            "{}: highest rate with a P95 of first exec of at most {:.1} ms and no failed start\n\n",
            self.scenario, self.p95_bound_ms
        );
        for trial in &self.trials {
            out.push_str(&format!("  {}\n", trial.describe()));
        }
        let held = self.found.held_per_s;
        let missed = self.found.missed_per_s.unwrap_or(f64::INFINITY);
        out.push_str(&match self.found.ended {
            Ended::Found => format!("\nholds {held:.1} starts per second, misses {missed:.1}\n"),
            Ended::BelowFirst => format!("\nmisses {missed:.1} starts per second, the first rate\n"),
            Ended::AboveLast => format!("\nholds {held:.1} starts per second, the last rate\n"),
            Ended::Generator => format!(
                "\nholds {held:.1} starts per second; above, the harness itself is saturated on this host\n"
            ),
        });
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        event::{Failure, FailureCause},
        plan::{Row, Subject},
    };
    use model::{StartPhase, Timeline};

    const MS: u64 = 1_000_000;

    /// A start that began `late` after its intended time and took `took` from then on.
    fn start(number: u64, late: u64, took: u64) -> Attempt {
        let intended_ns = number * 10 * MS;
        let mut timeline = Timeline::default();
        timeline.stamp(StartPhase::FirstExec, intended_ns + late + took);
        Attempt {
            round: 0,
            subject: Subject::Clone,
            row: Row::Measured,
            arrival: 0,
            intended_ns,
            actual_ns: intended_ns + late,
            work: None,
            template: None,
            timeline,
            start: None,
            faults: None,
            turns: Vec::new(),
            failure: None,
            ended_ns: intended_ns + late + took,
        }
    }

    fn verdict(late: u64, took: u64, failed: bool) -> Verdict {
        let mut clones: Vec<Attempt> = (0..200).map(|n| start(n, late, took)).collect();
        if failed {
            clones[7].failure = Some(Failure {
                cause: FailureCause::Exec,
                message: "simulated".into(),
            });
        }
        let summary = Summary {
            clones,
            ..Summary::default()
        };
        Trial::new(100.0, &summary, Duration::from_millis(50), PathBuf::new()).verdict
    }

    #[test]
    fn a_late_harness_is_not_a_slow_target() {
        assert_eq!(verdict(0, 40 * MS, false), Verdict::Holds);
        assert_eq!(verdict(0, 60 * MS, false), Verdict::Misses);
        assert_eq!(verdict(30 * MS, 30 * MS, false), Verdict::Generator);
        assert_eq!(
            verdict(0, 40 * MS, true),
            Verdict::Misses,
            "a failed start is never held"
        );
    }

    #[test]
    fn waits_for_a_worker_are_those_of_the_target() {
        // Ten arrivals at each instant, and each start takes three seconds: after 256 of them, all workers are busy.
        let clones: Vec<Attempt> = (0..1000_u64)
            .map(|n| match n.checked_sub(256) {
                None => start(n / 10, 0, 3000 * MS),
                Some(behind) => {
                    let late = 3000 * MS + behind / 10 * 10 * MS - n / 10 * 10 * MS;
                    start(n / 10, late, 3000 * MS)
                }
            })
            .collect();
        let mut delays = generator_delays(&clones);
        delays.sort_unstable();
        assert!(delays.len() < 300, "{}", delays.len());
        assert_eq!(nearest_rank(&delays, 950), Some(0));
    }
}
