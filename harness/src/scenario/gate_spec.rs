//! Gates as they are written: a metric, a limit in the metric's unit, and for times a ratio.

use std::fmt;

use model::{Bytes, StartPhase};
use serde::{Deserialize, Serialize};

/// A gate as typed.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GateConfig {
    name: String,
    metric: String,
    limit: String,
    limit_ratio: Option<f64>,
}

/// A checked gate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GateSpec {
    /// Shown in reports.
    pub name: String,
    /// What is compared.
    pub metric: Metric,
    /// With what.
    pub limit: Limit,
    /// On a host below publishable: at most so many times the baseline's quantile. Times only.
    pub limit_ratio: Option<f64>,
}

/// What a gate compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// A quantile of a phase of the ladder, from the intended start.
    Phase(StartPhase, Quantile),
    /// A quantile of a turn, by its number from 1, from its question to its answer.
    Turn(usize, Quantile),
    /// Of a turn, by its number from 1: its time over that of the same turn beside.
    TurnRatio(usize),
    /// A quantile of whole rounds, from the first intended start to the end of the last start.
    Round(Quantile),
    /// What one more clone costs the host.
    MemorySlope,
    /// Clones that did not reach first exec with the right answer.
    Failures,
    /// Clones that did not come from the server's warm pool, failed ones included.
    NotWarm,
    /// Held clones that did not answer once more.
    AfterHoldFailures,
    /// Clones that reached first exec per second of measured rounds.
    StartsPerSecond,
}

/// The quantiles that are reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantile {
    /// Median.
    P50,
    /// 95 of 100.
    P95,
    /// 99 of 100.
    P99,
    /// The largest sample.
    Max,
}

/// A limit in the unit of its metric.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// At most so many nanoseconds.
    Nanoseconds(u64),
    /// At most so many bytes.
    Bytes(u64),
    /// At most so many.
    Count(u64),
    /// At least so many a second.
    PerSecond(f64),
    /// At most so many times as much.
    Times(f64),
}

impl Quantile {
    /// All, in rising order.
    pub const ALL: [Self; 4] = [Self::P50, Self::P95, Self::P99, Self::Max];

    /// `p50`, `p95`, `p99`, `max`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::P50 => "p50",
            Self::P95 => "p95",
            Self::P99 => "p99",
            Self::Max => "max",
        }
    }
}

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Phase(phase, quantile) => write!(f, "{}.{}", phase.name(), quantile.name()),
            Self::Turn(number, quantile) => write!(f, "turn.{number}.{}", quantile.name()),
            Self::TurnRatio(number) => write!(f, "turn.{number}.ratio"),
            Self::Round(quantile) => write!(f, "round.{}", quantile.name()),
            Self::MemorySlope => f.write_str("memory.slope"),
            Self::Failures => f.write_str("failures"),
            Self::NotWarm => f.write_str("not_warm"),
            Self::AfterHoldFailures => f.write_str("after_hold.failures"),
            Self::StartsPerSecond => f.write_str("starts_per_s"),
        }
    }
}

impl Metric {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "memory.slope" => Some(Self::MemorySlope),
            "failures" => Some(Self::Failures),
            "not_warm" => Some(Self::NotWarm),
            "after_hold.failures" => Some(Self::AfterHoldFailures),
            "starts_per_s" => Some(Self::StartsPerSecond),
            _ => {
                let (of, quantile) = text.rsplit_once('.')?;
                if let ("ratio", Some(number)) = (quantile, of.strip_prefix("turn.")) {
                    return Some(Self::TurnRatio(number.parse().ok()?));
                }
                let quantile = Quantile::ALL.into_iter().find(|q| q.name() == quantile)?;
                if let Some(number) = of.strip_prefix("turn.") {
                    return Some(Self::Turn(number.parse().ok()?, quantile));
                }
                if of == "round" {
                    return Some(Self::Round(quantile));
                }
                let phase = StartPhase::ALL.into_iter().find(|p| p.name() == of)?;
                Some(Self::Phase(phase, quantile))
            }
        }
    }

    fn limit(self, text: &str) -> Result<Limit, String> {
        let (limit, shape) = match self {
            Self::Phase(..) | Self::Turn(..) | Self::Round(_) => (
                humantime::parse_duration(text)
                    .ok()
                    .map(|d| Limit::Nanoseconds(crate::clock::nanoseconds(d))),
                "duration with a unit such as \"60ms\"",
            ),
            Self::TurnRatio(_) => (
                text.parse::<f64>()
                    .ok()
                    .filter(|n| n.is_finite() && *n > 0.0)
                    .map(Limit::Times),
                "number such as \"1.10\"",
            ),
            Self::MemorySlope => (
                text.parse::<Bytes>().ok().map(|b| Limit::Bytes(b.0)),
                "size with a unit such as \"5MB\"",
            ),
            Self::Failures | Self::NotWarm | Self::AfterHoldFailures => {
                (text.parse().ok().map(Limit::Count), "whole number")
            }
            Self::StartsPerSecond => (
                text.strip_suffix("/s")
                    .and_then(|n| n.trim_end().parse::<f64>().ok())
                    .filter(|n| n.is_finite() && *n > 0.0)
                    .map(Limit::PerSecond),
                "rate such as \"100/s\"",
            ),
        };
        limit.ok_or_else(|| format!("limit {text:?} is no {shape}"))
    }
}

impl TryFrom<GateConfig> for GateSpec {
    type Error = String;

    fn try_from(config: GateConfig) -> Result<Self, String> {
        let name = config.name;
        let metric = Metric::parse(&config.metric).ok_or_else(|| {
            format!(
                "gate {name}: {:?} is no metric: write PHASE.p50, .p95, .p99 or .max, the same of turn.N \
                 or round, turn.N.ratio, memory.slope, failures, not_warm, after_hold.failures or starts_per_s",
                config.metric
            )
        })?;
        let limit = metric
            .limit(&config.limit)
            .map_err(|what| format!("gate {name}: {what}"))?;
        if let Some(ratio) = config.limit_ratio {
            if !matches!(
                metric,
                Metric::Phase(..) | Metric::Turn(..) | Metric::Round(_)
            ) {
                return Err(format!("gate {name}: limit_ratio is for times only"));
            }
            if !(ratio.is_finite() && ratio > 0.0) {
                return Err(format!("gate {name}: limit_ratio is {ratio}"));
            }
        }
        Ok(Self {
            name,
            metric,
            limit,
            limit_ratio: config.limit_ratio,
        })
    }
}
