//! Gates on memory, CPU time, rates and the largest load.

use stats::bootstrap::NEEDS_CLUSTERS;

use super::{GateResult, Verdict, finite, limit_of, result, within};
use crate::{
    event::{CloneLedger, StartKind},
    host::grade::Grade,
    plan::Subject,
    scenario::{GateSpec, Limit},
    summary::{
        cost::{self, Rate},
        density,
        fold::Summary,
        load,
    },
};

/// A quotient of sums over rounds.
pub(super) struct Quotient {
    pub(super) found: Rate,
    /// Number of samples.
    pub(super) n: usize,
    /// Factor to the unit of the gate.
    pub(super) scale: f64,
    /// Wording of the unit, and the factor from the gate's unit to it.
    pub(super) words: (&'static str, f64),
}

impl Quotient {
    pub(super) fn starts_per_second(found: Rate, summary: &Summary) -> Self {
        let words = ("starts per second", 1.0);
        let n = summary.clones.len();
        Self {
            found,
            n,
            scale: 1.0,
            words,
        }
    }

    pub(super) fn cpu_per_start(summary: &Summary) -> Self {
        Self {
            found: cost::cpu_ns_per_start(summary, Subject::Clone),
            n: summary.clones.len(),
            scale: 1e-6,
            words: ("ms per start", 1.0),
        }
    }

    /// A size of the VMM processes of held clones.
    pub(super) fn of_vmm(summary: &Summary, bytes: impl Fn(&CloneLedger) -> Option<u64>) -> Self {
        let ledgers = summary.ledgers.iter();
        let read = ledgers.filter_map(|l| Some((l.round, bytes(l)? as f64)));
        let read: Vec<(u32, f64)> = read.collect();
        Self {
            n: read.len(),
            found: Rate::mean_by_round(&read),
            scale: 1.0,
            words: ("MB per VMM", 1e-6),
        }
    }

    pub(super) fn judge(&self, gate: &GateSpec, decisive: bool) -> GateResult {
        let n = self.n;
        let Some(value) = self.found.value().map(|value| value * self.scale) else {
            let why = "the run has no such value, or no measured round was completed".to_owned();
            return result(gate, n, None, Verdict::Inconclusive, why);
        };
        let Some((low, high)) = self.found.interval95() else {
            let why = format!(
                "{} rounds are too few for an interval, which needs {NEEDS_CLUSTERS}",
                self.found.rounds()
            );
            return result(gate, n, Some(value), Verdict::Inconclusive, why);
        };
        let (low, high) = (low * self.scale, high * self.scale);
        let (unit, shown) = self.words;
        let why = format!(
            "95 % confidence interval {:.1} to {:.1} {unit}",
            low * shown,
            high * shown
        );
        GateResult {
            interval95: finite((low, high)),
            decisive,
            ..result(gate, n, Some(value), decide(gate, (low, high)), why)
        }
    }
}

/// Compares an interval with the limit of a gate, which may be a lower one.
pub(super) fn decide(gate: &GateSpec, (low, high): (f64, f64)) -> Verdict {
    let limit = limit_of(gate);
    match gate.limit {
        // Negated, because the limit is a lower limit.
        Limit::PerSecond(_) | Limit::Percent(_) | Limit::AtLeast(_) => {
            within((-high, -low), -limit)
        }
        Limit::Nanoseconds(_) | Limit::Bytes(_) | Limit::Count(_) | Limit::Times(_) => {
            within((low, high), limit)
        }
    }
}

/// A value that is compared without an interval.
fn exact(gate: &GateSpec, n: usize, value: f64, reason: String) -> GateResult {
    result(gate, n, Some(value), decide(gate, (value, value)), reason)
}

pub(super) fn hit_rate(gate: &GateSpec, summary: &Summary) -> GateResult {
    let n = summary.clones.len();
    let Some(share) = cost::hit_rate(summary.clones.iter()) else {
        let why = "the target does not report whether its sandboxes were warm".to_owned();
        return result(gate, n, None, Verdict::Inconclusive, why);
    };
    let is_warm = |kind: Option<StartKind>| kind == Some(StartKind::Warm);
    let warm = summary
        .clones
        .iter()
        .filter(|clone| is_warm(clone.start))
        .count();
    exact(
        gate,
        n,
        share * 100.0,
        format!("{warm} of {n} starts were warm"),
    )
}

pub(super) fn sustained(gate: &GateSpec, summary: &Summary, grade: Grade) -> GateResult {
    let rates = load::by_rate(summary);
    let n = summary.clones.len();
    let ended = rates.iter().find(|rate| rate.not_sustained.is_some());
    let why_ended = ended.and_then(|rate| Some((rate.rate_per_s, rate.not_sustained.as_ref()?)));
    let why = why_ended.map_or("every rate was sustained".to_owned(), |(rate, why)| {
        format!("{rate} per second was not sustained: {why}")
    });
    let is_left_out = ended.is_some_and(|rate| rate.first_exec.n() == 0);
    let judged = match load::sustained(&rates) {
        _ if rates.is_empty() => {
            let why = "the scenario has no steady rates".to_owned();
            result(gate, n, None, Verdict::Inconclusive, why)
        }
        Some(rate) if rate >= limit_of(gate) => exact(gate, n, rate, why),
        rate if is_left_out => result(gate, n, rate, Verdict::Inconclusive, why),
        Some(rate) => exact(gate, n, rate, why),
        None => result(gate, n, None, Verdict::Missed, why),
    };
    GateResult {
        decisive: grade == Grade::Publishable,
        ..judged
    }
}

pub(super) fn density(gate: &GateSpec, summary: &Summary) -> GateResult {
    let levels = density::levels(summary);
    let n = summary.clones.len();
    let found = density::largest(&levels, &density::Bounds::default());
    let stopped = found
        .misses
        .map(|(target, why)| format!("{target}: {}", why.join(", ")));
    let why = stopped.unwrap_or_else(|| "no start failed".to_owned());
    match found.holds {
        _ if levels.is_empty() => {
            let why = "sandboxes do not live to the end of the run".to_owned();
            result(gate, n, None, Verdict::Inconclusive, why)
        }
        Some(alive) => exact(gate, n, f64::from(alive), why),
        None => result(gate, n, None, Verdict::Missed, why),
    }
}
