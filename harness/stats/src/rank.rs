//! The percentile function of this repository.

/// Nearest-rank percentile: the smallest sample such that at least `permille` thousandths of all samples are less
/// than or equal to it. `sorted` must be in ascending order. Returns `None` for no samples.
#[must_use]
pub fn nearest_rank<T: Copy>(sorted: &[T], permille: u32) -> Option<T> {
    let rank = rank(sorted.len(), permille);
    sorted.get(rank.checked_sub(1)?).copied()
}

/// Rank of a percentile among `n` samples, from 1 to `n`; 0 if `n` is 0.
#[must_use]
pub fn rank(n: usize, permille: u32) -> usize {
    let permille = permille.min(1000) as usize;
    (n * permille).div_ceil(1000).max(1).min(n)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranks_match_the_definition() {
        let hundred: Vec<u64> = (1..=100).collect();
        assert_eq!(nearest_rank(&hundred, 500), Some(50));
        assert_eq!(nearest_rank(&hundred, 950), Some(95));
        assert_eq!(nearest_rank(&hundred, 1000), Some(100));
        assert_eq!(nearest_rank(&[7], 1), Some(7));
        assert_eq!(nearest_rank::<u64>(&[], 500), None);
    }

    proptest! {
        #[test]
        fn percentile_is_the_smallest_sample_that_covers_its_share(
            mut samples in prop::collection::vec(0_u64..1000, 1..400), permille in 1_u32..=1000,
        ) {
            samples.sort_unstable();
            let got = nearest_rank(&samples, permille).unwrap();
            let covers = |x: u64| {
                let not_larger = samples.iter().filter(|s| **s <= x).count();
                not_larger * 1000 >= samples.len() * usize::try_from(permille).unwrap()
            };
            let model = samples.iter().copied().filter(|s| covers(*s)).min().unwrap();
            prop_assert_eq!(got, model);
        }
    }
}
