//! Parses gates: a metric, a limit in its unit and, for times, an optional limit on the ratio to the baseline.

use std::fmt;

use model::{Bytes, StartPhase};
use serde::{Deserialize, Serialize};

use stats::quantile::Quantile;

use super::event::{EventCount, EventTime};

/// A gate as written in the scenario file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GateConfig {
    name: String,
    metric: String,
    limit: String,
    #[serde(default)]
    accepted: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GateSpec {
    pub name: String,
    pub metric: Metric,
    pub limit: Limit,
    /// Directory in `results/` of the reference run from which the limit of a ratio was derived; `None` for a goal.
    #[serde(default)]
    pub accepted: Option<String>,
}

/// A value that gates can limit. Turns are counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Quantile of the latency of a phase, from the intended start.
    Phase(StartPhase, Quantile),
    /// Quantile of the duration of a turn.
    Turn(usize, Quantile),
    /// A quantile of times divided by the same quantile of host processes in the same run.
    BaselineRatio(Timed, Quantile),
    /// Duration of a turn divided by the duration of the same turn in the comparison rounds.
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
    /// Successful starts per second while the pool of a server drains.
    DrainRate,
    /// Successful starts per second, if the time until the pool is full again is included.
    #[serde(alias = "starts_per_second")]
    SustainableRate,
    /// Quantile of a duration of the scenario's events.
    Event(EventTime, Quantile),
    /// Sum of a count over the scenario's events.
    EventCount(EventCount),
}

/// Numerator of a ratio to the baseline. Turns and phases are divided by the first exec of host processes, rounds
/// by whole rounds of host processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Timed {
    Phase(StartPhase),
    /// Counted from 1.
    Turn(usize),
    Round,
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

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Phase(phase, quantile) => {
                write!(f, "{}.{}", Timed::Phase(*phase), quantile.name())
            }
            Self::Turn(number, quantile) => {
                write!(f, "{}.{}", Timed::Turn(*number), quantile.name())
            }
            Self::Round(quantile) => write!(f, "{}.{}", Timed::Round, quantile.name()),
            Self::BaselineRatio(of, quantile) => write!(f, "{of}.{}.ratio", quantile.name()),
            Self::TurnRatio(number) => write!(f, "turn.{number}.ratio"),
            Self::MemorySlope => f.write_str("memory.slope"),
            Self::Failures => f.write_str("failures"),
            Self::NotWarm => f.write_str("not_warm"),
            Self::AfterHoldFailures => f.write_str("after_hold.failures"),
            Self::DrainRate => f.write_str("drain_per_s"),
            Self::SustainableRate => f.write_str("sustainable_per_s"),
            Self::Event(time, quantile) => write!(f, "event.{}.{}", time.name(), quantile.name()),
            Self::EventCount(count) => write!(f, "event.{}", count.name()),
        }
    }
}

impl fmt::Display for Timed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Phase(phase) => f.write_str(phase.name()),
            Self::Turn(number) => write!(f, "turn.{number}"),
            Self::Round => f.write_str("round"),
        }
    }
}

impl Timed {
    fn parse(text: &str) -> Option<Self> {
        if let Some(number) = text.strip_prefix("turn.") {
            return Some(Self::Turn(number.parse().ok()?));
        }
        if text == "round" {
            return Some(Self::Round);
        }
        let phase = StartPhase::ALL.into_iter().find(|p| p.name() == text)?;
        Some(Self::Phase(phase))
    }
}

impl Metric {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "memory.slope" => Some(Self::MemorySlope),
            "failures" => Some(Self::Failures),
            "not_warm" => Some(Self::NotWarm),
            "after_hold.failures" => Some(Self::AfterHoldFailures),
            "drain_per_s" => Some(Self::DrainRate),
            "sustainable_per_s" => Some(Self::SustainableRate),
            _ if text.starts_with("event.") => Self::parse_event(text.strip_prefix("event.")?),
            _ => {
                let (time, is_ratio) = match text.strip_suffix(".ratio") {
                    Some(time) => (time, true),
                    None => (text, false),
                };
                // A ratio without a quantile must be a ratio of turns.
                if let (true, Some(Timed::Turn(number))) = (is_ratio, Timed::parse(time)) {
                    return Some(Self::TurnRatio(number));
                }
                let (of, quantile) = time.rsplit_once('.')?;
                let quantile = Quantile::ALL.into_iter().find(|q| q.name() == quantile)?;
                Some(match (Timed::parse(of)?, is_ratio) {
                    (of, true) => Self::BaselineRatio(of, quantile),
                    (Timed::Phase(phase), false) => Self::Phase(phase, quantile),
                    (Timed::Turn(number), false) => Self::Turn(number, quantile),
                    (Timed::Round, false) => Self::Round(quantile),
                })
            }
        }
    }

    fn parse_event(text: &str) -> Option<Self> {
        let Some((time, quantile)) = text.split_once('.') else {
            let count = EventCount::ALL.into_iter().find(|c| c.name() == text)?;
            return Some(Self::EventCount(count));
        };
        let time = EventTime::ALL.into_iter().find(|t| t.name() == time)?;
        let quantile = Quantile::ALL.into_iter().find(|q| q.name() == quantile)?;
        Some(Self::Event(time, quantile))
    }

    fn limit(self, text: &str) -> Result<Limit, String> {
        let (limit, shape) = match self {
            Self::Phase(..) | Self::Turn(..) | Self::Round(_) | Self::Event(..) => (
                humantime::parse_duration(text)
                    .ok()
                    .map(|d| Limit::Nanoseconds(crate::clock::nanoseconds(d))),
                "duration with a unit such as \"60ms\"",
            ),
            Self::TurnRatio(_) | Self::BaselineRatio(..) => (
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
            Self::Failures | Self::NotWarm | Self::AfterHoldFailures | Self::EventCount(_) => {
                (text.parse().ok().map(Limit::Count), "whole number")
            }
            Self::DrainRate | Self::SustainableRate => (
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
                "gate {name}: {:?} is not a metric: use PHASE.Q, turn.N.Q or round.Q with Q p50, p95, p99 or max, the \
                 same with .ratio for the ratio to host processes, or turn.N.ratio, memory.slope, failures, not_warm, after_hold.failures, drain_per_s, sustainable_per_s, event.NAME.Q or event.COUNT",
                config.metric
            )
        })?;
        let limit = metric
            .limit(&config.limit)
            .map_err(|what| format!("gate {name}: {what}"))?;
        let accepted = Some(config.accepted).filter(|run| !run.is_empty());
        let is_ratio = matches!(metric, Metric::BaselineRatio(..) | Metric::TurnRatio(_));
        if accepted.is_some() && !is_ratio {
            return Err(format!(
                "gate {name}: accepted is only allowed for ratios: {metric} has a goal as its limit"
            ));
        }
        if matches!(metric, Metric::BaselineRatio(_, Quantile::Max)) {
            return Err(format!(
                "gate {name}: a ratio of largest samples has no interval"
            ));
        }
        Ok(Self {
            name,
            metric,
            limit,
            accepted,
        })
    }
}
