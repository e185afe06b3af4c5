//! Turns in a report: times, page faults, ratios, and the tax of new clones.

use serde::{Deserialize, Serialize};

use super::{document::Document, phase::PhaseDocument, section::Section};
use crate::{
    event::Attempt,
    scenario::TurnSpec,
    summary::{fold::Summary, ratio, turns},
    work,
};

/// The turns of one subject.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TurnsDocument {
    /// Mean page faults of a VMM from its start to the first turn; `null` if the VMM is not a process of this host.
    pub first_exec_faults: Option<f64>,
    /// In the order of the scenario.
    pub turns: Vec<TurnDocument>,
    /// `null` unless there are at least two turns that all run the same command or cell.
    pub tax: Option<TaxDocument>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TurnDocument {
    /// Name in the scenario.
    pub name: String,
    /// Whether warm-ups of the shipped templates have run the command or cell.
    #[serde(default)]
    pub trained: bool,
    /// Times from request to response; for an exchange, the times that the peer measured.
    pub latency: PhaseDocument,
    /// Mean page faults of the VMM during the turn; `null` if the VMM is not a process of this host.
    pub faults: Option<f64>,
    /// Throughput at the median time; `null` unless the turn transfers bytes.
    #[serde(default)]
    pub bytes_per_s: Option<f64>,
    /// Times from the response to a policy update that allows traffic until the first datagram; `null` unless the
    /// turn is `churn`.
    #[serde(default)]
    pub effect: Option<PhaseDocument>,
}

/// Ratio of a turn to the same turn of the comparison rounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RatioDocument {
    /// Name of the turn.
    pub turn: String,
    /// Median, over pairs of rounds, of the median time divided by the median time of the comparison round. `null`
    /// with fewer than 10 pairs, or if the turn failed in more than half of them.
    pub ratio: Option<f64>,
    /// 95 % confidence interval of the ratio; `null` with too few pairs, or if a bound is infinite.
    pub ratio_ci95: Option<[f64; 2]>,
    /// Number of pairs of rounds.
    pub pairs: usize,
}

impl RatioDocument {
    /// Ratios of all turns; empty without turns or without comparison rounds.
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

/// The tax of new clones: the sum over all turns, minus the same number of turns of a warm VM. A warm VM is represented
/// by the median of the later half of each clone's turns.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaxDocument {
    /// Quantiles of the extra time over all clones.
    pub time: PhaseDocument,
    /// Mean of the extra page faults over all clones; `null` if no clone recorded page faults.
    pub faults: Option<f64>,
}

impl TurnsDocument {
    /// Turns of one subject; `None` without turns or without starts.
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
                trained: spec.exchange.is_none() && work::is_trained(&spec.exec),
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
            let name = if turn.trained {
                format!("turn {} (trained)", turn.name)
            } else {
                format!("turn {}", turn.name)
            };
            std::iter::once((name, &turn.latency)).chain(effect)
        });
        turns.chain(self.tax.iter().map(|tax| ("tax".to_owned(), &tax.time)))
    }

    /// Names and mean page faults: first exec, all turns, and the tax.
    fn faults(&self) -> Vec<(String, Option<f64>)> {
        let mut faults = vec![("up to first_exec".to_owned(), self.first_exec_faults)];
        let turns = self.turns.iter();
        faults.extend(turns.map(|turn| (format!("turn {}", turn.name), turn.faults)));
        faults.extend(self.tax.iter().map(|tax| ("tax".to_owned(), tax.faults)));
        faults
    }
}

/// Mean page faults of one VMM, of the target and of the comparison rounds; without rows if none were recorded.
pub(super) fn faults(d: &Document) -> Section {
    let all = |turns: &Option<TurnsDocument>| {
        let turns = turns.as_ref();
        turns.map(TurnsDocument::faults).unwrap_or_default()
    };
    let (ours, theirs) = (all(&d.turns), all(&d.beside_turns));
    let is_recorded = ours
        .iter()
        .chain(&theirs)
        .any(|(_, faults)| faults.is_some());
    let shown = |faults: Option<f64>| faults.map_or(String::new(), |n| format!("{n:.0}"));
    let rows = ours.into_iter().enumerate().map(|(index, (name, faults))| {
        let beside = theirs.get(index).and_then(|(_, faults)| *faults);
        vec![name, shown(faults), shown(beside)]
    });
    let beside = d.beside_name.as_deref().unwrap_or_default();
    Section::numbers(
        "page faults of one VMM, mean",
        ["target", beside],
        rows.filter(|_| is_recorded).collect(),
    )
}

/// A row for each turn: ratio, confidence interval, and the throughput of the target and of the comparison rounds.
/// `None` without ratios.
pub(super) fn ratios(d: &Document) -> Option<Section> {
    let pairs = d.turn_ratios.first()?.pairs;
    let beside = d.beside_name.as_deref().unwrap_or_default();
    let speed = |turns: &Option<TurnsDocument>, index: usize| {
        let turn = turns.as_ref().and_then(|t| t.turns.get(index));
        let rate = turn.and_then(|t| t.bytes_per_s);
        rate.map_or(String::new(), |rate| format!("{:.1}", rate / 1e6))
    };
    let row = |(index, of): (usize, &RatioDocument)| {
        vec![
            format!("turn {}", of.turn),
            of.ratio.map_or("n/a".to_owned(), |r| format!("{r:.3}")),
            of.ratio_ci95.map_or("n/a".to_owned(), |[low, high]| {
                format!("{low:.3}–{high:.3}")
            }),
            speed(&d.turns, index),
            speed(&d.beside_turns, index),
        ]
    };
    Some(Section::numbers(
        &format!("ratio of turns over {beside}, {pairs} pairs of rounds"),
        ["ratio", "95 %", "MB/s", &format!("MB/s {beside}")],
        d.turn_ratios.iter().enumerate().map(row).collect(),
    ))
}
