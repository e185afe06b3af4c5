//! Ends a comparison early without raising its error rate.
//!
//! The rule is fixed before the first block: a comparison of at least [`STAGED`] blocks is evaluated after two thirds of
//! its pairs and at its end, and each of these *looks* may spend half of the error rate α = 5 %. The first look that
//! decides ends the comparison. If nothing changed, the probability that any look reports a change is at most α, by the
//! union bound: it does not depend on how far the looks agree. (Lan and DeMets 1983 spend α in the same way; their bounds
//! need the joint distribution of the looks, which the exact signed-rank test does not have.)
//!
//! A look decides if a primary metric or a count got worse, or if every primary metric is better, or is shown to be worse
//! by less than the margin. (A 95 % interval errs on that side in 2.5 % of looks, so two looks share α here too.) Fewer
//! than [`STAGED`] blocks have one look: an early one would have fewer than 8 pairs, with which a change of one of three
//! metrics cannot be significant at half of α.

use super::compare::{Comparison, Finding, LEVEL, not_within};

/// Smallest number of blocks with an early look.
pub const STAGED: u32 = 12;

/// Numbers of pairs after which the comparison is evaluated, ascending; the last one is `blocks`.
#[must_use]
pub fn looks(blocks: u32) -> Vec<u32> {
    if blocks < STAGED {
        return vec![blocks];
    }
    vec![(blocks * 2).div_ceil(3), blocks]
}

/// The error rate of one look.
#[must_use]
pub fn alpha(looks: &[u32]) -> f64 {
    LEVEL / looks.len().max(1) as f64
}

/// Whether the comparison may end at a look.
#[must_use]
pub fn decides(comparison: &Comparison, margin: f64) -> bool {
    let counts = comparison.counts.iter().map(|count| count.verdict);
    let primary = comparison.metrics.iter().filter(|metric| metric.primary);
    let mut verdicts = counts.chain(primary.clone().map(|metric| metric.verdict));
    let is_worse = verdicts.any(|verdict| verdict == Finding::Worse);
    let mut open = primary.clone().filter(|metric| {
        let is_within = not_within(std::slice::from_ref(*metric), margin).is_empty();
        metric.withheld || (metric.verdict != Finding::Better && !is_within)
    });
    let has_all = comparison.not_measured.is_empty() && primary.count() > 0;
    is_worse || (has_all && open.next().is_none())
}

#[cfg(test)]
mod tests {
    use stats::{paired, random::SplitMix64};

    use super::*;

    #[test]
    fn few_blocks_have_one_look_and_many_an_early_one() {
        assert_eq!(looks(11), [11]);
        assert_eq!(looks(12), [8, 12]);
        assert_eq!(looks(40), [27, 40]);
        assert_eq!(alpha(&looks(11)), LEVEL);
        for blocks in [12, 13, 40] {
            let looks = looks(blocks);
            assert!(alpha(&looks) * looks.len() as f64 <= LEVEL);
            let first = usize::try_from(looks[0]).unwrap();
            assert!(
                paired::least_p(first) * 3.0 <= alpha(&looks),
                "three metrics can change"
            );
        }
    }

    /// Sum of 12 uniform numbers minus 6: nearly normal.
    fn normal(random: &mut SplitMix64) -> f64 {
        (0..12).map(|_| random.unit()).sum::<f64>() - 6.0
    }

    #[test]
    fn any_look_at_equal_builds_finds_a_change_in_at_most_5_of_100_comparisons() {
        let looks = looks(STAGED);
        let trials = 4000;
        let alarms = (0..trials).filter(|seed| {
            let mut random = SplitMix64::new(*seed);
            let pairs: Vec<f64> = (0..STAGED).map(|_| normal(&mut random)).collect();
            looks.iter().any(|look| {
                let seen = &pairs[..usize::try_from(*look).unwrap()];
                paired::signed_rank(seen) <= alpha(&looks)
            })
        });
        let share = alarms.count() as f64 / f64::from(u32::try_from(trials).unwrap());
        println!("false alarms: {:.1} %", share * 100.0);
        assert!((0.01..=0.05).contains(&share), "{share}");
        // Without the rule, the same two looks exceed 5 %.
        let naive = (0..trials).filter(|seed| {
            let mut random = SplitMix64::new(*seed);
            let pairs: Vec<f64> = (0..STAGED).map(|_| normal(&mut random)).collect();
            looks.iter().any(|look| {
                let seen = &pairs[..usize::try_from(*look).unwrap()];
                paired::signed_rank(seen) <= LEVEL
            })
        });
        assert!(naive.count() as u64 * 20 > trials);
    }
}
