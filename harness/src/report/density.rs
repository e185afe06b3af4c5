//! Levels of a run whose sandboxes accumulate, and the report of `cube-bench density`.

use serde::{Deserialize, Serialize};

use super::{phase::PhaseDocument, section::Section, terminal, units::mb};
use crate::{
    scenario::Quantile,
    summary::{
        density::{self, Bounds, Level},
        fold::Summary,
    },
};

/// Format of the JSON document of `cube-bench density`.
pub const FORMAT: u32 = 2;

/// State after a measured round. Ascending in `alive`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LevelDocument {
    /// Sandboxes that are alive.
    pub alive: u32,
    /// Sandboxes that would be alive if every start up to here had succeeded.
    pub target: u32,
    /// Failed starts up to here.
    pub failed: usize,
    /// The last 100 starts, or all of the last round if it has more.
    pub first_exec: PhaseDocument,
    /// Decrease of available memory since no sandbox was alive.
    pub memory_bytes: Option<f64>,
    /// CPU time of all sandboxes while they idle; `null` if it was not measured at this level.
    pub idle_cpu_ms_per_s: Option<f64>,
}

/// The JSON document of `cube-bench density`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DensityReport {
    /// [`FORMAT`].
    pub format: u32,
    pub scenario: String,
    /// Limits; `null` for a value without one.
    pub p95_bound_ms: Option<f64>,
    pub memory_bound_bytes: Option<f64>,
    pub idle_cpu_bound_ms_per_s: Option<f64>,
    /// Largest measured number of sandboxes that stays within all bounds, as do all smaller ones; `null` if there
    /// is none.
    pub holds: Option<u32>,
    /// Lowest measured number that exceeds a bound or at which starts failed; `null` if there is none.
    pub misses: Option<u32>,
    /// Bounds that `misses` exceeds, and failed starts.
    pub reasons: Vec<String>,
    /// Why levels could not be judged.
    pub unknown: Vec<String>,
    pub levels: Vec<LevelDocument>,
}

/// The levels of a run; empty unless its sandboxes live to the end.
#[must_use]
pub fn levels(summary: &Summary) -> Vec<LevelDocument> {
    let levels = density::levels(summary);
    levels.iter().map(LevelDocument::new).collect()
}

impl LevelDocument {
    fn new(level: &Level) -> Self {
        Self {
            alive: level.alive,
            target: level.target,
            failed: level.failed,
            first_exec: PhaseDocument::new(&level.first_exec),
            memory_bytes: level.memory_bytes,
            idle_cpu_ms_per_s: level.idle_cpu_ms_per_s,
        }
    }

    fn row(&self) -> Vec<String> {
        let p = &self.first_exec;
        let idle = self.idle_cpu_ms_per_s;
        vec![
            self.alive.to_string(),
            self.failed.to_string(),
            p.cell(Quantile::P50),
            p.cell(Quantile::P95),
            p.cell(Quantile::Max),
            mb(self.memory_bytes),
            idle.map_or("n/a".to_owned(), |ms| format!("{ms:.1} ms/s")),
        ]
    }
}

/// First exec in milliseconds over the last 100 starts before each number of living sandboxes, failed starts up to
/// there, and memory and idle CPU time of all of them.
pub(super) fn section(levels: &[LevelDocument]) -> Section {
    Section::numbers(
        "sandboxes alive",
        [
            "failed", "P50, ms", "P95, ms", "max, ms", "memory", "idle CPU",
        ],
        levels.iter().map(LevelDocument::row).collect(),
    )
}

impl DensityReport {
    /// Judges the levels of a run.
    #[must_use]
    pub fn new(scenario: &str, summary: &Summary, bounds: &Bounds) -> Self {
        let levels = density::levels(summary);
        let found = density::largest(&levels, bounds);
        let (misses, reasons) = found.misses.unzip();
        Self {
            format: FORMAT,
            scenario: scenario.to_owned(),
            p95_bound_ms: bounds.p95_ms,
            memory_bound_bytes: bounds.memory_bytes,
            idle_cpu_bound_ms_per_s: bounds.idle_cpu_ms_per_s,
            holds: found.holds,
            misses,
            reasons: reasons.unwrap_or_default(),
            unknown: found.unknown,
            levels: levels.iter().map(LevelDocument::new).collect(),
        }
    }

    /// The report for a terminal.
    #[must_use]
    pub fn render(&self) -> String {
        let bounds = [
            self.p95_bound_ms
                .map(|ms| format!("first exec P95 at most {ms} ms")),
            self.memory_bound_bytes
                .map(|bytes| format!("memory at most {}", mb(Some(bytes)))),
            self.idle_cpu_bound_ms_per_s
                .map(|ms| format!("idle CPU time at most {ms} ms per second")),
        ];
        let bounds: Vec<String> = bounds.into_iter().flatten().collect();
        let mut section = section(&self.levels);
        let reasons = self.reasons.join(", ");
        section.notes.push(match (self.holds, self.misses) {
            (Some(holds), Some(misses)) => {
                format!("holds {holds} sandboxes, misses {misses}: {reasons}")
            }
            (Some(holds), None) => format!("holds {holds} sandboxes, the largest number measured"),
            (None, Some(misses)) => format!(
                "misses {misses} sandboxes, the smallest number that could be judged: {reasons}"
            ),
            (None, None) => "no number of sandboxes could be judged".to_owned(),
        });
        if !self.unknown.is_empty() {
            let unknown = self.unknown.join(", ");
            section.notes.push(format!("not judged: {unknown}"));
        }
        let bounds = bounds.join(", ");
        format!(
            "{}: {bounds}\n\n{}",
            self.scenario,
            terminal::section(&section)
        )
    }
}
