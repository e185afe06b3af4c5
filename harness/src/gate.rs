//! Evaluates gates: compares a metric with its limit, or its ratio to the baseline of the same run with the limit of
//! the ratio.

use serde::{Deserialize, Serialize};

use crate::{
    event::StartKind,
    host::grade::Grade,
    scenario::{GateSpec, Limit, Metric, Quantile},
    stats::{
        fold::Summary,
        quantile::{Estimate, Samples},
        ratio, turns,
    },
};

/// Result of evaluating a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GateOutcome {
    Pass,
    Fail,
    /// The data are missing or insufficient, or the host is not fit for this metric. This does not count as a pass.
    Inconclusive,
}

impl GateOutcome {
    /// Name in JSON and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Fail => "fail",
            Self::Inconclusive => "inconclusive",
        }
    }
}

/// An evaluated gate. `measured` and `limit` are in `unit`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GateResult {
    /// Name of the gate in the scenario.
    pub name: String,
    /// Metric as written in the scenario.
    pub metric: String,
    /// `ms`, `bytes`, `count`, `per_s` or `times`.
    pub unit: String,
    /// `null` if the metric has no finite value, because there are too few samples or too many starts failed.
    pub measured: Option<f64>,
    pub limit: f64,
    /// Number of samples; for a ratio of turns, the number of pairs of rounds.
    pub n: usize,
    pub verdict: GateOutcome,
    pub judged_by: JudgedBy,
    /// `null` unless the ratio to the baseline decided.
    pub ratio: Option<RatioResult>,
    /// Explanation of the outcome in one sentence.
    pub reason: String,
}

/// The comparison that decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JudgedBy {
    /// The metric was compared with `limit`.
    Limit,
    /// The ratio to the baseline was compared with `limit_ratio`.
    Ratio,
}

/// A quantile divided by the same quantile of the baseline.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RatioResult {
    pub measured: f64,
    /// Largest accepted ratio.
    pub limit: f64,
    /// Quantile of the baseline in milliseconds.
    pub baseline_ms: f64,
    /// Number of baseline samples.
    pub baseline_n: usize,
}

/// Evaluates all gates in the order of the scenario.
#[must_use]
pub fn judge(gates: &[GateSpec], summary: &Summary, grade: Grade) -> Vec<GateResult> {
    gates
        .iter()
        .map(|gate| match gate.metric {
            Metric::Phase(phase, quantile) => {
                let times = Times {
                    clones: summary.phase(phase),
                    baseline: summary.baseline_samples(),
                };
                time(gate, &times, quantile, &summary.mixture(), grade)
            }
            Metric::Turn(number, quantile) => {
                let times = Times {
                    clones: turns::latencies(&summary.clones, number.saturating_sub(1)),
                    baseline: summary.baseline_samples(),
                };
                time(gate, &times, quantile, "", grade)
            }
            Metric::TurnRatio(number) => turn_ratio(gate, summary, number, grade),
            Metric::Round(quantile) => {
                let times = Times {
                    clones: summary.round_samples(),
                    baseline: summary.baseline_round_samples(),
                };
                time(gate, &times, quantile, "", grade)
            }
            Metric::MemorySlope => slope(gate, summary),
            Metric::Failures => failures(gate, summary),
            Metric::NotWarm => not_warm(gate, summary),
            Metric::AfterHoldFailures => after_hold(gate, summary),
            Metric::StartsPerSecond => rate(gate, summary, grade),
        })
        .collect()
}

fn result(
    gate: &GateSpec,
    n: usize,
    measured: Option<f64>,
    verdict: GateOutcome,
    reason: String,
) -> GateResult {
    let (unit, limit) = match gate.limit {
        Limit::Nanoseconds(ns) => ("ms", ns as f64 / 1e6),
        Limit::Bytes(bytes) => ("bytes", bytes as f64),
        Limit::Count(count) => ("count", count as f64),
        Limit::PerSecond(rate) => ("per_s", rate),
        Limit::Times(times) => ("times", times),
    };
    GateResult {
        name: gate.name.clone(),
        metric: gate.metric.to_string(),
        unit: unit.to_owned(),
        measured,
        limit,
        n,
        verdict,
        judged_by: JudgedBy::Limit,
        ratio: None,
        reason,
    }
}

fn limit_of(gate: &GateSpec) -> f64 {
    result(gate, 0, None, GateOutcome::Pass, String::new()).limit
}

/// Samples for a gate whose metric is a time.
struct Times {
    clones: Samples,
    /// Host processes of the same run.
    baseline: Samples,
}

/// Evaluates a gate whose metric is a time. `mixture` names the kinds of starts in the samples and is appended to the
/// reason; it may be empty.
fn time(
    gate: &GateSpec,
    times: &Times,
    quantile: Quantile,
    mixture: &str,
    grade: Grade,
) -> GateResult {
    let samples = &times.clones;
    let n = samples.n();
    let ns = match samples.quantile(quantile) {
        Estimate::TooFew { needs } => {
            let why = format!("{} needs {needs} samples, the run has {n}", quantile.name());
            return result(gate, n, None, GateOutcome::Inconclusive, why);
        }
        Estimate::Infinite => {
            let why = format!(
                "{} of {n} starts failed before this point",
                samples.failed()
            );
            return result(gate, n, None, GateOutcome::Fail, why);
        }
        Estimate::Value(ns) => ns,
    };
    let ms = ns as f64 / 1e6;
    let limit = limit_of(gate);
    let judged =
        |verdict, reason: String| result(gate, n, Some(ms), verdict, format!("{reason}{mixture}"));
    if ms <= limit {
        return judged(
            GateOutcome::Pass,
            format!("{ms:.2} ms is within {limit} ms"),
        );
    }
    match grade {
        Grade::Publishable => judged(
            GateOutcome::Fail,
            format!("{ms:.2} ms exceeds {limit} ms on a host graded publishable"),
        ),
        Grade::Unfit => judged(
            GateOutcome::Inconclusive,
            format!("{ms:.2} ms exceeds {limit} ms, but the host is graded unfit"),
        ),
        Grade::Indicative => match ratio(gate, ms, quantile, &times.baseline) {
            Err(why) => judged(
                GateOutcome::Inconclusive,
                format!("{ms:.2} ms exceeds {limit} ms on a host graded indicative; {why}"),
            ),
            Ok(found) => by_ratio(judged, found, ms, limit),
        },
    }
}

fn by_ratio(
    judged: impl Fn(GateOutcome, String) -> GateResult,
    found: RatioResult,
    ms: f64,
    limit: f64,
) -> GateResult {
    let holds = found.measured <= found.limit;
    let verdict = if holds {
        GateOutcome::Pass
    } else {
        GateOutcome::Fail
    };
    let reason = format!(
        "{ms:.2} ms exceeds {limit} ms on a host graded indicative, so the ratio decides: {:.1} times the host \
         process of the same run ({:.2} ms, n = {}), limit {}",
        found.measured, found.baseline_ms, found.baseline_n, found.limit
    );
    GateResult {
        judged_by: JudgedBy::Ratio,
        ratio: Some(found),
        ..judged(verdict, reason)
    }
}

fn ratio(
    gate: &GateSpec,
    ms: f64,
    quantile: Quantile,
    baseline: &Samples,
) -> Result<RatioResult, String> {
    let limit = gate.limit_ratio.ok_or("the gate has no limit_ratio")?;
    match baseline.quantile(quantile) {
        Estimate::Value(ns) if ns > 0 => Ok(RatioResult {
            measured: ms / (ns as f64 / 1e6),
            limit,
            baseline_ms: ns as f64 / 1e6,
            baseline_n: baseline.n(),
        }),
        Estimate::Value(_) => Err("the quantile of the baseline is zero".to_owned()),
        Estimate::Infinite => Err("the baseline failed too often".to_owned()),
        Estimate::TooFew { needs } => Err(format!(
            "the baseline has {} samples, {} needs {needs}",
            baseline.n(),
            quantile.name()
        )),
    }
}

fn slope(gate: &GateSpec, summary: &Summary) -> GateResult {
    let n = summary.memory.len();
    let limit = limit_of(gate);
    let Some(slope) = summary.memory_slope() else {
        let why = "memory was not sampled with two different numbers of clones".to_owned();
        return result(gate, n, None, GateOutcome::Inconclusive, why);
    };
    let (verdict, why) = match slope.interval95 {
        None => (
            GateOutcome::Inconclusive,
            "too few samples for a confidence interval".to_owned(),
        ),
        Some((low, high)) => (
            if high <= limit {
                GateOutcome::Pass
            } else if low > limit {
                GateOutcome::Fail
            } else {
                GateOutcome::Inconclusive
            },
            format!(
                "95 % confidence interval {:.3} to {:.3} MB per clone",
                low / 1e6,
                high / 1e6
            ),
        ),
    };
    result(gate, n, Some(slope.value), verdict, why)
}

/// Passes if the whole confidence interval is at or below the limit, and fails if the whole interval is above the
/// limit. In all other cases, and on an unfit host, the result is inconclusive.
fn turn_ratio(gate: &GateSpec, summary: &Summary, number: usize, grade: Grade) -> GateResult {
    let ratio = ratio::of_turn(summary, number.saturating_sub(1));
    let n = ratio.pairs;
    let limit = limit_of(gate);
    let measured = ratio.value.filter(|value| value.is_finite());
    let Some((low, high)) = ratio.interval95 else {
        let why = format!("{n} pairs of rounds are too few");
        return result(gate, n, measured, GateOutcome::Inconclusive, why);
    };
    let verdict = match () {
        () if grade == Grade::Unfit => GateOutcome::Inconclusive,
        () if high <= limit => GateOutcome::Pass,
        () if low > limit => GateOutcome::Fail,
        () => GateOutcome::Inconclusive,
    };
    let unfit = match grade {
        Grade::Unfit => "; the host is graded unfit",
        Grade::Publishable | Grade::Indicative => "",
    };
    let why = format!(
        "95 % confidence interval {low:.3} to {high:.3} times the same turn of the rounds beside, from {n} pairs of \
         rounds{unfit}"
    );
    result(gate, n, measured, verdict, why)
}

fn failures(gate: &GateSpec, summary: &Summary) -> GateResult {
    let failed: u64 = summary.failures().values().sum();
    counted(gate, summary.clones.len(), failed, "starts")
}

fn not_warm(gate: &GateSpec, summary: &Summary) -> GateResult {
    let clones = &summary.clones;
    if clones.iter().all(|clone| clone.start.is_none()) {
        let why = "the target does not report whether its sandboxes were warm".to_owned();
        return result(gate, clones.len(), None, GateOutcome::Inconclusive, why);
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
    let failed = asked
        .iter()
        .filter(|ns| **ns == crate::stats::quantile::INFINITE)
        .count() as u64;
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
        return result(gate, 0, None, GateOutcome::Inconclusive, why);
    }
    let measured = failed as f64;
    let verdict = if measured <= limit_of(gate) {
        GateOutcome::Pass
    } else {
        GateOutcome::Fail
    };
    result(
        gate,
        n,
        Some(measured),
        verdict,
        format!("{failed} of {n} {what} failed"),
    )
}

fn rate(gate: &GateSpec, summary: &Summary, grade: Grade) -> GateResult {
    let n = summary.clones.len();
    let Some(rate) = summary.starts_per_s() else {
        let why = "no measured round was completed".to_owned();
        return result(gate, n, None, GateOutcome::Inconclusive, why);
    };
    let limit = limit_of(gate);
    let (verdict, why) = match (rate >= limit, grade) {
        (true, _) => (
            GateOutcome::Pass,
            format!("{rate:.1} starts per second, limit {limit}"),
        ),
        (false, Grade::Publishable) => (
            GateOutcome::Fail,
            format!("{rate:.1} starts per second are below the limit {limit}"),
        ),
        (false, Grade::Indicative | Grade::Unfit) => (
            GateOutcome::Inconclusive,
            format!(
                "{rate:.1} starts per second are below the limit {limit}, but the host is graded {grade}"
            ),
        ),
    };
    result(gate, n, Some(rate), verdict, why)
}
