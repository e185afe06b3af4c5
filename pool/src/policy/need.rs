//! The memory that sandboxes of a template are expected to need, from the measured sizes of its sandboxes by age.
//!
//! Once per second, some running sandboxes are counted, each in the histogram of its age ([`Sizes::count`]). Counts of the
//! past fade, but only while sandboxes of that age are counted. The size at an age is expected to be the mean of its
//! histogram, in which a size counts as at most [`OUTLIER`] times the median, so that a few large sandboxes cost the
//! host their memory, but do not raise the expectation for others. Each histogram also has [`ASSUMED`] sandboxes that
//! were not measured. They have the median size of the previous age, or [`UNKNOWN`] at the first one, and a standard
//! deviation of that size. Few measurements therefore promise much memory, many little more than the mean.
//!
//! A sandbox is promised what it lacks to the largest mean of its age and all later ones. The sum for `n` sandboxes
//! stays below the sum of the means plus `margin` standard deviations, which grow with √n, unless they grow together
//! (Cantelli: with a margin of 3, in at least 90 % of all cases whatever the distribution). [`super::pressure`] defends
//! the host when they do.

use std::time::Duration;

/// Ages at which the next histogram begins.
const AGES: [Duration; 4] = [
    Duration::from_secs(2),
    Duration::from_secs(10),
    Duration::from_secs(60),
    Duration::from_secs(600),
];
const CLASSES: usize = AGES.len() + 1;
/// Number of rounds, up to [`FADE`], in which one sandbox is counted while it has the age.
const ROUNDS: [u32; CLASSES] = [2, 8, 50, FADE, FADE];
/// Four for each power of two, from 1 MiB to 64 GiB.
const BINS: usize = 64;
const LEAST_BITS: u32 = 20;
/// A count fades with this time constant, in rounds in which sandboxes of its age were counted.
const FADE: u32 = 64;
/// In the mean, a size counts as at most this many times the median.
const OUTLIER: u64 = 4;
/// Number of sandboxes that each histogram has without a measurement.
const ASSUMED: u32 = 4;
/// Size of a sandbox, in bytes, while none of its template has been measured: several times the size of a clone after
/// its first command.
pub(crate) const UNKNOWN: u64 = 32 << 20;
/// Memory of the kernel for one VM, in bytes: page tables, KVM, cgroup and TAP.
pub(crate) const KERNEL: u64 = 3 << 19;

/// What one more sandbox of a template is expected to need, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Need {
    /// Memory of a leased sandbox and of the kernel for it.
    pub(crate) expected: u64,
    /// Variance of this number.
    pub(crate) variance: u128,
    /// Memory of a warm slot. Zero: none has been measured.
    pub(crate) warm_has: u64,
}

impl Default for Need {
    fn default() -> Self {
        Sizes::default().need()
    }
}

impl Need {
    /// Expected memory of one more warm slot, given the sizes of the existing ones: not less than their average, which
    /// may exceed a falling estimate.
    pub(crate) fn slot(&self, warm: impl Iterator<Item = u64>) -> u64 {
        let (sum, count) = warm.fold((0_u64, 0_u64), |(sum, count), size| {
            (sum.saturating_add(size), count + 1)
        });
        let average = sum.div_ceil(count.max(1));
        let usual = match self.warm_has {
            0 => UNKNOWN,
            measured => measured,
        };
        usual.max(average)
    }
}

/// A size in bytes with its variance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Estimate {
    pub(crate) mean: u64,
    pub(crate) variance: u128,
}

/// The measured sizes of a template's sandboxes.
#[derive(Clone, Debug)]
pub(crate) struct Sizes {
    /// By age, in parts of a sandbox ([`FADE`]), so that the count of a single one fades evenly. A sandbox that is counted
    /// in every round adds up to `FADE` sandboxes.
    counts: [[u32; BINS]; CLASSES],
    /// What a sandbox of each age is expected to have at most, now or later.
    expected: [Estimate; CLASSES],
    warm_has: u64,
}

impl Default for Sizes {
    fn default() -> Self {
        let counts = [[0; BINS]; CLASSES];
        Self {
            counts,
            expected: expected(&counts),
            warm_has: 0,
        }
    }
}

impl Sizes {
    /// Counts all running sandboxes of the template, each with its age and its size in bytes.
    pub(crate) fn count(&mut self, sandboxes: &[(Duration, u64)]) {
        let mut now = [[0_u32; BINS]; CLASSES];
        for (age, size) in sandboxes {
            now[class(*age)][bin(*size)] += 1;
        }
        let mut both = self.counts;
        let classes = self.counts.iter_mut().zip(&mut both).zip(now).zip(ROUNDS);
        for (((past, both), now), rounds) in classes {
            if now.iter().all(|n| *n == 0) {
                continue;
            }
            for ((past, both), now) in past.iter_mut().zip(both).zip(now) {
                // Counts as much as the past of the same sandboxes, so that the mean follows a change of all at once.
                *both = past.saturating_add(now.saturating_mul(FADE * rounds));
                *past = (*past - past.div_ceil(FADE)).saturating_add(now.saturating_mul(FADE));
            }
        }
        self.expected = expected(&both);
    }

    /// Updates the size of warm slots with that of a slot that has become warm: quickly up, slowly down.
    pub(crate) fn warm(&mut self, size: u64) {
        let before = self.warm_has;
        self.warm_has = match before {
            0 => size,
            _ if size > before => before + (size - before) / 4,
            _ => before - (before - size) / 64,
        };
    }

    /// What a sandbox of this age is expected to have at most, now or later.
    pub(crate) fn at(&self, age: Duration) -> Estimate {
        self.expected[class(age)]
    }

    pub(crate) fn need(&self) -> Need {
        let Estimate { mean, variance } = self.expected[0];
        Need {
            expected: mean.max(self.warm_has).saturating_add(KERNEL),
            variance,
            warm_has: self.warm_has,
        }
    }
}

fn class(age: Duration) -> usize {
    AGES.iter().take_while(|bound| age >= **bound).count()
}

/// The bin of a size in bytes. The largest size of a bin is [`most_of`].
fn bin(size: u64) -> usize {
    let size = size.saturating_sub(1).max(1 << LEAST_BITS);
    let octave = size.ilog2() - LEAST_BITS;
    let quarter = (size >> (octave + LEAST_BITS - 2)) & 3;
    let bin = u64::from(octave) * 4 + quarter;
    usize::try_from(bin).unwrap_or(BINS).min(BINS - 1)
}

fn most_of(bin: usize) -> u64 {
    let bin = u64::try_from(bin).unwrap_or(0);
    (5 + bin % 4) << (bin / 4 + u64::from(LEAST_BITS) - 2)
}

fn expected(counts: &[[u32; BINS]; CLASSES]) -> [Estimate; CLASSES] {
    let mut all = [Estimate::default(); CLASSES];
    let mut assumed = UNKNOWN;
    for ((estimate, counts), rounds) in all.iter_mut().zip(counts).zip(ROUNDS) {
        (*estimate, assumed) = estimate_of(counts, assumed, ASSUMED * FADE * rounds);
    }
    for class in (1..CLASSES).rev() {
        all[class - 1] = all[class - 1].max(all[class]);
    }
    all
}

/// The estimate of one histogram, in which the assumed size counts as often as `weight`, and its median.
fn estimate_of(counts: &[u32; BINS], assumed: u64, weight: u32) -> (Estimate, u64) {
    let weight = u64::from(weight);
    let sizes = counts.iter().enumerate();
    let mut sizes: Vec<_> = sizes
        .filter(|(_, count)| **count > 0)
        .map(|(bin, count)| (most_of(bin), u64::from(*count)))
        .chain([(assumed, weight)])
        .collect();
    sizes.sort_unstable();
    let count: u64 = sizes.iter().map(|(_, count)| count).sum();
    let mut below = 0_u64;
    let median = sizes.iter().find(|(_, n)| {
        below += n;
        below * 2 >= count
    });
    let median = median.map_or(assumed, |(size, _)| *size);
    let most = median.saturating_mul(OUTLIER);
    let cut = |(size, n): &(u64, u64)| (u128::from((*size).min(most)), u128::from(*n));
    let sizes: Vec<(u128, u128)> = sizes.iter().map(cut).collect();
    let count = u128::from(count);
    let mean = sizes.iter().map(|(size, n)| size * n).sum::<u128>() / count;
    let squares = sizes.iter().map(|(size, n)| size.abs_diff(mean).pow(2) * n);
    let of_assumed = u128::from(assumed).pow(2) * u128::from(weight);
    let estimate = Estimate {
        mean: u64::try_from(mean).unwrap_or(u64::MAX),
        variance: (squares.sum::<u128>() + of_assumed) / count,
    };
    (estimate, median)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;
    const SECOND: Duration = Duration::from_secs(1);
    const HOUR: Duration = Duration::from_secs(3600);

    fn counted(rounds: u32, sandboxes: &[(Duration, u64)]) -> Sizes {
        let mut sizes = Sizes::default();
        for _ in 0..rounds {
            sizes.count(sandboxes);
        }
        sizes
    }

    #[test]
    fn a_warm_slot_counts_at_least_as_much_as_the_present_ones() {
        let mut sizes = Sizes::default();
        assert_eq!(sizes.need().slot([].into_iter()), UNKNOWN);
        sizes.warm(3 * MIB);
        assert_eq!(sizes.need().slot([MIB].into_iter()), 3 * MIB);
        let present = [3 * MIB, 6 * MIB + 1].into_iter();
        assert_eq!(sizes.need().slot(present), 9 * MIB / 2 + 1);
        sizes.warm(7 * MIB);
        assert_eq!(sizes.need().warm_has, 4 * MIB);
        sizes.warm(0);
        assert_eq!(sizes.need().warm_has, 4 * MIB - MIB / 16);
    }

    #[test]
    fn what_is_promised_comes_down_to_what_is_measured() {
        let size = 3 * MIB;
        let expected = |count| counted(1, &vec![(SECOND, size); count]).need();
        assert_eq!(Need::default().expected, UNKNOWN + KERNEL);
        assert!(expected(1).expected > 2 * size + KERNEL, "one tells little");
        let many = expected(1000);
        assert!(
            many.expected < size + size / 8 + KERNEL,
            "{} KiB",
            many.expected >> 10
        );
        // Nothing is known of later ages but the assumed sandboxes, which vary by their size.
        assert!(many.variance.isqrt() <= u128::from(size + size / 8));
        // Of 16 MiB each, 1 205 filled a host of 24 GiB.
        let host = u128::from(many.expected) * 4000 + 3 * (many.variance * 4000).isqrt();
        assert!(host < 23 << 30, "{} MiB for 4 000", host >> 20);
    }

    #[test]
    fn the_expectation_follows_what_all_sandboxes_have_and_remembers_each_age() {
        let mut sizes = counted(1, &[(SECOND, 1 << 30); 20]);
        assert!(sizes.need().expected > 800 * MIB);
        for _ in 0..600 {
            sizes.count(&[(SECOND, 20 * MIB); 20]);
        }
        assert!(sizes.need().expected < 30 * MIB, "it has faded");
        for _ in 0..200 {
            sizes.count(&[(HOUR, 300 * MIB); 20]);
        }
        for _ in 0..600 {
            sizes.count(&[(SECOND, 20 * MIB); 20]);
        }
        assert!(
            sizes.need().expected > 200 * MIB,
            "a new one may become old, and old ones are not measured now"
        );
        assert!(sizes.at(HOUR).mean > 200 * MIB);
    }

    #[test]
    fn one_sandbox_after_another_is_enough_to_learn_the_size_of_young_ones() {
        let need = counted(600, &[(SECOND, 3 * MIB)]).need();
        assert!(need.expected < 8 * MIB, "{need:?}");
    }

    #[test]
    fn one_large_sandbox_does_not_raise_the_expectation() {
        let mut sizes = Sizes::default();
        for age in 0..1000 {
            sizes.count(&[(Duration::from_secs(age), 8 << 30)]);
            let expected = sizes.need().expected;
            assert!(expected <= 2 * UNKNOWN + KERNEL, "{age}: {expected}");
        }
    }

    proptest! {
        #[test]
        fn a_few_large_sandboxes_do_not_raise_the_expectation(
            usual_mib in prop::collection::vec(8..64_u64, 1..40),
            inflated in 0..20_usize,
            rounds in 1..300_u32,
        ) {
            // Fewer than the others, or at most two.
            let inflated = inflated.min((usual_mib.len() - 1).max(2));
            let largest = usual_mib.iter().max().copied().unwrap_or(0).max(UNKNOWN / MIB) * MIB;
            let mut sizes: Vec<_> = usual_mib.iter().map(|size| (HOUR, size * MIB)).collect();
            sizes.extend(std::iter::repeat_n((HOUR, 8 << 30), inflated));
            let need = counted(rounds, &sizes).need();
            let most = largest * OUTLIER * 5 / 4 + KERNEL;
            prop_assert!(need.expected <= most, "{} MiB", need.expected / MIB);
        }

        #[test]
        fn the_largest_size_of_a_bin_is_at_most_a_quarter_above_any_other_in_it(size in 0..64_u64 << 30) {
            let most = most_of(bin(size));
            prop_assert!(size <= most && most <= (size + size / 4 + 1).max(MIB * 5 / 4));
            prop_assert_eq!(bin(most), bin(size));
        }

        #[test]
        fn an_older_sandbox_is_expected_to_have_no_more_than_a_younger_one(
            sandboxes in prop::collection::vec((0..2000_u64, 0..4096_u64), 0..60), rounds in 1..80_u32,
        ) {
            let sandboxes: Vec<_> = sandboxes.into_iter()
                .map(|(age, mib)| (Duration::from_secs(age), mib * MIB))
                .collect();
            let sizes = counted(rounds, &sandboxes);
            let ages = [0, 2, 10, 60, 600].map(|s| sizes.at(Duration::from_secs(s)));
            prop_assert!(ages.is_sorted_by(|a, b| a >= b), "{ages:?}");
            let most = sandboxes.iter().map(|(_, size)| *size).max().unwrap_or(0);
            prop_assert!(ages[0].mean <= most_of(bin(most)).max(UNKNOWN));
        }
    }
}
