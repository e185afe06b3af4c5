//! Ratios between two builds that were measured in pairs of consecutive blocks.
//!
//! Each pair contributes ln(B/A) of one quantile. The starts of one block are not independent: they share
//! processes, a memory layout and a period of time. The unit of the test is therefore the block, not the start.
//! Pairing removes the drift of the host between pairs.

use crate::random::SplitMix64;

/// Smallest number of pairs for an interval. With fewer pairs, the bootstrap interval is far too narrow.
const INTERVAL_NEEDS: usize = 6;
/// Resamples of the bootstrap.
const RESAMPLES: usize = 1000;

/// Estimate and test of one metric.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairedRatio {
    /// Hodges–Lehmann estimate of B/A.
    pub ratio: f64,
    /// Percentile bootstrap over pairs, 95 %; `None` with fewer than [`INTERVAL_NEEDS`] pairs.
    pub interval95: Option<(f64, f64)>,
    /// Two-sided p value of the signed-rank test.
    pub p: f64,
    /// The smallest change, as a share of A, that a test with this number and spread of pairs finds 8 times in 10 at
    /// the 5 % level; `None` for one pair.
    pub detectable: Option<f64>,
}

/// Estimates B/A from ln(B/A) of each pair; all values must be finite. Returns `None` if there are no pairs.
#[must_use]
pub fn estimate(log_ratios: &[f64], seed: u64) -> Option<PairedRatio> {
    if log_ratios.is_empty() {
        return None;
    }
    let enough = log_ratios.len() >= INTERVAL_NEEDS;
    let interval = enough.then(|| bootstrap95(log_ratios, seed));
    Some(PairedRatio {
        ratio: hodges_lehmann(log_ratios).exp(),
        interval95: interval.map(|(low, high)| (low.exp(), high.exp())),
        p: signed_rank(log_ratios),
        detectable: standard_error(log_ratios).map(|error| {
            // 1.96 for the level, 0.84 for the power.
            (2.8 * error).exp_m1()
        }),
    })
}

/// The smallest p value that [`signed_rank`] can return for this many pairs: the probability that all differences have
/// the same sign.
#[must_use]
pub fn least_p(pairs: usize) -> f64 {
    let exponent = i32::try_from(pairs).unwrap_or(i32::MAX);
    2.0_f64.powi(1_i32.saturating_sub(exponent)).min(1.0)
}

/// Two-sided p value of Wilcoxon's signed-rank test as a permutation test. If the builds are equal, A and B of each
/// pair can be exchanged, so every assignment of signs to the ranks is equally likely. The distribution over all
/// assignments is computed exactly, with mean ranks for ties. Differences of zero have no sign and are ignored.
#[must_use]
pub fn signed_rank(differences: &[f64]) -> f64 {
    let mut nonzero: Vec<f64> = differences.iter().copied().filter(|d| *d != 0.0).collect();
    nonzero.sort_by(|x, y| x.abs().total_cmp(&y.abs()));
    let ranks = doubled_ranks(&nonzero);
    let positive: usize = nonzero
        .iter()
        .zip(&ranks)
        .filter(|(d, _)| **d > 0.0)
        .map(|(_, rank)| rank)
        .sum();
    let total: usize = ranks.iter().sum();
    // `probability[sum]` is the probability that the positive ranks add up to `sum`.
    let mut probability = vec![0.0; total + 1];
    probability[0] = 1.0;
    for rank in &ranks {
        for sum in (0..=total).rev() {
            let with = sum.checked_sub(*rank).map_or(0.0, |rest| probability[rest]);
            probability[sum] = (probability[sum] + with) / 2.0;
        }
    }
    let distance = |sum: usize| (2 * sum).abs_diff(total);
    let as_far = (0..=total).filter(|sum| distance(*sum) >= distance(positive));
    as_far.map(|sum| probability[sum]).sum::<f64>().min(1.0)
}

/// Twice the mean rank of each absolute value; doubled, so that the ranks of ties are whole numbers. `sorted` must be
/// sorted by absolute value.
fn doubled_ranks(sorted: &[f64]) -> Vec<usize> {
    let mut ranks = Vec::with_capacity(sorted.len());
    for tied in sorted.chunk_by(|x, y| x.abs() == y.abs()) {
        let first = ranks.len() + 1;
        let last = ranks.len() + tied.len();
        ranks.extend(tied.iter().map(|_| first + last));
    }
    ranks
}

/// Median of the means of all pairs of values, including the pair of each value with itself (Hodges and Lehmann 1963).
/// This is the estimate that corresponds to the signed-rank test. 0 without values.
#[must_use]
pub fn hodges_lehmann(values: &[f64]) -> f64 {
    let mut means = Vec::with_capacity(values.len() * (values.len() + 1) / 2);
    for (i, x) in values.iter().enumerate() {
        for y in &values[i..] {
            means.push(f64::midpoint(*x, *y));
        }
    }
    if means.is_empty() {
        return 0.0;
    }
    let middle = means.len() / 2;
    let is_even = means.len().is_multiple_of(2);
    let (below, upper, _) = means.select_nth_unstable_by(middle, f64::total_cmp);
    if is_even {
        let lower = below.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        f64::midpoint(lower, *upper)
    } else {
        *upper
    }
}

fn bootstrap95(values: &[f64], seed: u64) -> (f64, f64) {
    let mut random = SplitMix64::new(seed);
    let mut resample = vec![0.0; values.len()];
    let mut estimates: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            resample.fill_with(|| values[random.below(values.len())]);
            hodges_lehmann(&resample)
        })
        .collect();
    estimates.sort_by(f64::total_cmp);
    (
        estimates[RESAMPLES * 25 / 1000],
        estimates[RESAMPLES * 975 / 1000 - 1],
    )
}

/// Standard error of the mean; `None` for fewer than two values.
fn standard_error(values: &[f64]) -> Option<f64> {
    let n = values.len() as f64;
    if values.len() < 2 {
        return None;
    }
    let mean = values.iter().sum::<f64>() / n;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    Some((squares / (n - 1.0) / n).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn p_values_are_those_of_r() {
        // Results of wilcox.test(x, exact = TRUE). The first sample is the depression data of Hollander and Wolfe 1973,
        // p. 29.
        let depression = [
            0.952, -0.147, 1.022, 0.430, 0.620, 0.590, 0.490, -0.080, 0.010,
        ];
        assert!((signed_rank(&depression) - 0.039_062_5).abs() < 1e-9);
        let all_positive = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        assert_eq!(signed_rank(&all_positive), 2.0 / 64.0);
        assert_eq!(signed_rank(&all_positive), least_p(6));
        assert_eq!(signed_rank(&[]), 1.0);
        assert_eq!(signed_rank(&[0.0, 0.0]), 1.0, "equal pairs show nothing");
    }

    #[test]
    fn the_estimate_is_the_median_of_the_walsh_averages() {
        // Averages: 1, 1.5, 2, 5.5, 6, 10.
        assert_eq!(hodges_lehmann(&[1.0, 2.0, 10.0]), 3.75);
        assert_eq!(hodges_lehmann(&[7.0]), 7.0);
    }

    #[test]
    fn the_interval_covers_the_true_ratio_about_95_times_in_100() {
        let covered = (0..60_u64).filter(|seed| {
            let mut random = SplitMix64::new(*seed);
            let pairs: Vec<f64> = (0..12).map(|_| 0.1 + random.unit() - 0.5).collect();
            let (low, high) = estimate(&pairs, *seed).unwrap().interval95.unwrap();
            (low..=high).contains(&0.1_f64.exp())
        });
        let covered = covered.count();
        assert!((50..=60).contains(&covered), "{covered} of 60");
    }

    #[test]
    fn equal_builds_are_significant_in_at_most_5_of_100_runs() {
        let significant = (0..2000_u64).filter(|seed| {
            let mut random = SplitMix64::new(*seed);
            let pairs: Vec<f64> = (0..12).map(|_| random.unit() - 0.5).collect();
            signed_rank(&pairs) <= 0.05
        });
        // At most 100 are expected; 24 is 2.5 standard deviations.
        let significant = significant.count();
        assert!((50..=124).contains(&significant), "{significant} of 2000");
    }

    proptest! {
        #[test]
        fn exchanging_the_builds_inverts_the_ratio(values in prop::collection::vec(-2.0_f64..2.0, 1..20)) {
            let inverse: Vec<f64> = values.iter().map(|value| -value).collect();
            prop_assert!((hodges_lehmann(&values) + hodges_lehmann(&inverse)).abs() < 1e-9);
            let (ab, ba) = (signed_rank(&values), signed_rank(&inverse));
            prop_assert!((ab - ba).abs() < 1e-9);
            prop_assert!(ab >= least_p(values.len()) - 1e-12 && ab <= 1.0);
        }

        #[test]
        fn the_order_of_pairs_does_not_matter(values in prop::collection::vec(-2.0_f64..2.0, 1..20), seed: u64) {
            let mut shuffled = values.clone();
            SplitMix64::new(seed).shuffle(&mut shuffled);
            prop_assert!((signed_rank(&values) - signed_rank(&shuffled)).abs() < 1e-12);
            prop_assert!((hodges_lehmann(&values) - hodges_lehmann(&shuffled)).abs() < 1e-12);
        }
    }
}
