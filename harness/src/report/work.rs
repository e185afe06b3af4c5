//! First work in a report: whether warm-ups have run it, and whether its modules were loaded.

use serde::{Deserialize, Serialize};

use super::{View, phase::PhaseDocument};
use crate::{
    event::Attempt,
    summary::fold::{self, Summary},
    work::{self, WorkKind, WorkSet},
};
use model::StartPhase;

/// Whether warm-ups of the shipped templates have run the first work of a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FirstWork {
    /// The same work ran before the snapshot or in the warm slot, so the number does not represent a customer's
    /// first wait.
    Trained,
    /// Warm-ups have run some items of the work file.
    PartlyTrained,
    /// No warm-up contains the work.
    Unseen,
}

/// Work of a scenario that has a work file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkDocument {
    /// Path of the file as given.
    pub file: String,
    pub sha256: String,
    pub kind: WorkKind,
    /// Items in the file.
    pub items: usize,
    /// Items of the file that warm-ups have run.
    pub trained_items: usize,
    pub clones: WorkRows,
    /// The same for the comparison rounds; `null` without them.
    pub beside: Option<WorkRows>,
    /// All items that measured clones of the target ran, slowest first.
    pub by_item: Vec<ItemDocument>,
}

/// First-exec latencies, by whether a new sandbox had loaded everything that the item needs. Both are `null` if the
/// target could not be queried.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkRows {
    /// `null` if there were no such starts.
    pub loaded: Option<PhaseDocument>,
    /// `null` if there were no such starts.
    pub not_loaded: Option<PhaseDocument>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ItemDocument {
    pub id: String,
    /// `null` if the target could not be queried.
    pub is_loaded: Option<bool>,
    /// Measured starts, failures included.
    pub n: usize,
    pub failed: usize,
    /// `null` if all starts failed.
    pub fastest_ms: Option<f64>,
    pub slowest_ms: Option<f64>,
}

impl FirstWork {
    #[must_use]
    pub(super) fn of(view: &View<'_>) -> Self {
        let scenario = view.scenario;
        let Some(set) = &scenario.work else {
            return if work::is_trained(&scenario.exec) {
                Self::Trained
            } else {
                Self::Unseen
            };
        };
        match trained_items(set) {
            0 => Self::Unseen,
            n if n == set.items.len() => Self::Trained,
            _ => Self::PartlyTrained,
        }
    }

    /// Wording in reports.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Trained => "trained",
            Self::PartlyTrained => "partly trained",
            Self::Unseen => "unseen",
        }
    }
}

fn trained_items(set: &WorkSet) -> usize {
    let trained = set.items.iter().filter(|item| work::is_trained(&item.exec));
    trained.count()
}

impl WorkDocument {
    /// `None` unless the scenario takes its work from a file.
    #[must_use]
    pub(super) fn new(view: &View<'_>) -> Option<Self> {
        let set = view.scenario.work.as_ref()?;
        let summary = view.summary;
        Some(Self {
            file: set.file.display().to_string(),
            sha256: set.sha256.clone(),
            kind: set.kind,
            items: set.items.len(),
            trained_items: trained_items(set),
            clones: WorkRows::new(set, summary, &summary.clones),
            beside: (!summary.beside.is_empty())
                .then(|| WorkRows::new(set, summary, &summary.beside)),
            by_item: by_item(set, summary),
        })
    }

    /// Names and latencies of the rows of the target, and of the comparison rounds, which are named `beside`.
    pub(super) fn rows(&self, beside: &str) -> Vec<(String, &PhaseDocument)> {
        let both = [(String::new(), Some(&self.clones))];
        let beside = [(format!("{beside}: "), self.beside.as_ref())];
        let mut rows = Vec::new();
        for (prefix, of) in both.into_iter().chain(beside) {
            let [loaded, not_loaded] = match self.kind {
                WorkKind::Python | WorkKind::Javascript => ["modules loaded", "modules not loaded"],
                WorkKind::Command => ["programs warmed up", "programs not warmed up"],
            };
            for (name, row) in [
                (loaded, of.and_then(|rows| rows.loaded.as_ref())),
                (not_loaded, of.and_then(|rows| rows.not_loaded.as_ref())),
            ] {
                rows.extend(row.map(|row| (format!("{prefix}work, {name}"), row)));
            }
        }
        rows
    }
}

/// Whether a new sandbox had loaded everything that an item needs; `None` if that is unknown.
fn is_loaded(set: &WorkSet, summary: &Summary, item: usize) -> Option<bool> {
    let loaded = summary.loaded.as_ref()?;
    let modules = &set.items.get(item)?.modules;
    Some(modules.iter().all(|module| loaded.contains(module)))
}

impl WorkRows {
    fn new(set: &WorkSet, summary: &Summary, attempts: &[Attempt]) -> Self {
        let row = |wanted| {
            let of_kind = attempts.iter().filter(|attempt| {
                attempt
                    .work
                    .is_some_and(|item| is_loaded(set, summary, item) == Some(wanted))
            });
            let samples = fold::latencies(of_kind, StartPhase::FirstExec);
            (samples.n() > 0).then(|| PhaseDocument::new(&samples))
        };
        Self {
            loaded: row(true),
            not_loaded: row(false),
        }
    }
}

fn by_item(set: &WorkSet, summary: &Summary) -> Vec<ItemDocument> {
    let mut items: Vec<ItemDocument> = set
        .items
        .iter()
        .enumerate()
        .map(|(index, item)| {
            let of_item = summary.clones.iter().filter(|a| a.work == Some(index));
            let samples = fold::latencies(of_item, StartPhase::FirstExec);
            let ms = |ns: Option<&u64>| ns.map(|ns| *ns as f64 / 1e6);
            ItemDocument {
                id: item.id.clone(),
                is_loaded: is_loaded(set, summary, index),
                n: samples.n(),
                failed: samples.failed(),
                fastest_ms: ms(samples.finite().first()),
                slowest_ms: ms(samples.finite().last()),
            }
        })
        .filter(|item| item.n > 0)
        .collect();
    let key = |item: &ItemDocument| item.fastest_ms.unwrap_or(f64::INFINITY);
    items.sort_by(|a, b| key(b).total_cmp(&key(a)));
    items
}
