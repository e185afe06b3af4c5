//! The memory that a sandbox of a template is expected to need: an estimate that follows the measured sizes of most of
//! the template's sandboxes.

/// Smallest expectation in bytes: the measured cost of a small guest's clone, including page tables and the VMM's own
/// memory.
pub(crate) const FLOOR: u64 = 16 << 20;
/// In the average, a sandbox counts as at most this many times the median.
const OUTLIER: u64 = 4;

/// The expectation for one template, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Need {
    /// Memory of a leased sandbox.
    pub(crate) expected: u64,
    /// Memory of a warm slot.
    pub(crate) warm_has: u64,
}

impl Default for Need {
    fn default() -> Self {
        Self {
            expected: FLOOR,
            warm_has: 0,
        }
    }
}

impl Need {
    /// Updates the expectation with the current sizes of the leased sandboxes.
    pub(crate) fn leased(&mut self, sizes: &[u64]) {
        if let Some(seen) = usual(sizes, self.warm_has.max(FLOOR)) {
            self.expected = estimate(self.expected, seen, FLOOR);
        }
    }

    /// Updates the expectation with the size of a slot that has become warm.
    pub(crate) fn warm(&mut self, size: u64) {
        self.warm_has = match self.warm_has {
            0 => size,
            before => estimate(before, size, 0),
        };
    }

    /// Expected memory of one more warm slot, given the sizes of the existing ones: not less than their average, which
    /// may exceed a falling estimate.
    pub(crate) fn slot(&self, warm: impl Iterator<Item = u64>) -> u64 {
        let (sum, count) = warm.fold((0_u64, 0_u64), |(sum, count), size| {
            (sum.saturating_add(size), count + 1)
        });
        let average = sum.div_ceil(count.max(1));
        self.warm_has.max(FLOOR).max(average)
    }
}

/// Returns the average of `sizes`, each counted as at most [`OUTLIER`] times the median; `None` if `sizes` is empty.
/// The median includes two additional sizes of `fresh` and is at least `fresh`, so that one or two large sandboxes do
/// not determine it.
fn usual(sizes: &[u64], fresh: u64) -> Option<u64> {
    let count = u64::try_from(sizes.len()).ok().filter(|n| *n > 0)?;
    let mut sorted: Vec<u64> = sizes.iter().copied().chain([fresh; 2]).collect();
    sorted.sort_unstable();
    let middle = *sorted.get((sorted.len() - 1) / 2)?;
    let most = middle.max(fresh).saturating_mul(OUTLIER);
    let cut = sizes.iter().map(|size| size.min(&most) / count);
    Some(cut.sum())
}

/// Moves an estimate one step from `before` towards `seen`, but not below `floor`: quickly up, slowly down.
fn estimate(before: u64, seen: u64, floor: u64) -> u64 {
    let after = if seen > before {
        before + (seen - before) / 4
    } else {
        before - (before - seen) / 64
    };
    after.max(floor)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_warm_slot_counts_at_least_as_much_as_the_present_ones() {
        let mut need = Need::default();
        assert_eq!(need.slot([].into_iter()), FLOOR);
        need.warm(3 * FLOOR);
        assert_eq!(need.slot([FLOOR].into_iter()), 3 * FLOOR);
        assert_eq!(
            need.slot([3 * FLOOR, 6 * FLOOR + 1].into_iter()),
            9 * FLOOR / 2 + 1
        );
    }

    proptest! {
        #[test]
        fn an_estimate_stays_between_the_last_one_and_what_was_seen(
            before in 0..1_u64 << 40, seen in 0..1_u64 << 40, floor in 0..1_u64 << 30,
        ) {
            let after = estimate(before, seen, floor);
            prop_assert!(after >= floor);
            prop_assert!(after >= before.min(seen));
            prop_assert!(after <= before.max(seen).max(floor));
        }

        #[test]
        fn a_few_large_sandboxes_do_not_raise_the_expectation(
            usual_mib in prop::collection::vec(8..64_u64, 1..40),
            inflated in 0..20_usize,
            ticks in 1..300_u32,
        ) {
            // Fewer than the others, or at most two.
            let inflated = inflated.min((usual_mib.len() - 1).max(2));
            let largest = usual_mib.iter().max().copied().unwrap_or(0).max(FLOOR / MIB) * MIB;
            let mut sizes: Vec<u64> = usual_mib.iter().map(|size| size * MIB).collect();
            sizes.extend(std::iter::repeat_n(8 << 30, inflated));
            let mut need = Need::default();
            for _ in 0..ticks {
                need.leased(&sizes);
            }
            prop_assert!(need.expected <= largest * OUTLIER, "{} MiB", need.expected / MIB);
        }
    }

    #[test]
    fn the_expectation_follows_what_all_sandboxes_have() {
        let mut need = Need::default();
        for _ in 0..100 {
            need.leased(&[1 << 30; 3]);
        }
        assert!(need.expected > 1000 * MIB, "{} MiB", need.expected / MIB);
        need.leased(&[]);
        assert!(need.expected > 1000 * MIB);
        for _ in 0..1000 {
            need.leased(&[20 * MIB; 3]);
        }
        assert!(need.expected < 24 * MIB, "{} MiB", need.expected / MIB);
    }

    #[test]
    fn one_large_sandbox_does_not_raise_the_expectation() {
        let mut need = Need::default();
        for _ in 0..1000 {
            need.leased(&[8 << 30]);
        }
        assert!(need.expected <= OUTLIER * FLOOR);
    }
}
