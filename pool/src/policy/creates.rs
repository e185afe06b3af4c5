//! The demand for warm slots of one template, estimated from its creates.
//!
//! A fill replaces a taken slot when callers are idle. The time until then is the *lead*. The warm stock should cover
//! the creates that arrive until it is full again. `burst` counts creates. It halves with each lead, and restarts when
//! the stock is full. `peak` is the largest burst. It holds for half of the time after which an unused template is
//! idle, so that a repeated burst finds a slot for each create. It then halves in a quarter of that time, so that the
//! stock of a less used template shrinks slowly.

use std::time::Duration;

/// The value of one create in [`Decaying`].
const ONE: u64 = 1 << 20;
/// Lower bound of the lead, because the creates of a burst do not all arrive at the same moment.
const LEAST_LEAD: Duration = Duration::from_secs(1);
const LONGEST_LEAD: Duration = Duration::from_secs(60);

/// The creates of a template that determine its warm stock. Times are in CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Creates {
    burst: Decaying,
    peak: Decaying,
    recent: Decaying,
    /// Time of the last create. `None` if there was none.
    last_ns: Option<u64>,
    /// Average duration of a fill. Zero before the first one.
    fill: Duration,
}

impl Creates {
    /// Counts a create. `idle` is the time after which an unused template is idle.
    pub(crate) fn count(&mut self, now_ns: u64, idle: Duration) {
        let lead = self.lead();
        self.burst.add(ONE, now_ns, lead);
        self.recent.add(ONE, now_ns, idle / 2);
        if self.burst.value >= self.peak(now_ns, idle) {
            self.peak = self.burst;
        }
        self.last_ns = Some(now_ns);
    }

    /// Updates the average with the duration of a fill.
    pub(crate) fn filled(&mut self, took: Duration) {
        self.fill = match self.fill {
            Duration::ZERO => took,
            fill => (fill * 3).saturating_add(took) / 4,
        };
    }

    /// Ends a burst, because the stock is full.
    pub(crate) fn is_full(&mut self) {
        self.burst = Decaying::default();
    }

    /// Number of slots that the warm stock should have: zero if the template is idle, otherwise at least one.
    pub(crate) fn wanted(&self, now_ns: u64, idle: Duration) -> u32 {
        if self.is_idle(now_ns, idle) {
            return 0;
        }
        let peak = self.peak(now_ns, idle);
        u32::try_from(peak.div_ceil(ONE).max(1)).unwrap_or(u32::MAX)
    }

    fn peak(&self, now_ns: u64, idle: Duration) -> u64 {
        let hold_ns = u64::try_from((idle / 2).as_nanos()).unwrap_or(u64::MAX);
        self.peak.at(now_ns.saturating_sub(hold_ns), idle / 4)
    }

    /// Recent use of the template. Only for comparisons.
    pub(crate) fn recent(&self, now_ns: u64, idle: Duration) -> u64 {
        self.recent.at(now_ns, idle / 2)
    }

    fn is_idle(&self, now_ns: u64, idle: Duration) -> bool {
        self.last_ns
            .is_none_or(|last_ns| super::is_idle(last_ns, now_ns, idle))
    }

    fn lead(&self) -> Duration {
        self.fill.clamp(LEAST_LEAD, LONGEST_LEAD)
    }
}

/// A number that halves with each half-life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Decaying {
    value: u64,
    at_ns: u64,
}

impl Decaying {
    fn add(&mut self, more: u64, now_ns: u64, half_life: Duration) {
        self.value = self.at(now_ns, half_life).saturating_add(more);
        self.at_ns = now_ns;
    }

    fn at(self, now_ns: u64, half_life: Duration) -> u64 {
        let age = u128::from(now_ns.saturating_sub(self.at_ns));
        let half_life = half_life.as_nanos().max(1);
        let halves = u32::try_from(age / half_life).unwrap_or(u32::MAX);
        let whole = u128::from(self.value.checked_shr(halves).unwrap_or(0));
        // The remaining part x of a half-life, in 16 bits. 2^-x is 1 - x ln 2 + x² (ln 2 - 1/2) with an error below 0.3
        // %. The approximation is exact at both ends, and decreasing in between.
        let x = ((age % half_life) << 16) / half_life;
        let lost = x * ((45_426 << 16) - x * 12_658);
        u64::try_from((whole * ((1 << 48) - lost)) >> 48).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const IDLE: Duration = Duration::from_secs(600);
    const S: u64 = 1_000_000_000;

    /// Creates at these times.
    fn creates(times: impl IntoIterator<Item = u64>) -> Creates {
        let mut creates = Creates::default();
        for at in times {
            creates.count(at, IDLE);
        }
        creates
    }

    #[test]
    fn demand_is_the_largest_burst_and_falls_to_zero_without_use() {
        assert_eq!(Creates::default().wanted(0, IDLE), 0);
        let burst = creates(std::iter::repeat_n(S, 50));
        let wanted = |at_s: u64| burst.wanted(at_s * S, IDLE);
        assert_eq!(
            [1, 301, 451, 599, 601].map(wanted),
            [50, 50, 25, 13, 0],
            "at once, at the end of the hold, after a half-life, before and after the idle time"
        );
        // One create each minute requires one slot, as long as creates arrive.
        let slow = creates((1..100).map(|minute| minute * 60 * S));
        assert_eq!(slow.wanted(99 * 60 * S, IDLE), 1);
        assert_eq!(slow.wanted((99 * 60 + 599) * S, IDLE), 1);
        assert_eq!(slow.wanted((99 * 60 + 600) * S, IDLE), 0);
        // A later, smaller burst does not lower the demand immediately.
        let mut later = burst;
        for _ in 0..10 {
            later.count(100 * S, IDLE);
        }
        assert_eq!(later.wanted(100 * S, IDLE), 50);
        assert!(
            later.wanted(451 * S, IDLE) < 30,
            "nor does it prolong the hold"
        );
    }

    #[test]
    fn demand_covers_what_arrives_while_a_slot_is_replaced() {
        // Four creates per second. A lead of one second halves the count, so it converges to 4 / ln 2.
        let steady = || creates((1..400).map(|n| n * S / 4));
        assert_eq!(steady().wanted(100 * S, IDLE), 7);
        // A fill of ten seconds.
        let mut slow = Creates::default();
        slow.filled(Duration::from_secs(10));
        for n in 1..400 {
            slow.count(n * S / 4, IDLE);
        }
        let wanted = slow.wanted(100 * S, IDLE);
        assert!((40..80).contains(&wanted), "{wanted}");
        slow.filled(Duration::from_secs(2));
        assert_eq!(slow.fill, Duration::from_secs(8));
    }

    #[test]
    fn bursts_that_find_a_full_stock_do_not_add_up() {
        let mut rounds = Creates::default();
        for round in 1..20 {
            for _ in 0..50 {
                rounds.count(round * 2 * S, IDLE);
            }
            rounds.is_full();
        }
        assert_eq!(rounds.wanted(38 * S, IDLE), 50);
    }

    proptest! {
        #[test]
        fn a_decaying_number_halves_with_each_half_life_and_never_rises(
            value in 0..u64::MAX, half_ms in 1..1_000_000_u64, ages in prop::collection::vec(0..u64::MAX, 1..20),
        ) {
            let half_life = Duration::from_millis(half_ms);
            let number = Decaying { value, at_ns: 5 };
            let mut ages = ages;
            ages.extend((0..3).map(|n| n * half_ms * 1_000_000));
            ages.sort_unstable();
            let at = |age: u64| number.at(age.saturating_add(5), half_life);
            for pair in ages.windows(2) {
                prop_assert!(at(pair[0]) >= at(pair[1]), "it rises after {} ns", pair[0]);
            }
            prop_assert_eq!(at(0), value);
            prop_assert_eq!(at(half_ms * 1_000_000), value / 2);
            prop_assert_eq!(at(half_ms * 2_000_000), value / 4);
        }

        #[test]
        fn demand_is_at_least_the_last_burst_at_most_all_creates_and_zero_when_idle(
            gaps_ms in prop::collection::vec(0..400_000_u64, 1..60), last in 1..40_u32, fill_ms in 0..20_000_u64,
        ) {
            let mut creates = Creates::default();
            creates.filled(Duration::from_millis(fill_ms));
            let mut now_ns = S;
            for gap in &gaps_ms {
                now_ns += gap * 1_000_000;
                creates.count(now_ns, IDLE);
            }
            for _ in 1..last {
                creates.count(now_ns, IDLE);
            }
            let all = u32::try_from(gaps_ms.len()).unwrap() + last - 1;
            let wanted = creates.wanted(now_ns, IDLE);
            prop_assert!((last..=all).contains(&wanted), "{wanted} of {last} to {all}");
            let idle_ns = u64::try_from(IDLE.as_nanos()).unwrap();
            prop_assert!(creates.wanted(now_ns + idle_ns - 1, IDLE) >= 1);
            prop_assert_eq!(creates.wanted(now_ns + idle_ns, IDLE), 0);
        }
    }
}
