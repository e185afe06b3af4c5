//! Starts at several rates and by the number of warm slots, in reports.

use serde::{Deserialize, Serialize};

use super::phase::PhaseDocument;
use crate::summary::{
    fold::Summary,
    load::{self, AtLevel, AtRate},
};

/// Starts of a scenario with several rates, or of one that watches its pool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadDocument {
    /// Largest rate of `rates` that was sustained together with all lower ones; `null` if none was.
    pub sustained_per_s: Option<f64>,
    /// Ascending; empty unless the scenario has several rates.
    pub rates: Vec<RateDocument>,
    /// The fullest first; empty unless the scenario watches the pool.
    pub levels: Vec<LevelDocument>,
}

/// Starts at one rate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RateDocument {
    pub rate_per_s: f64,
    pub replied: PhaseDocument,
    pub first_exec: PhaseDocument,
    /// Share of starts from a warm slot, 0 to 1.
    pub hit_rate: Option<f64>,
    /// CPU time of the server with its sandboxes per start, until the pool is full again.
    pub cpu_ms_per_start: Option<f64>,
    /// Longest time, over the rounds, from the end of the last start until the pool is full again.
    pub until_full_ms: Option<f64>,
    pub sustained: bool,
    /// Why the rate was not sustained; `null` if it was.
    pub reason: Option<String>,
}

/// Starts that found between `least` and `most` warm slots.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LevelDocument {
    pub least: u32,
    pub most: u32,
    pub first_exec: PhaseDocument,
    /// Share of starts from a warm slot, 0 to 1.
    pub hit_rate: Option<f64>,
}

impl LoadDocument {
    /// `None` if the scenario has one rate and does not watch its pool.
    #[must_use]
    pub fn new(summary: &Summary) -> Option<Self> {
        let (rates, levels) = (load::by_rate(summary), load::by_level(summary));
        (!rates.is_empty() || !levels.is_empty()).then(|| Self {
            sustained_per_s: load::sustained(&rates),
            rates: rates.iter().map(RateDocument::new).collect(),
            levels: levels.iter().map(LevelDocument::new).collect(),
        })
    }

    /// Rows of latencies with their names.
    pub(super) fn latencies(&self) -> Vec<(String, &PhaseDocument)> {
        let rates = self.rates.iter().flat_map(|at| {
            let rate = at.rate_per_s;
            [
                (format!("{rate} per second: replied"), &at.replied),
                (format!("{rate} per second: first_exec"), &at.first_exec),
            ]
        });
        let levels = self
            .levels
            .iter()
            .map(|at| (format!("{}: first_exec", at.name()), &at.first_exec));
        rates.chain(levels).collect()
    }

    /// Rows of costs: name and value.
    pub(super) fn costs(&self) -> Vec<(String, String)> {
        let share = |of: Option<f64>| {
            of.map_or("n/a".to_owned(), |share| {
                format!("{:.1} % warm", share * 100.0)
            })
        };
        let mut rows = Vec::new();
        if !self.rates.is_empty() {
            let rate = self
                .sustained_per_s
                .map_or("none of the rates".to_owned(), |rate| {
                    format!("{rate} starts per second")
                });
            rows.push(("largest sustained rate".to_owned(), rate));
        }
        rows.extend(self.rates.iter().map(|at| {
            let cpu = at.cpu_ms_per_start.map_or("n/a".to_owned(), |ms| {
                format!("{ms:.2} ms of CPU per start")
            });
            let verdict = at.reason.as_ref().map_or("sustained".to_owned(), |why| {
                format!("not sustained: {why}")
            });
            (
                format!("at {} per second", at.rate_per_s),
                format!("{}, {cpu}, {verdict}", share(at.hit_rate)),
            )
        }));
        rows.extend(self.levels.iter().map(|at| (at.name(), share(at.hit_rate))));
        rows
    }
}

impl RateDocument {
    fn new(at: &AtRate) -> Self {
        Self {
            rate_per_s: at.rate_per_s,
            replied: PhaseDocument::new(&at.replied),
            first_exec: PhaseDocument::new(&at.first_exec),
            hit_rate: at.hit_rate,
            cpu_ms_per_start: at.cpu_ns_per_start.map(|ns| ns / 1e6),
            until_full_ms: at.until_full_ms,
            sustained: at.not_sustained.is_none(),
            reason: at.not_sustained.clone(),
        }
    }
}

impl LevelDocument {
    fn new(at: &AtLevel) -> Self {
        Self {
            least: at.least,
            most: at.most,
            first_exec: PhaseDocument::new(&at.first_exec),
            hit_rate: at.hit_rate,
        }
    }

    fn name(&self) -> String {
        match (self.least, self.most) {
            (_, 0) => "no warm slot left".to_owned(),
            (least, most) => format!("{least} to {most} warm slots left"),
        }
    }
}
