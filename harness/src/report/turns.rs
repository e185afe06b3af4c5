//! What a report says of turns: times, page faults, and the tax of being a new clone.

use serde::{Deserialize, Serialize};

use super::document::PhaseDocument;
use crate::{
    event::Attempt,
    scenario::TurnSpec,
    stats::{fold::Summary, ratio, turns},
};

/// The turns of one subject.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TurnsDocument {
    /// Mean page faults of a VMM from its beginning to first exec; `null` where there is no VMM on this host.
    pub first_exec_faults: Option<f64>,
    /// In the scenario's order.
    pub turns: Vec<TurnDocument>,
    /// `null` unless all turns are the same work.
    pub tax: Option<TaxDocument>,
}

/// One turn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TurnDocument {
    /// Its name in the scenario.
    pub name: String,
    /// From its question to its answer.
    pub latency: PhaseDocument,
    /// Mean page faults of the clone's VMM meanwhile.
    pub faults: Option<f64>,
    /// Bytes a second at the median time; `null` unless it moves a number of bytes.
    #[serde(default)]
    pub bytes_per_s: Option<f64>,
    /// From answers that opened the policy to the first packet; `null` unless that was measured.
    #[serde(default)]
    pub effect: Option<PhaseDocument>,
}

/// A turn against the same turn of the target beside.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RatioDocument {
    /// Name of the turn.
    pub turn: String,
    /// Time over the time beside: median over pairs of neighbouring rounds. `null` with too few pairs, and where it is
    /// not finite.
    pub ratio: Option<f64>,
    /// Its 95 % confidence interval.
    pub ratio_ci95: Option<[f64; 2]>,
    /// Pairs of rounds.
    pub pairs: usize,
}

impl RatioDocument {
    /// Of all turns; empty without turns or anything beside.
    #[must_use]
    pub fn all(specs: &[TurnSpec], summary: &Summary) -> Vec<Self> {
        if summary.beside.is_empty() {
            return Vec::new();
        }
        let finite = |x: f64| x.is_finite().then_some(x);
        let one = |(index, spec): (usize, &TurnSpec)| {
            let ratio = ratio::of_turn(summary, index);
            let interval = ratio.interval95;
            Self {
                turn: spec.name.clone(),
                ratio: ratio.value.and_then(finite),
                ratio_ci95: interval.and_then(|(low, high)| Some([finite(low)?, finite(high)?])),
                pairs: ratio.pairs,
            }
        };
        specs.iter().enumerate().map(one).collect()
    }
}

/// What clones paid in all turns beyond as many turns of a warm VM, which is the median of a clone's later half.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaxDocument {
    /// Time, over clones.
    pub time: PhaseDocument,
    /// Mean page faults.
    pub faults: Option<f64>,
}

impl TurnsDocument {
    /// Of one subject; `None` without turns or starts.
    #[must_use]
    pub fn new(specs: &[TurnSpec], attempts: &[Attempt]) -> Option<Self> {
        if specs.is_empty() || attempts.is_empty() {
            return None;
        }
        let turn = |(index, spec): (usize, &TurnSpec)| {
            let latency = PhaseDocument::new(&turns::latencies(attempts, index));
            let effects = turns::effects(attempts, index);
            TurnDocument {
                name: spec.name.clone(),
                faults: turns::mean_faults(attempts, index),
                bytes_per_s: turns::bytes(attempts, index)
                    .zip(latency.p50_ms)
                    .map(|(bytes, ms)| bytes as f64 / (ms / 1e3)),
                effect: (effects.n() > 0).then(|| PhaseDocument::new(&effects)),
                latency,
            }
        };
        let is_work = |spec: &TurnSpec| spec.exchange.is_none();
        let same = specs.len() > 1
            && specs.iter().all(is_work)
            && specs.windows(2).all(|two| two[0].exec == two[1].exec);
        Some(Self {
            first_exec_faults: turns::mean_faults_to_first_exec(attempts),
            turns: specs.iter().enumerate().map(turn).collect(),
            tax: same.then(|| TaxDocument {
                time: PhaseDocument::new(&turns::tax(attempts, specs.len())),
                faults: turns::mean_tax_faults(attempts, specs.len()),
            }),
        })
    }

    /// Names and latencies of all turns, and of the tax.
    pub(super) fn rows(&self) -> impl Iterator<Item = (String, &PhaseDocument)> {
        let turns = self.turns.iter().flat_map(|turn| {
            let effect = turn.effect.as_ref();
            let effect = effect.map(|effect| (format!("turn {} effect", turn.name), effect));
            std::iter::once((format!("turn {}", turn.name), &turn.latency)).chain(effect)
        });
        turns.chain(self.tax.iter().map(|tax| ("tax".to_owned(), &tax.time)))
    }

    /// Names and mean page faults in the same order, first exec before them.
    fn faults(&self) -> Vec<(String, Option<f64>)> {
        let mut faults = vec![("up to first_exec".to_owned(), self.first_exec_faults)];
        let turns = self.turns.iter();
        faults.extend(turns.map(|turn| (format!("turn {}", turn.name), turn.faults)));
        faults.extend(self.tax.iter().map(|tax| ("tax".to_owned(), tax.faults)));
        faults
    }
}

/// Page faults as people read them, those of the subject beside in the last column; empty if nobody knows any.
pub(super) fn fault_rows(
    turns: Option<&TurnsDocument>,
    beside: Option<&TurnsDocument>,
) -> Vec<(String, String, String)> {
    let ours = turns.map(TurnsDocument::faults).unwrap_or_default();
    let theirs = beside.map(TurnsDocument::faults).unwrap_or_default();
    if ours
        .iter()
        .chain(&theirs)
        .all(|(_, faults)| faults.is_none())
    {
        return Vec::new();
    }
    let shown = |faults: Option<f64>| faults.map_or(String::new(), |n| format!("{n:.0}"));
    let rows = ours.into_iter().enumerate();
    rows.map(|(index, (name, faults))| {
        let beside = theirs.get(index).and_then(|(_, faults)| *faults);
        (name, shown(faults), shown(beside))
    })
    .collect()
}
