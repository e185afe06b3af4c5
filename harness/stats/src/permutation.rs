//! Tests whether a quantile differs between two runs: a permutation test, and a correction for testing several metrics.
//!
//! Starts of one round are not independent, because they compete for the same cores. The test therefore exchanges
//! blocks between the two runs, and callers pass each round as one block. A caller that has only a single round passes
//! each start as its own block.

use crate::{quantile::INFINITE, random::SplitMix64, rank::nearest_rank};

/// Number of random permutations.
const EXCHANGES: u32 = 2000;

/// Difference of a quantile between two runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Difference {
    /// Quantile of the first run in nanoseconds.
    pub a: u64,
    /// Quantile of the second run in nanoseconds; [`INFINITE`] if it lies among failures.
    pub b: u64,
    /// Estimated probability of a difference at least as large in either direction if both runs have the same
    /// distribution; above 0 and at most 1.
    pub p: f64,
    /// Smallest difference in nanoseconds that this test finds 8 times in 10 at the 5 % level. Infinite if exchanging
    /// blocks can make a quantile infinite.
    pub detectable_ns: f64,
}

/// Tests the difference of a quantile. Each inner list is a block, which is exchanged as a whole. Returns `None` if
/// a run has no samples, or if the quantile of the first run is infinite. The second may be infinite.
#[must_use]
pub fn compare(a: &[Vec<u64>], b: &[Vec<u64>], permille: u32, seed: u64) -> Option<Difference> {
    let finite = |ns: &u64| *ns != INFINITE;
    let a_value = pooled(a.iter(), permille).filter(finite)?;
    let b_value = pooled(b.iter(), permille)?;
    let observed = b_value as f64 - a_value as f64;
    let mut blocks: Vec<&Vec<u64>> = a.iter().chain(b).collect();
    let mut random = SplitMix64::new(seed);
    let mut as_large = 0_u32;
    let mut squares = 0.0;
    for _ in 0..EXCHANGES {
        random.shuffle(&mut blocks);
        let (left, right) = blocks.split_at(a.len());
        let left = pooled(left.iter().copied(), permille)
            .filter(finite)
            .map_or(f64::MAX, |ns| ns as f64);
        let right = pooled(right.iter().copied(), permille)
            .filter(finite)
            .map_or(f64::MAX, |ns| ns as f64);
        let difference = right - left;
        if difference.abs() >= observed.abs() {
            as_large += 1;
        }
        squares += difference * difference;
    }
    Some(Difference {
        a: a_value,
        b: b_value,
        // The observed assignment counts as one of the permutations (Phipson and Smyth 2010).
        p: f64::from(as_large + 1) / f64::from(EXCHANGES + 1),
        // 1.96 for the level, 0.84 for the power.
        detectable_ns: 2.8 * (squares / f64::from(EXCHANGES)).sqrt(),
    })
}

fn pooled<'a>(blocks: impl Iterator<Item = &'a Vec<u64>>, permille: u32) -> Option<u64> {
    let mut all: Vec<u64> = blocks.flatten().copied().collect();
    all.sort_unstable();
    nearest_rank(&all, permille)
}

/// Adjusts p values for several tests after Benjamini and Hochberg (1995), and returns them in the order of `p`.
/// Rejecting the hypotheses with adjusted values of at most 0.05 keeps the false discovery rate at 5 % or less.
#[must_use]
pub fn benjamini_hochberg(p: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|x, y| p[*y].total_cmp(&p[*x]));
    let mut adjusted = vec![0.0; p.len()];
    let mut least = 1.0_f64;
    for (from_largest, index) in order.into_iter().enumerate() {
        let rank = (p.len() - from_largest) as f64;
        least = least.min(p[index] * p.len() as f64 / rank);
        // Without this `max`, rounding could make an adjusted value smaller than the p value.
        adjusted[index] = least.max(p[index]);
    }
    adjusted
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rounds(base: u64, n: u64) -> Vec<Vec<u64>> {
        let mut random = SplitMix64::new(base);
        (0..n)
            .map(|_| (0..20).map(|_| base + random.next_u64() % 100).collect())
            .collect()
    }

    #[test]
    fn a_clear_difference_is_significant_and_a_tiny_one_is_not() {
        let found = compare(&rounds(1000, 10), &rounds(2000, 10), 500, 1).unwrap();
        assert!(found.p < 0.01, "{found:?}");
        let same = compare(&rounds(1000, 10), &rounds(1001, 10), 500, 1).unwrap();
        assert!(same.p > 0.05, "{same:?}");
        assert!(same.detectable_ns > 0.0 && same.detectable_ns < 100.0);
        assert_eq!(compare(&[], &rounds(1, 1), 500, 1), None);
    }

    #[test]
    fn adjusted_p_values_match_the_paper() {
        let adjusted = benjamini_hochberg(&[0.01, 0.04, 0.03, 0.5]);
        let wanted = [0.04, 0.053_333, 0.053_333, 0.5];
        assert!(
            adjusted
                .iter()
                .zip(wanted)
                .all(|(a, w)| (a - w).abs() < 1e-4),
            "{adjusted:?}"
        );
    }

    proptest! {
        #[test]
        fn adjustment_never_decreases_a_p_value(p in prop::collection::vec(0.0_f64..=1.0, 0..12)) {
            for (raw, adjusted) in p.iter().zip(benjamini_hochberg(&p)) {
                prop_assert!(adjusted >= *raw && adjusted <= 1.0);
            }
        }
    }
}
