//! Starts of a server at several rates, and by the number of warm slots left.

use std::collections::BTreeMap;

use model::StartPhase;

use super::{
    cost,
    fold::{Summary, latencies},
};
use crate::{event::Attempt, plan::Subject};
use stats::quantile::Samples;

/// Minimum share of starts from a warm slot at a sustained rate.
pub const SUSTAINED_HITS: f64 = 0.99;
/// Maximum time in milliseconds from the last start until the pool is full again at a sustained rate. A pool that
/// takes longer was draining, and would have become empty eventually.
pub const SUSTAINED_FULL_MS: f64 = 2000.0;

/// All measured starts at one rate.
#[derive(Clone, Debug)]
pub struct AtRate {
    pub rate_per_s: f64,
    /// Failed starts.
    pub failed: usize,
    pub replied: Samples,
    pub first_exec: Samples,
    /// Share of starts from a warm slot; `None` if the target does not report it.
    pub hit_rate: Option<f64>,
    /// CPU nanoseconds per start, until the pool is full again.
    pub cpu_ns_per_start: Option<f64>,
    /// Longest time over the rounds from the end of the last start until the pool was full again.
    pub until_full_ms: Option<f64>,
    /// Why the rate was not sustained; `None` if it was.
    pub not_sustained: Option<String>,
}

/// The results of each rate, ascending. Empty unless the scenario has several rates.
#[must_use]
pub fn by_rate(summary: &Summary) -> Vec<AtRate> {
    let mut rates: Vec<f64> = summary.rates.values().copied().collect();
    rates.sort_by(f64::total_cmp);
    rates.dedup();
    rates
        .into_iter()
        .map(|rate| judged(summary, rate))
        .collect()
}

/// The largest rate that was sustained together with all lower ones; `None` if the lowest one was not.
#[must_use]
pub fn sustained(rates: &[AtRate]) -> Option<f64> {
    let sustained = rates.iter().take_while(|rate| rate.not_sustained.is_none());
    sustained.last().map(|rate| rate.rate_per_s)
}

fn judged(summary: &Summary, rate_per_s: f64) -> AtRate {
    let is_of_rate = |round: &u32| summary.rates.get(round) == Some(&rate_per_s);
    let part = Summary {
        started: summary.started.clone(),
        clones: summary
            .clones
            .iter()
            .filter(|a| is_of_rate(&a.round))
            .cloned()
            .collect(),
        spent: summary
            .spent
            .iter()
            .filter(|s| is_of_rate(&s.round))
            .copied()
            .collect(),
        ..Summary::default()
    };
    let mut at = at_rate(rate_per_s, &part);
    let mut left_out = summary.interference.left_out.keys();
    if at.first_exec.n() == 0 && left_out.any(is_of_rate) {
        let why = "other programs disturbed its rounds, which are left out";
        at.not_sustained = Some(why.to_owned());
    }
    at
}

/// Results of a summary whose starts all had the same rate.
#[must_use]
pub fn at_rate(rate_per_s: f64, summary: &Summary) -> AtRate {
    let clones = || summary.clones.iter();
    let until_full = cost::until_full_ms(summary);
    let mut at = AtRate {
        rate_per_s,
        failed: clones().filter(|a| a.failure.is_some()).count(),
        replied: latencies(clones(), StartPhase::Replied),
        first_exec: latencies(clones(), StartPhase::FirstExec),
        hit_rate: cost::hit_rate(clones()),
        cpu_ns_per_start: cost::cpu_ns_per_start(summary, Subject::Clone).value(),
        until_full_ms: until_full.into_iter().max_by(f64::total_cmp),
        not_sustained: None,
    };
    at.not_sustained = not_sustained(&at);
    at
}

fn not_sustained(at: &AtRate) -> Option<String> {
    let (n, failed) = (at.first_exec.n(), at.failed);
    if n == 0 {
        return Some("no start was planned or made".to_owned());
    }
    if failed > 0 {
        return Some(format!("{failed} of {n} starts failed"));
    }
    match at.hit_rate {
        None => return Some("the target does not report warm starts".to_owned()),
        Some(share) if share < SUSTAINED_HITS => {
            let (share, least) = (share * 100.0, SUSTAINED_HITS * 100.0);
            return Some(format!(
                "{share:.1} % of starts were warm, at least {least:.0} % are needed"
            ));
        }
        Some(_) => {}
    }
    match at.until_full_ms {
        None => Some("the pool was not seen to be full again".to_owned()),
        Some(ms) if ms > SUSTAINED_FULL_MS => Some(format!(
            "the pool was full again {ms:.0} ms after the last start, at most {SUSTAINED_FULL_MS:.0} ms are allowed"
        )),
        Some(_) => None,
    }
}

/// Starts that found a number of warm slots within a range.
#[derive(Clone, Debug)]
pub struct AtLevel {
    pub least: u32,
    pub most: u32,
    pub first_exec: Samples,
    pub hit_rate: Option<f64>,
}

/// Starts grouped by the last reading of the number of warm slots before they began: in quarters of the pool,
/// fullest first, and those that found none. Empty unless the scenario watches the pool.
#[must_use]
pub fn by_level(summary: &Summary) -> Vec<AtLevel> {
    let Some(full) = summary.spent.iter().filter_map(|s| s.warm).max() else {
        return Vec::new();
    };
    let mut levels: BTreeMap<u32, Vec<&Attempt>> = BTreeMap::new();
    for clone in &summary.clones {
        let before = summary.stock.iter().rev();
        let mut before =
            before.filter(|(round, at_ns, _)| *round == clone.round && *at_ns <= clone.actual_ns);
        if let Some((_, _, warm)) = before.next() {
            levels.entry(quarter(*warm, full)).or_default().push(clone);
        }
    }
    let level = |(quarter, clones): (u32, Vec<&Attempt>)| AtLevel {
        least: if quarter == 0 {
            0
        } else {
            (quarter - 1) * full / 4 + 1
        },
        most: quarter * full / 4,
        first_exec: latencies(clones.iter().copied(), StartPhase::FirstExec),
        hit_rate: cost::hit_rate(clones.into_iter()),
    };
    levels.into_iter().rev().map(level).collect()
}

/// Quarter of the pool that contains a number of slots: 0 for none, 4 for the fullest.
fn quarter(warm: u32, full: u32) -> u32 {
    (0..4)
        .find(|quarter| warm <= quarter * full / 4)
        .unwrap_or(4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        event::{Spent, StartKind},
        summary::turns::tests::attempt_with,
    };

    const MS: u64 = 1_000_000;

    /// One round of 200 starts for each rate. `misses` of them were restored, and the pool was full again after
    /// `full_ms`.
    fn summary(rates: &[(f64, usize, u64)]) -> Summary {
        let mut summary = Summary::default();
        for (round, (rate, misses, full_ms)) in (0_u32..).zip(rates) {
            summary.rates.insert(round, *rate);
            summary.clones.extend((0..200).map(|i| Attempt {
                round,
                start: Some(if i < *misses {
                    StartKind::Restored
                } else {
                    StartKind::Warm
                }),
                ended_ns: 10 * MS,
                ..attempt_with(Vec::new())
            }));
            summary.spent.push(Spent {
                round,
                subject: Subject::Clone,
                from_ns: 0,
                until_ns: (10 + full_ms) * MS,
                cpu_ns: Some(400 * MS),
                server_cpu_ns: None,
                warm: Some(10),
                stock_after: None,
                memory: None,
            });
        }
        summary
    }

    #[test]
    fn a_rate_is_sustained_only_with_all_lower_ones() {
        let found = by_rate(&summary(&[(5.0, 3, 100), (1.0, 2, 100), (9.0, 0, 100)]));
        let rates: Vec<_> = found.iter().map(|at| at.rate_per_s).collect();
        assert_eq!(rates, [1.0, 5.0, 9.0]);
        assert_eq!(found[0].hit_rate, Some(0.99));
        assert_eq!(found[0].cpu_ns_per_start, Some(2e6));
        assert!(found[1].not_sustained.as_ref().unwrap().contains("98.5 %"));
        assert_eq!(sustained(&found), Some(1.0));
    }

    #[test]
    fn an_emptied_pool_and_a_failed_start_are_not_sustained() {
        let why = |summary: &Summary| by_rate(summary)[0].not_sustained.clone();
        assert_eq!(why(&summary(&[(1.0, 0, 2000)])), None);
        assert!(
            why(&summary(&[(1.0, 0, 2001)]))
                .unwrap()
                .contains("2001 ms")
        );
        let mut failing = summary(&[(1.0, 0, 100)]);
        failing.clones[7].failure = Some(crate::event::Failure {
            cause: crate::event::FailureCause::Create,
            message: String::new(),
        });
        assert!(why(&failing).unwrap().contains("1 of 200 starts failed"));
        let mut unseen = summary(&[(1.0, 0, 100)]);
        unseen.spent.clear();
        assert!(why(&unseen).unwrap().contains("not seen"));
        let mut disturbed = summary(&[(1.0, 0, 100)]);
        disturbed.clones.clear();
        assert!(why(&disturbed).unwrap().contains("no start was planned"));
        disturbed.interference.left_out = [(0, String::new())].into();
        assert!(why(&disturbed).unwrap().contains("other programs"));
        assert_eq!(sustained(&by_rate(&failing)), None);
        assert!(by_rate(&Summary::default()).is_empty());
    }

    #[test]
    fn starts_are_assigned_to_the_slots_that_were_left() {
        let quarters = [0, 1, 2, 3, 5, 6, 7, 8, 10].map(|warm| quarter(warm, 10));
        assert_eq!(quarters, [0, 1, 1, 2, 2, 3, 3, 4, 4]);
        let mut summary = summary(&[(1.0, 100, 0)]);
        summary.stock = vec![(0, 0, 10), (0, 50, 0), (1, 60, 5)];
        for (clone, at_ns) in summary.clones.iter_mut().zip(0..) {
            // The first 100 are restored.
            clone.actual_ns = 199 - at_ns;
        }
        let levels = by_level(&summary);
        let shape: Vec<_> = levels
            .iter()
            .map(|l| (l.least, l.most, l.first_exec.n()))
            .collect();
        assert_eq!(shape, [(8, 10, 50), (0, 0, 150)]);
        assert_eq!(levels[0].hit_rate, Some(1.0));
        assert!(levels[1].hit_rate < Some(0.5));
    }
}
