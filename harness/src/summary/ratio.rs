//! Ratios within a run: to the same turn of the comparison rounds, and to host processes.
//!
//! For turns, each measured round of clones forms a pair with the comparison round of the same repetition, and the
//! ratio of a pair is the quotient of the two medians. A temporary slowdown of the host affects both rounds of a
//! pair. The result is the median of the ratios of all pairs.

use std::collections::BTreeMap;

use model::StartPhase;
use stats::rank::nearest_rank;

use super::{
    fold::{self, Summary},
    turns,
};
use crate::{
    event::Attempt,
    scenario::{Quantile, Timed},
};
use stats::{
    bootstrap::{self, Clusters},
    quantile::{INFINITE, Samples, order_interval},
};

/// A ratio and its 95 % confidence interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    /// Infinite if, in more than half of the pairs, the median of the round of clones lies among failures; `None` with
    /// fewer than 10 pairs.
    pub value: Option<f64>,
    /// Confidence interval from order statistics, which assumes independent pairs; `None` with fewer than 10 pairs.
    pub interval95: Option<(f64, f64)>,
    /// Number of pairs. A pair is excluded if the median of its comparison round is zero or lies among failures.
    pub pairs: usize,
}

/// Ratio of the turn at `index`, counted from 0.
#[must_use]
pub fn of_turn(summary: &Summary, index: usize) -> Ratio {
    let ours = medians(&summary.clones, index);
    let theirs = medians(&summary.beside, index);
    let mut ratios: Vec<f64> = ours
        .into_iter()
        .zip(theirs)
        .filter(|(_, beside)| *beside != INFINITE && *beside > 0)
        .map(|(ns, beside)| match ns {
            INFINITE => f64::INFINITY,
            ns => ns as f64 / beside as f64,
        })
        .collect();
    ratios.sort_by(f64::total_cmp);
    let pairs = ratios.len();
    let enough = pairs >= Quantile::P50.needs();
    let interval = order_interval(pairs, 0.5).filter(|_| enough);
    Ratio {
        value: nearest_rank(&ratios, 500).filter(|_| enough),
        interval95: interval.map(|(low, high)| (ratios[low - 1], ratios[high - 1])),
        pairs,
    }
}

/// A quantile of the clones divided by the same quantile of host processes, from all samples. The interval is a
/// bootstrap over pairs of neighbouring clusters, so a slowdown of the host that affects both does not widen it.
#[must_use]
pub fn over_baseline(summary: &Summary, of: Timed, quantile: Quantile) -> Ratio {
    let exec = |attempt: &Attempt| {
        let ns = attempt.latency_ns(StartPhase::FirstExec);
        vec![ns.unwrap_or(INFINITE)]
    };
    let (ours, theirs) = match of {
        Timed::Phase(phase) => (
            fold::clusters(summary.clones.iter(), |attempt| {
                vec![attempt.latency_ns(phase).unwrap_or(INFINITE)]
            }),
            fold::clusters(summary.baseline.iter(), exec),
        ),
        Timed::Turn(number) => (
            fold::clusters(summary.clones.iter(), |attempt| {
                turns::times(attempt, number.saturating_sub(1))
            }),
            fold::clusters(summary.baseline.iter(), exec),
        ),
        Timed::Round => (
            fold::walls(&summary.rounds, &summary.clones),
            fold::walls(&summary.baseline_rounds, &summary.baseline),
        ),
    };
    of_clusters(&ours, &theirs, quantile)
}

/// A quantile of the first clusters divided by the same quantile of the second ones, from all samples. Clusters at
/// the same position form a pair.
pub(super) fn of_clusters(ours: &[Vec<u64>], theirs: &[Vec<u64>], quantile: Quantile) -> Ratio {
    let pairs = ours.len().min(theirs.len());
    let permille = quantile.permille();
    let (ours, theirs) = (&ours[..pairs], &theirs[..pairs]);
    let n = |clusters: &[Vec<u64>]| clusters.iter().map(Vec::len).sum::<usize>();
    let enough = n(ours).min(n(theirs)) >= quantile.needs();
    let (ours, theirs) = (Clusters::new(ours), Clusters::new(theirs));
    let over = |times: &[usize]| {
        let base = theirs.quantile(times, permille)?;
        let ratio = ours.quantile(times, permille)? / base;
        (base > 0.0 && base.is_finite()).then_some(ratio)
    };
    Ratio {
        value: over(&vec![1; pairs]).filter(|_| enough),
        interval95: bootstrap::interval95(pairs, over).filter(|_| enough),
        pairs,
    }
}

/// Limit for later runs, derived from a reference run of the same size: the upper end of the interval that contains
/// the upper end of such a run's own interval in 97.5 % of cases if nothing changed. Both estimates vary, so their
/// difference varies by the root of two, and the later run's interval is added. Computed on a logarithmic scale.
/// `high` is the upper end of the interval of `value`, which covers the rounds of one run; `spread` is the standard
/// deviation between runs, as a share. `None` if the limit is not finite.
#[must_use]
pub fn limit_from(value: f64, high: f64, spread: f64) -> Option<f64> {
    let within = (high / value).ln();
    let both = within.hypot(1.96 * spread);
    let limit = value * (std::f64::consts::SQRT_2 * both + within).exp();
    limit.is_finite().then_some(limit)
}

/// The median of each round over all samples of its clones, in the order of the plan; [`INFINITE`] if it lies among
/// failures.
fn medians(attempts: &[Attempt], index: usize) -> Vec<u64> {
    let mut rounds: BTreeMap<u32, Vec<&Attempt>> = BTreeMap::new();
    for attempt in attempts {
        rounds.entry(attempt.round).or_default().push(attempt);
    }
    let median = |attempts: &Vec<&Attempt>| {
        let times = attempts
            .iter()
            .flat_map(|attempt| turns::times(attempt, index));
        let samples = Samples::new(times.collect());
        nearest_rank(samples.all(), 500).unwrap_or(INFINITE)
    };
    rounds.values().map(median).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        event::{Exchanged, Turn},
        summary::turns::tests::attempt_with,
    };

    fn attempt(round: u32, times_ns: Option<&[u64]>) -> Attempt {
        let turn = |times: &[u64]| Turn {
            took_ns: 1,
            faults: None,
            exchange: Some(Exchanged {
                times_ns: times.to_vec(),
                ..Exchanged::default()
            }),
        };
        Attempt {
            round,
            ..attempt_with(times_ns.map(turn).into_iter().collect())
        }
    }

    fn of(ours: &[Option<u64>], theirs: &[Option<u64>]) -> Ratio {
        let attempts = |medians: &[Option<u64>], first: u32| {
            (first..)
                .step_by(2)
                .zip(medians)
                .map(|(round, ns)| {
                    attempt(
                        round,
                        ns.map(|ns| [ns / 2, ns, ns * 9]).as_ref().map(|a| &a[..]),
                    )
                })
                .collect()
        };
        let summary = Summary {
            clones: attempts(ours, 0),
            beside: attempts(theirs, 1),
            ..Summary::default()
        };
        of_turn(&summary, 0)
    }

    #[test]
    fn a_drift_of_the_host_does_not_change_the_ratio() {
        // Both become twelve times slower; one is always a tenth slower than the other.
        let theirs: Vec<_> = (1..=12).map(|n| Some(n * 1000)).collect();
        let ours: Vec<_> = (1..=12).map(|n| Some(n * 1100)).collect();
        let ratio = of(&ours, &theirs);
        assert_eq!((ratio.value, ratio.pairs), (Some(1.1), 12));
        assert_eq!(ratio.interval95, Some((1.1, 1.1)));
    }

    #[test]
    fn failures_make_a_ratio_infinite_and_failed_rounds_beside_are_left_out() {
        let fine = vec![Some(1000); 12];
        let mut half = fine.clone();
        half[..7].fill(None);
        assert_eq!(of(&half, &fine).value, Some(f64::INFINITY));
        assert_eq!(of(&fine, &half).pairs, 5);
        assert_eq!(of(&fine, &half).value, None, "five pairs are too few");
    }
}
