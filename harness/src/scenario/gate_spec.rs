//! Parses gates: a metric, a limit in its unit and, for values that reference runs give, the run of the limit.

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
    #[serde(default)]
    host: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GateSpec {
    pub name: String,
    pub metric: Metric,
    pub limit: Limit,
    /// Directory in `results/` of the reference run from which the limit was derived; `None` for a goal.
    #[serde(default)]
    pub accepted: Option<String>,
    /// Class of the hosts to which the limit applies; `None` for all.
    #[serde(default)]
    pub host: Option<String>,
}

/// A value that gates can limit. Turns are counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Quantile of the latency of a phase, from the intended start.
    Phase(StartPhase, Quantile),
    /// Quantile of the latency of a phase in another row of the report.
    Other(OtherRow, StartPhase, Quantile),
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
    /// Resident set size of one VMM, mean over held clones, in bytes.
    MemoryRss,
    /// Proportional set size of one VMM, mean over held clones, in bytes.
    MemoryPss,
    /// CPU time per start, until the pool is full again.
    CpuPerStart,
    /// Number of failed starts.
    Failures,
    /// Number of starts that did not take a sandbox from the warm pool of the server, failed ones included.
    NotWarm,
    /// Share of starts that took a sandbox from the warm pool of the server.
    HitRate,
    /// Number of failed repeats in held clones, of the first command or of a denied exchange.
    AfterHoldFailures,
    /// Successful starts per second while the pool of a server drains.
    DrainRate,
    /// Successful starts per second, if the time until the pool is full again is included.
    #[serde(alias = "starts_per_second")]
    SustainableRate,
    /// Largest of the scenario's rates that was sustained together with all lower ones.
    SustainedRate,
    /// Largest number of living sandboxes that was reached without a failed start.
    DensityAlive,
    /// Quantile of a duration of the scenario's events.
    Event(EventTime, Quantile),
    /// Sum of a count over the scenario's events.
    EventCount(EventCount),
}

/// Starts that are not in the phases of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OtherRow {
    /// Starts while the template was not in the page cache.
    Cold,
    /// Starts of the comparison rounds.
    Beside,
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
    /// Lower limit of a count.
    AtLeast(u64),
    /// Lower limit of a rate.
    PerSecond(f64),
    /// Lower limit of a share.
    Percent(f64),
    /// Upper limit of a ratio.
    Times(f64),
}

/// Metrics whose name has no parameter.
const NAMED: [(&str, Metric); 12] = [
    ("memory.slope", Metric::MemorySlope),
    ("memory.rss", Metric::MemoryRss),
    ("memory.pss", Metric::MemoryPss),
    ("cpu_per_start", Metric::CpuPerStart),
    ("failures", Metric::Failures),
    ("not_warm", Metric::NotWarm),
    ("hit_rate", Metric::HitRate),
    ("after_hold.failures", Metric::AfterHoldFailures),
    ("drain_per_s", Metric::DrainRate),
    ("sustainable_per_s", Metric::SustainableRate),
    ("sustained_per_s", Metric::SustainedRate),
    ("density.alive", Metric::DensityAlive),
];

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Phase(phase, quantile) => {
                write!(f, "{}.{}", Timed::Phase(*phase), quantile.name())
            }
            Self::Other(row, phase, quantile) => {
                write!(f, "{}.{}.{}", row.name(), phase.name(), quantile.name())
            }
            Self::Turn(number, quantile) => {
                write!(f, "{}.{}", Timed::Turn(*number), quantile.name())
            }
            Self::Round(quantile) => write!(f, "{}.{}", Timed::Round, quantile.name()),
            Self::BaselineRatio(of, quantile) => write!(f, "{of}.{}.ratio", quantile.name()),
            Self::TurnRatio(number) => write!(f, "turn.{number}.ratio"),
            Self::Event(time, quantile) => write!(f, "event.{}.{}", time.name(), quantile.name()),
            Self::EventCount(count) => write!(f, "event.{}", count.name()),
            named => {
                let found = NAMED.iter().find(|(_, metric)| metric == named);
                f.write_str(found.map_or("", |(name, _)| name))
            }
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

impl OtherRow {
    const ALL: [Self; 2] = [Self::Cold, Self::Beside];

    fn name(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::Beside => "beside",
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
        Some(Self::Phase(phase(text)?))
    }
}

fn phase(text: &str) -> Option<StartPhase> {
    StartPhase::ALL.into_iter().find(|p| p.name() == text)
}

fn quantile(text: &str) -> Option<Quantile> {
    Quantile::ALL.into_iter().find(|q| q.name() == text)
}

impl Metric {
    fn parse(text: &str) -> Option<Self> {
        if let Some((_, metric)) = NAMED.iter().find(|(name, _)| *name == text) {
            return Some(*metric);
        }
        if let Some(event) = text.strip_prefix("event.") {
            return Self::parse_event(event);
        }
        for row in OtherRow::ALL {
            let rest = text
                .strip_prefix(row.name())
                .and_then(|t| t.strip_prefix('.'));
            if let Some((of, q)) = rest.and_then(|rest| rest.split_once('.')) {
                return Some(Self::Other(row, phase(of)?, quantile(q)?));
            }
        }
        let (time, is_ratio) = match text.strip_suffix(".ratio") {
            Some(time) => (time, true),
            None => (text, false),
        };
        // A ratio without a quantile must be a ratio of turns.
        if let (true, Some(Timed::Turn(number))) = (is_ratio, Timed::parse(time)) {
            return Some(Self::TurnRatio(number));
        }
        let (of, q) = time.rsplit_once('.')?;
        let q = quantile(q)?;
        Some(match (Timed::parse(of)?, is_ratio) {
            (of, true) => Self::BaselineRatio(of, q),
            (Timed::Phase(phase), false) => Self::Phase(phase, q),
            (Timed::Turn(number), false) => Self::Turn(number, q),
            (Timed::Round, false) => Self::Round(q),
        })
    }

    /// `text` is the part after `event.`: a count, or a time with a quantile.
    fn parse_event(text: &str) -> Option<Self> {
        let Some((time, q)) = text.split_once('.') else {
            let count = EventCount::ALL.into_iter().find(|c| c.name() == text)?;
            return Some(Self::EventCount(count));
        };
        let time = EventTime::ALL.into_iter().find(|t| t.name() == time)?;
        Some(Self::Event(time, quantile(q)?))
    }

    /// The metric with the most similar name. Of metrics with a parameter, only typical ones are compared.
    fn nearest(text: &str) -> String {
        let timed = StartPhase::ALL.map(Timed::Phase).into_iter();
        let timed = timed.chain([Timed::Turn(1), Timed::Round]).flat_map(|of| {
            let of_quantile = move |q: Quantile| {
                let name = format!("{of}.{}", q.name());
                [format!("{name}.ratio"), name]
            };
            Quantile::ALL.into_iter().flat_map(of_quantile)
        });
        let others = OtherRow::ALL.into_iter().flat_map(|row| {
            let of_phase =
                move |phase| Quantile::ALL.map(|q| Self::Other(row, phase, q).to_string());
            StartPhase::ALL.into_iter().flat_map(of_phase)
        });
        let events = EventTime::ALL.into_iter();
        let events = events.map(|time| Self::Event(time, Quantile::Max).to_string());
        let counts = EventCount::ALL.into_iter();
        let counts = counts.map(|count| Self::EventCount(count).to_string());
        let named = NAMED.iter().map(|(name, _)| (*name).to_owned());
        let all = named.chain(timed).chain(others).chain(events).chain(counts);
        all.min_by_key(|name| strsim::damerau_levenshtein(name, text))
            .unwrap_or_default()
    }

    /// Checks the keys `accepted` and `host` of a gate.
    fn can_be_derived(self, accepted: bool, host: bool) -> Result<(), String> {
        // Memory of a clone and ratios hardly depend on the host; times do.
        let depends_on_host = match self {
            Self::BaselineRatio(..)
            | Self::TurnRatio(_)
            | Self::MemorySlope
            | Self::MemoryRss
            | Self::MemoryPss => false,
            Self::Phase(..) | Self::Turn(..) | Self::Round(_) | Self::CpuPerStart => true,
            _ if accepted => {
                return Err(format!(
                    "accepted has no meaning for {self}: its limit is a goal"
                ));
            }
            _ => false,
        };
        match (accepted, host) {
            (true, false) if depends_on_host => Err(format!(
                "{self} of one host is no limit for another: set host to the accepted run's, such as \"AMD EPYC, 2 cores, Linux 6.1\""
            )),
            (false, true) => {
                Err("host has no meaning for a goal: remove it, or set accepted".into())
            }
            _ => Ok(()),
        }
    }

    fn limit(self, text: &str) -> Result<Limit, String> {
        let positive = |text: &str| {
            let number = text.trim_end().parse::<f64>().ok();
            number.filter(|n| n.is_finite() && *n > 0.0)
        };
        let (limit, shape) = match self {
            Self::Phase(..)
            | Self::Other(..)
            | Self::Turn(..)
            | Self::Round(_)
            | Self::Event(..)
            | Self::CpuPerStart => (
                humantime::parse_duration(text)
                    .ok()
                    .map(|d| Limit::Nanoseconds(crate::clock::nanoseconds(d))),
                "duration with a unit such as \"60ms\"",
            ),
            Self::TurnRatio(_) | Self::BaselineRatio(..) => {
                (positive(text).map(Limit::Times), "number such as \"1.10\"")
            }
            Self::MemorySlope | Self::MemoryRss | Self::MemoryPss => (
                text.parse::<Bytes>().ok().map(|b| Limit::Bytes(b.0)),
                "size with a unit such as \"5MB\"",
            ),
            Self::Failures | Self::NotWarm | Self::AfterHoldFailures | Self::EventCount(_) => {
                (text.parse().ok().map(Limit::Count), "whole number")
            }
            Self::DensityAlive => (text.parse().ok().map(Limit::AtLeast), "whole number"),
            Self::HitRate => (
                text.strip_suffix('%')
                    .and_then(positive)
                    .filter(|percent| *percent <= 100.0)
                    .map(Limit::Percent),
                "share such as \"99%\"",
            ),
            Self::DrainRate | Self::SustainableRate | Self::SustainedRate => (
                text.strip_suffix("/s")
                    .and_then(positive)
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
                "gate {name}: {:?} is not a metric, the nearest one is `{}`; docs/measure/measuring.md lists all under Gates",
                config.metric,
                Metric::nearest(&config.metric)
            )
        })?;
        let limit = metric
            .limit(&config.limit)
            .map_err(|what| format!("gate {name}: {what}"))?;
        let accepted = Some(config.accepted).filter(|run| !run.is_empty());
        let host = Some(config.host).filter(|host| !host.is_empty());
        metric
            .can_be_derived(accepted.is_some(), host.is_some())
            .map_err(|why| format!("gate {name}: {why}"))?;
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
            host,
        })
    }
}
