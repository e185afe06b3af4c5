//! Cluster section of a report: start rates, and event effects as clients saw them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{View, peers::QuotientDocument, phase::PhaseDocument, units::mb};
use crate::{
    plan::Subject,
    scenario::{Arrival, EventCount, EventTime},
    summary::cost,
};

/// A run whose target is a cluster on this host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterDocument {
    /// Number of nodes. They share the cores of the host.
    pub nodes: u8,
    /// Rates of the target and the peers. Empty unless arrivals are a closed loop and the scenario has peers.
    pub rates: Vec<RateDocument>,
    /// `null` without an event.
    pub event: Option<EventDocument>,
}

/// Start rate of a system, with removal and refill included.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RateDocument {
    pub name: String,
    pub starts_per_s: Option<f64>,
    /// Rate of the target divided by this rate; `null` for the target.
    pub target_ratio: Option<QuotientDocument>,
}

/// Events of measured rounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EventDocument {
    /// `kill-node` or `drain-node`.
    pub kind: String,
    /// Number of events.
    pub n: usize,
    /// Durations by name. A condition that was not met in time counts as failed.
    pub times: BTreeMap<String, PhaseDocument>,
    /// Sums over all events, by name.
    pub counts: BTreeMap<String, u64>,
    /// Number of failed events, and the first of their messages.
    pub failed: usize,
    pub first_failure: Option<String>,
}

impl ClusterDocument {
    /// `None` unless the run started a cluster as its target.
    pub(super) fn new(view: &View<'_>) -> Option<Self> {
        let cluster = view.scenario.cluster()?;
        Some(Self {
            nodes: cluster.nodes,
            rates: rates(view),
            event: EventDocument::new(view),
        })
    }

    /// Rows of durations with their names.
    pub(super) fn latencies(&self) -> Vec<(String, &PhaseDocument)> {
        let events = self.event.iter();
        let times = events.flat_map(|event| {
            let named = event.times.iter();
            named.map(|(name, row)| (format!("{}: {name}", event.kind), row))
        });
        times.collect()
    }

    /// Rows of costs: name and value.
    pub(super) fn costs(&self, cores: usize) -> Vec<(String, String)> {
        let nodes = format!(
            "{}, which share the {cores} cores of this host: their overhead, not their speed-up",
            self.nodes
        );
        let mut rows = vec![("nodes".to_owned(), nodes)];
        rows.extend(self.rates.iter().map(|rate| {
            let value = rate
                .starts_per_s
                .map_or("n/a".to_owned(), |rate| format!("{rate:.1}"));
            let ratio = rate.target_ratio.map_or(String::new(), |ratio| {
                format!("; the target has {} times as many", ratio.text())
            });
            (
                format!("starts per second, with removal and refill: {}", rate.name),
                format!("{value}{ratio}"),
            )
        }));
        if let Some(event) = &self.event {
            rows.extend(event.counts.iter().map(|(name, count)| {
                let value = if *name == EventCount::MovedBytes.name() {
                    let mean = *count as f64 / event.n.max(1) as f64;
                    format!("{} per event, mean", mb(Some(mean)))
                } else {
                    format!("{count} in {} events", event.n)
                };
                (format!("{}: {name}", event.kind), value)
            }));
            rows.extend(event.first_failure.iter().map(|why| {
                let name = format!(
                    "{}: {} of {} events failed",
                    event.kind, event.failed, event.n
                );
                (name, why.clone())
            }));
        }
        rows
    }
}

fn rates(view: &View<'_>) -> Vec<RateDocument> {
    if !matches!(view.scenario.arrival, Arrival::Closed { .. }) {
        return Vec::new();
    }
    let target = cost::starts_per_s(view.summary, Subject::Clone);
    let systems = view.summary.systems.iter();
    let rates = systems.map(|system| {
        let rate = cost::starts_per_s(view.summary, system.subject);
        let is_target = system.subject == Subject::Clone;
        RateDocument {
            name: system.name.clone(),
            starts_per_s: rate.value(),
            target_ratio: (!is_target).then(|| QuotientDocument::new(&target.over(&rate))),
        }
    });
    rates.collect()
}

impl EventDocument {
    fn new(view: &View<'_>) -> Option<Self> {
        let spec = view.scenario.event()?;
        let (summary, events) = (view.summary, &view.summary.happened);
        let times = EventTime::ALL
            .into_iter()
            .filter(|time| time.kind() == spec.kind);
        let counts = EventCount::ALL.into_iter();
        let mut failures = events.iter().filter_map(|event| event.failure.as_ref());
        Some(Self {
            kind: spec.kind.name().to_owned(),
            n: events.len(),
            times: times
                .map(|time| {
                    let row = PhaseDocument::new(&summary.event_samples(time));
                    (time.name().to_owned(), row)
                })
                .collect(),
            counts: counts
                .filter_map(|count| Some((count.name().to_owned(), summary.event_count(count)?)))
                .collect(),
            failed: failures.clone().count(),
            first_failure: failures.next().cloned(),
        })
    }
}
