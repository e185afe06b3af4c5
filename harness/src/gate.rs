//! Evaluates gates: compares the confidence interval of a metric with its limit.
//!
//! A gate is met if the whole interval is within the limit, missed if none of it is, and otherwise inconclusive.
//! The host's grade does not change a verdict. It only decides whether a missed absolute time or rate fails the
//! run: on a host graded below publishable, the host may be the cause, so the run is inconclusive unless it is
//! strict.

mod costs;
pub mod derived;

use serde::{Deserialize, Serialize};

use crate::{
    event::StartKind,
    host::grade::Grade,
    scenario::{GateSpec, HoldUntil, Limit, Metric, OtherRow, Quantile},
    summary::{
        cost,
        fold::{self, Summary},
        ratio::{self, Ratio},
        turns,
    },
};
use costs::Quotient;
use stats::{
    bootstrap::NEEDS_CLUSTERS,
    quantile::{Estimate, INFINITE, Samples},
};

/// Result of evaluating a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Met,
    Missed,
    /// The data are missing or do not decide. This does not count as met.
    Inconclusive,
    /// The limit belongs to hosts of another class. It counts neither way.
    OtherHost,
}

impl Verdict {
    /// Wording in reports.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Met => "met",
            Self::Missed => "MISSED",
            Self::Inconclusive => "inconclusive",
            Self::OtherHost => "other host",
        }
    }
}

/// An evaluated gate. `measured`, `interval95` and `limit` are in `unit`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GateResult {
    /// Name of the gate in the scenario.
    pub name: String,
    /// Metric as written in the scenario.
    pub metric: String,
    /// `ms`, `bytes`, `count`, `per_s`, `%` or `times`.
    pub unit: String,
    /// `null` if the metric has no finite value, because there are too few samples or too many starts failed.
    pub measured: Option<f64>,
    /// 95 % confidence interval; `null` for counts and maxima, with too little data, or if the upper bound is infinite.
    pub interval95: Option<[f64; 2]>,
    pub limit: f64,
    /// Recorded run from which `limit` is derived; `null` if the limit is a goal.
    pub accepted: Option<String>,
    /// Number of samples; for a ratio, the number of pairs of rounds.
    pub n: usize,
    pub verdict: Verdict,
    /// Whether a miss fails the run on this host. Otherwise, a miss makes the run inconclusive, or fails it in
    /// strict mode.
    pub decisive: bool,
    /// Explanation of the verdict in one sentence.
    pub reason: String,
}

/// Evaluates all gates in the order of the scenario. `class` is the class of the run's host, if it is known.
#[must_use]
pub fn judge(
    gates: &[GateSpec],
    summary: &Summary,
    grade: Grade,
    class: Option<&str>,
) -> Vec<GateResult> {
    let is_publishable = grade == Grade::Publishable;
    let judged = gates.iter().map(|gate| match gate.metric {
        Metric::Phase(phase, quantile) => time(
            gate,
            &summary.phase(phase),
            quantile,
            &summary.mixture(),
            grade,
        ),
        Metric::Other(row, phase, quantile) => {
            let starts = match row {
                OtherRow::Cold => &summary.cold,
                OtherRow::Beside => &summary.beside,
            };
            let samples = fold::latencies(starts.iter(), phase);
            time(gate, &samples, quantile, "", grade)
        }
        Metric::Turn(number, quantile) => {
            let samples = turns::latencies(&summary.clones, number.saturating_sub(1));
            time(gate, &samples, quantile, "", grade)
        }
        Metric::Round(quantile) => time(gate, &summary.round_samples(), quantile, "", grade),
        Metric::BaselineRatio(of, quantile) => {
            let found = ratio::over_baseline(summary, of, quantile);
            times(gate, &found, "the same quantile of host processes", grade)
        }
        Metric::TurnRatio(number) => {
            let found = ratio::of_turn(summary, number.saturating_sub(1));
            times(
                gate,
                &found,
                "the same turn of the comparison rounds",
                grade,
            )
        }
        Metric::Event(of, quantile) => time(gate, &summary.event_samples(of), quantile, "", grade),
        Metric::EventCount(of) => {
            let events = summary.happened.len();
            let Some(count) = summary.event_count(of) else {
                let why = "the run has no completed event".to_owned();
                return result(gate, events, None, Verdict::Inconclusive, why);
            };
            let mut judged = counted(gate, events, count, "events");
            judged.reason = format!("{count} in {events} events");
            judged
        }
        Metric::MemorySlope => slope(gate, summary),
        Metric::MemoryRss => Quotient::of_vmm(summary, |l| l.rss_bytes).judge(gate, true),
        Metric::MemoryPss => Quotient::of_vmm(summary, |l| l.pss_bytes).judge(gate, true),
        Metric::CpuPerStart => Quotient::cpu_per_start(summary).judge(gate, is_publishable),
        Metric::HitRate => costs::hit_rate(gate, summary),
        Metric::SustainedRate => costs::sustained(gate, summary, grade),
        Metric::DensityAlive => costs::density(gate, summary),
        Metric::Failures => failures(gate, summary),
        Metric::NotWarm => not_warm(gate, summary),
        Metric::AfterHoldFailures => after_hold(gate, summary),
        Metric::DrainRate => {
            Quotient::starts_per_second(cost::drain(summary), summary).judge(gate, is_publishable)
        }
        Metric::SustainableRate => Quotient::starts_per_second(cost::sustainable(summary), summary)
            .judge(gate, is_publishable),
    });
    let judged = judged.zip(gates);
    judged
        .map(|(found, gate)| of_class(found, gate, class))
        .collect()
}

/// Withholds the verdict if the limit belongs to hosts of another class.
fn of_class(mut found: GateResult, gate: &GateSpec, class: Option<&str>) -> GateResult {
    if let Some(host) = gate.host.as_deref().filter(|host| class != Some(*host)) {
        let here = class.unwrap_or("unknown");
        found.verdict = Verdict::OtherHost;
        found.reason = format!(
            "the limit is of hosts \"{host}\", this one is \"{here}\"; {}",
            found.reason
        );
    } else if let Some(run) = gate.accepted.as_ref() {
        found
            .reason
            .push_str(&format!("; the limit is derived from {run}"));
    }
    found
}

/// A result without an interval, whose miss fails the run.
fn result(
    gate: &GateSpec,
    n: usize,
    measured: Option<f64>,
    verdict: Verdict,
    reason: String,
) -> GateResult {
    let (unit, limit) = match gate.limit {
        Limit::Nanoseconds(ns) => ("ms", ns as f64 / 1e6),
        Limit::Bytes(bytes) => ("bytes", bytes as f64),
        Limit::Count(count) | Limit::AtLeast(count) => ("count", count as f64),
        Limit::PerSecond(rate) => ("per_s", rate),
        Limit::Percent(percent) => ("%", percent),
        Limit::Times(times) => ("times", times),
    };
    GateResult {
        name: gate.name.clone(),
        metric: gate.metric.to_string(),
        unit: unit.to_owned(),
        measured,
        interval95: None,
        limit,
        accepted: gate.accepted.clone(),
        n,
        verdict,
        decisive: true,
        reason,
    }
}

fn limit_of(gate: &GateSpec) -> f64 {
    result(gate, 0, None, Verdict::Met, String::new()).limit
}

/// Compares an interval with an upper limit.
fn within((low, high): (f64, f64), limit: f64) -> Verdict {
    if high <= limit {
        Verdict::Met
    } else if low > limit {
        Verdict::Missed
    } else {
        Verdict::Inconclusive
    }
}

fn finite((low, high): (f64, f64)) -> Option<[f64; 2]> {
    high.is_finite().then_some([low, high])
}

/// A quantile of times in nanoseconds. `mixture` names the kinds of starts in the samples and is appended to the
/// reason; it may be empty.
fn time(
    gate: &GateSpec,
    samples: &Samples,
    quantile: Quantile,
    mixture: &str,
    grade: Grade,
) -> GateResult {
    let n = samples.n();
    let limit = limit_of(gate);
    let ns = match samples.quantile(quantile) {
        Estimate::TooFew { needs } => {
            let why = format!("{} needs {needs} samples, the run has {n}", quantile.name());
            return result(gate, n, None, Verdict::Inconclusive, why);
        }
        // Failures are never excused by the host, so this miss is decisive.
        Estimate::Infinite => {
            let why = format!(
                "{} of {n} starts failed before this point",
                samples.failed()
            );
            return result(gate, n, None, Verdict::Missed, why);
        }
        Estimate::Value(ns) => ns as f64 / 1e6,
    };
    let interval = samples
        .interval95(quantile)
        .map(|(low, high)| (low / 1e6, high / 1e6));
    let (verdict, why) = match (quantile, interval) {
        (Quantile::Max, _) => (
            within((ns, ns), limit),
            "the largest sample has no interval".to_owned(),
        ),
        (_, None) => (
            Verdict::Inconclusive,
            format!(
                "{} rounds are too few for an interval, which needs {NEEDS_CLUSTERS}",
                samples.clusters()
            ),
        ),
        (_, Some((low, high))) => (
            within((low, high), limit),
            format!(
                "95 % confidence interval {low:.2} to {high:.2} ms, from {} clusters",
                samples.clusters()
            ),
        ),
    };
    GateResult {
        interval95: interval.and_then(finite),
        decisive: grade == Grade::Publishable,
        ..result(gate, n, Some(ns), verdict, format!("{why}{mixture}"))
    }
}

/// A ratio to `over` within the run. A host that is not even fit for ratios makes it inconclusive.
fn times(gate: &GateSpec, found: &Ratio, over: &str, grade: Grade) -> GateResult {
    let n = found.pairs;
    let measured = found.value.filter(|value| value.is_finite());
    let Some((low, high)) = found.interval95 else {
        let why = format!("{n} pairs of rounds are too few");
        return result(gate, n, measured, Verdict::Inconclusive, why);
    };
    let (verdict, unfit) = match grade {
        Grade::Unfit => (Verdict::Inconclusive, "; the host is graded unfit"),
        Grade::Publishable | Grade::Indicative => (within((low, high), limit_of(gate)), ""),
    };
    let why = format!(
        "95 % confidence interval {low:.3} to {high:.3} times {over}, from {n} pairs of rounds{unfit}"
    );
    GateResult {
        interval95: finite((low, high)),
        ..result(gate, n, measured, verdict, why)
    }
}

fn slope(gate: &GateSpec, summary: &Summary) -> GateResult {
    let n = summary.memory.len();
    let Some(slope) = summary.memory_slope() else {
        let why = "memory was not sampled with two different numbers of clones".to_owned();
        return result(gate, n, None, Verdict::Inconclusive, why);
    };
    let Some((low, high)) = slope.interval95 else {
        let why = "too few samples for a confidence interval".to_owned();
        return result(gate, n, Some(slope.value), Verdict::Inconclusive, why);
    };
    let why = format!(
        "95 % confidence interval {:.3} to {:.3} MB per clone",
        low / 1e6,
        high / 1e6
    );
    GateResult {
        interval95: finite((low, high)),
        ..result(
            gate,
            n,
            Some(slope.value),
            within((low, high), limit_of(gate)),
            why,
        )
    }
}

fn failures(gate: &GateSpec, summary: &Summary) -> GateResult {
    let failed: u64 = summary.failures().values().sum();
    counted(gate, summary.clones.len(), failed, "starts")
}

fn not_warm(gate: &GateSpec, summary: &Summary) -> GateResult {
    let clones = &summary.clones;
    if clones.iter().all(|clone| clone.start.is_none()) {
        let why = "the target does not report whether its sandboxes were warm".to_owned();
        return result(gate, clones.len(), None, Verdict::Inconclusive, why);
    }
    let missed = clones
        .iter()
        .filter(|clone| clone.start != Some(StartKind::Warm))
        .count() as u64;
    let mut judged = counted(gate, clones.len(), missed, "starts");
    judged.reason = format!("{missed} of {} starts were not warm", clones.len());
    judged
}

fn after_hold(gate: &GateSpec, summary: &Summary) -> GateResult {
    let asked = &summary.after_hold_ns;
    let failed = asked.iter().filter(|ns| **ns == INFINITE).count() as u64;
    let scenario = summary.started.as_ref().map(|started| &started.scenario);
    // At the end of a lifetime, only removals that failed are recorded.
    if scenario.is_some_and(|scenario| scenario.hold.until == HoldUntil::Lifetime) {
        let held = summary.clones.iter().filter(|c| c.failure.is_none());
        return counted(gate, held.count(), failed, "sandboxes with a lifetime");
    }
    counted(
        gate,
        asked.len(),
        failed,
        "repeated commands in held clones",
    )
}

fn counted(gate: &GateSpec, n: usize, failed: u64, what: &str) -> GateResult {
    if n == 0 {
        let why = format!("the run has no {what}");
        return result(gate, 0, None, Verdict::Inconclusive, why);
    }
    let measured = failed as f64;
    let verdict = if measured <= limit_of(gate) {
        Verdict::Met
    } else {
        Verdict::Missed
    };
    result(
        gate,
        n,
        Some(measured),
        verdict,
        format!("{failed} of {n} {what} failed"),
    )
}

#[cfg(test)]
mod tests;
