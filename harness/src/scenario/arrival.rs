//! Arrival times of clones.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::config::positive;
use crate::trace::Trace;

/// Maximum number of starts in one round, and of workers of a closed loop. A larger number is treated as a typing
/// mistake.
const MAX_STARTS: u32 = 100_000;

/// Arrival times of clones.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arrival {
    /// All clones of a round at the same instant.
    Burst {
        /// Clones in a round.
        starts: u32,
    },
    /// A fixed number of workers. Each starts its next clone as soon as its previous attempt has ended.
    Closed {
        workers: u32,
        /// Clones in a round, over all workers.
        starts: u32,
    },
    /// A fixed mean rate, whether or not earlier clones have finished.
    Open {
        /// Clones in a round.
        starts: u32,
        /// Mean rate in clones per second.
        rate_per_s: f64,
        spacing: Spacing,
    },
}

impl Arrival {
    /// Clones in a round.
    #[must_use]
    pub fn starts(self) -> u32 {
        match self {
            Self::Burst { starts } | Self::Closed { starts, .. } | Self::Open { starts, .. } => {
                starts
            }
        }
    }
}

/// Open loops at several rates. Each repetition has one round for each rate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SteadySpec {
    /// Mean rates in clones per second, ascending.
    pub rates_per_s: Vec<f64>,
    /// Time during which clones arrive in a round.
    pub lasts: Duration,
}

/// Gaps between the arrivals of an open loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Spacing {
    /// Exponentially distributed gaps, as from independent customers.
    Poisson,
    /// Equal gaps.
    Constant,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ArrivalConfig {
    kind: ArrivalKind,
    starts: u32,
    workers: u32,
    rate_per_s: f64,
    rates_per_s: Vec<f64>,
    lasts: String,
    spacing: Spacing,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ArrivalKind {
    Burst,
    Closed,
    Open,
    Steady,
}

impl ArrivalConfig {
    /// `keys` are those that the scenario file sets.
    pub(super) fn check(self, keys: &[String]) -> Result<(Arrival, Option<SteadySpec>), String> {
        let (kind, meaningful): (&str, &[&str]) = match self.kind {
            ArrivalKind::Burst => ("burst", &["kind", "starts"]),
            ArrivalKind::Closed => ("closed", &["kind", "starts", "workers"]),
            ArrivalKind::Open => ("open", &["kind", "starts", "rate_per_s", "spacing"]),
            ArrivalKind::Steady => ("steady", &["kind", "rates_per_s", "lasts", "spacing"]),
        };
        if let Some(key) = keys.iter().find(|k| !meaningful.contains(&k.as_str())) {
            return Err(format!("arrival.{key} has no meaning for kind {kind:?}"));
        }
        between("arrival.starts", self.starts)?;
        between("arrival.workers", self.workers)?;
        rate("arrival.rate_per_s", self.rate_per_s)?;
        let arrival = match self.kind {
            ArrivalKind::Burst => Arrival::Burst {
                starts: self.starts,
            },
            ArrivalKind::Closed => Arrival::Closed {
                workers: self.workers,
                starts: self.starts,
            },
            ArrivalKind::Open => Arrival::Open {
                starts: self.starts,
                rate_per_s: self.rate_per_s,
                spacing: self.spacing,
            },
            ArrivalKind::Steady => return self.steady(),
        };
        Ok((arrival, None))
    }

    fn steady(self) -> Result<(Arrival, Option<SteadySpec>), String> {
        let lasts = positive("arrival.lasts", &self.lasts)?;
        for per_s in &self.rates_per_s {
            rate("arrival.rates_per_s", *per_s)?;
        }
        let (Some(first), Some(last)) = (self.rates_per_s.first(), self.rates_per_s.last()) else {
            return Err("arrival.rates_per_s is empty, it must name at least one rate".to_owned());
        };
        if !self.rates_per_s.is_sorted_by(|a, b| a < b) {
            return Err("arrival.rates_per_s must ascend".to_owned());
        }
        let most = last * lasts.as_secs_f64();
        if most > f64::from(MAX_STARTS) {
            return Err(format!(
                "arrival.rates_per_s and arrival.lasts cause {most:.0} starts in a round, at most {MAX_STARTS} are allowed"
            ));
        }
        let arrival = Arrival::Open {
            // The mean number at the last rate; the plan determines the actual number at random.
            starts: (1..=MAX_STARTS)
                .find(|n| f64::from(*n) >= most)
                .unwrap_or(MAX_STARTS),
            rate_per_s: *first,
            spacing: self.spacing,
        };
        let rates_per_s = self.rates_per_s;
        Ok((arrival, Some(SteadySpec { rates_per_s, lasts })))
    }
}

fn rate(key: &str, per_s: f64) -> Result<(), String> {
    if per_s.is_finite() && (0.001..=1e6).contains(&per_s) {
        return Ok(());
    }
    Err(format!(
        "{key} is {per_s}, it must lie between 0.001 and 1000000"
    ))
}

fn between(key: &str, n: u32) -> Result<(), String> {
    if (1..=MAX_STARTS).contains(&n) {
        return Ok(());
    }
    Err(format!(
        "{key} is {n}, it must lie between 1 and {MAX_STARTS}"
    ))
}

/// The arrivals of a trace. The plan takes the times from the trace; the rate is their mean.
pub(super) fn of_trace(trace: &Trace, keys: &[String]) -> Result<Arrival, String> {
    if let Some(key) = keys.first() {
        return Err(format!("arrival.{key} has no meaning in mode \"trace\""));
    }
    let starts = u32::try_from(trace.requests.len()).map_err(|e| e.to_string())?;
    let last_ms = trace.requests.last().map_or(0, |last| last.arrival_ms);
    Ok(Arrival::Open {
        starts,
        rate_per_s: f64::from(starts) * 1000.0 / (last_ms.max(1) as f64),
        spacing: Spacing::Poisson,
    })
}
