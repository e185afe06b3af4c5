//! Parses gates: a metric, a limit in the unit of the metric and, for metrics that are times, an optional limit on the
//! ratio to the baseline.

use std::fmt;

use model::{Bytes, StartPhase};
use serde::{Deserialize, Serialize};

/// A gate as written in the scenario file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GateConfig {
    name: String,
    metric: String,
    limit: String,
    limit_ratio: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GateSpec {
    pub name: String,
    pub metric: Metric,
    pub limit: Limit,
    /// Largest accepted ratio to the same quantile of the baseline. It decides if the metric exceeds `limit` on a host
    /// graded indicative. Only for metrics that are times.
    pub limit_ratio: Option<f64>,
}

/// A figure of a run that gates can limit. Turns are counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Quantile of the latency of a phase, from the intended start.
    Phase(StartPhase, Quantile),
    /// Quantile of the duration of a turn.
    Turn(usize, Quantile),
    /// Duration of a turn divided by the duration of the same turn in the rounds beside.
    TurnRatio(usize),
    /// Quantile of the duration of whole rounds, from the base of the arrivals until the last start has ended.
    Round(Quantile),
    /// Decrease of available memory per additional clone, in bytes.
    MemorySlope,
    /// Number of failed starts.
    Failures,
    /// Number of starts that did not take a sandbox from the warm pool of the server, failed ones included.
    NotWarm,
    /// Number of failed repeats in held clones, of the first command or of a denied exchange.
    AfterHoldFailures,
    /// Successful starts per second of measured rounds.
    StartsPerSecond,
}

/// A quantile that reports print and gates can limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantile {
    P50,
    P95,
    P99,
    /// The largest sample.
    Max,
}

/// A limit in the unit of its metric.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Upper limit in nanoseconds.
    Nanoseconds(u64),
    /// Upper limit in bytes.
    Bytes(u64),
    /// Upper limit of a count.
    Count(u64),
    /// Lower limit of a rate.
    PerSecond(f64),
    /// Upper limit of a ratio.
    Times(f64),
}

impl Quantile {
    /// All quantiles in ascending order.
    pub const ALL: [Self; 4] = [Self::P50, Self::P95, Self::P99, Self::Max];

    /// Name in metrics, JSON and reports.
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
        limit.ok_or_else(|| format!("limit {text:?} is not a {shape}"))
    }
}

impl TryFrom<GateConfig> for GateSpec {
    type Error = String;

    fn try_from(config: GateConfig) -> Result<Self, String> {
        let name = config.name;
        let metric = Metric::parse(&config.metric).ok_or_else(|| {
            format!(
                "gate {name}: {:?} is not a metric: use PHASE.Q, turn.N.Q or round.Q with Q p50, p95, p99 or max, or \
                 turn.N.ratio, memory.slope, failures, not_warm, after_hold.failures or starts_per_s",
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
                return Err(format!(
                    "gate {name}: limit_ratio is only allowed for metrics that are times"
                ));
            }
            if !(ratio.is_finite() && ratio > 0.0) {
                return Err(format!(
                    "gate {name}: limit_ratio is {ratio}, it must be a positive number"
                ));
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
