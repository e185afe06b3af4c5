//! The defence of the host when sandboxes need more memory than was expected ([`super::need`]), as a pure state machine:
//! a state and a reading in, a decision out.
//!
//! ```text
//!          below the mark, or stalls               below the floor
//!   Calm ───────────────────────────► Tight ───────────────────────────► Full
//!    ▲                                │   ▲                                │
//!    └────────────────────────────────┘   └────────────────────────────────┘
//!      a step above the mark, and              half a step above the floor
//!      stalls below half of the limit
//!
//!   Calm    creates are admitted by what is promised
//!   Tight   1. warm slots and unused templates in huge pages go
//!           2. idle sandboxes would be hibernated here, once there is hibernation
//!           3. creates and resumes wait a while, and are refused
//!   Full    also: sandboxes that grow beyond their promise are stopped, and two steps below the floor all of them
//! ```
//! The floor is the reserve, a step a quarter of it or [`LARGEST_STEP`], and the mark at least a step above the floor.
//! A stopped sandbox loses nothing and frees nothing. A sandbox within its promise is stopped only with all others.
//! Sandboxes continue one after another in `Tight` and `Calm`, the smallest first, so memory that others give back is
//! used again, and large sandboxes that still grow do not keep small ones waiting.
//!
//! What must never happen: the kernel runs out of memory, and its OOM killer takes a sandbox. The next reading
//! therefore comes before all CPUs together can fill half of the memory above the floor, and the floor is at least what
//! they can fill in three of the shortest intervals. Stalls (PSI) count only while little memory is available: a sandbox
//! can cause them within its own limit.

use std::time::Duration;

/// Memory that one CPU can fill per second, in bytes. A first touch costs a page fault and a zeroed page.
const FILLED_PER_CPU: u64 = 1 << 30;
/// Distance of the limits from each other, in bytes, unless a quarter of the floor is less.
const LARGEST_STEP: u64 = 256 << 20;
/// Intervals between two readings.
const SHORTEST: Duration = Duration::from_millis(10);
const LONGEST: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Pressure {
    #[default]
    Calm,
    Tight,
    Full,
}

/// A reading of the host's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HostMemory {
    /// MemAvailable in bytes.
    pub(crate) available: u64,
    /// Share of the last 10 s in which a task waited for memory, in hundredths of a percent. `None`: the kernel does not
    /// measure it.
    pub(crate) stalls: Option<u32>,
    /// Whether sandboxes are stopped.
    pub(crate) has_stopped: bool,
}

/// The limits of the states. Sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Marks {
    floor: u64,
    step: u64,
    /// Below this, running sandboxes have used what they were promised.
    tight: u64,
    /// Stalls count below this.
    low: u64,
    /// In hundredths of a percent.
    max_stalls: u32,
    filled_per_s: u64,
}

impl Marks {
    /// `reserve` is never given to sandboxes, `total` the host's memory, and `max_stalls` a percentage.
    pub(crate) fn new(reserve: u64, total: u64, cpus: u32, max_stalls: u32) -> Self {
        let filled_per_s = FILLED_PER_CPU.saturating_mul(u64::from(cpus));
        let floor = reserve.max(filled_in(filled_per_s, 3 * SHORTEST));
        let step = (floor / 4).min(LARGEST_STEP);
        Self {
            floor,
            step,
            tight: floor.saturating_add(step),
            low: floor.saturating_add(total / 8),
            max_stalls: max_stalls.saturating_mul(100),
            filled_per_s,
        }
    }

    /// The marks if one sandbox may suddenly grow by this much.
    pub(crate) fn with_growth(self, growth: u64) -> Self {
        Self {
            tight: self.tight.max(self.floor.saturating_add(growth)),
            ..self
        }
    }

    fn is_stalled(&self, memory: HostMemory, limit: u32) -> bool {
        memory.available < self.low && memory.stalls.is_some_and(|stalls| stalls > limit)
    }
}

/// What happens to running sandboxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The smallest stopped sandbox continues, if any.
    ContinueOne,
    Nothing,
    /// Those that have grown since they were last measured and are larger than promised are stopped.
    StopGrowing,
    StopAll,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Decision {
    pub(crate) pressure: Pressure,
    pub(crate) step: Step,
    /// When to read the host's memory again.
    pub(crate) again: Duration,
}

/// Decides how the host is defended. `before` is the state of the last decision.
pub(crate) fn defend(before: Pressure, marks: &Marks, memory: HostMemory) -> Decision {
    let available = memory.available;
    let is_above = |mark: u64, by: u64| available >= mark.saturating_add(by);
    let (stalled, relaxed) = (marks.max_stalls, marks.max_stalls / 2);
    let pressure = match before {
        _ if available < marks.floor => Pressure::Full,
        Pressure::Full if !is_above(marks.floor, marks.step / 2) => Pressure::Full,
        _ if available < marks.tight || marks.is_stalled(memory, stalled) => Pressure::Tight,
        Pressure::Calm => Pressure::Calm,
        _ if !is_above(marks.tight, marks.step) || marks.is_stalled(memory, relaxed) => {
            Pressure::Tight
        }
        Pressure::Tight | Pressure::Full => Pressure::Calm,
    };
    let step = match pressure {
        Pressure::Full if available < marks.floor - 2 * marks.step => Step::StopAll,
        Pressure::Full if available < marks.floor => Step::StopGrowing,
        Pressure::Full => Step::Nothing,
        Pressure::Tight | Pressure::Calm => Step::ContinueOne,
    };
    let left = available.saturating_sub(marks.floor) / 2;
    let micros = u128::from(left) * 1_000_000 / u128::from(marks.filled_per_s.max(1));
    let again = match step {
        Step::ContinueOne if memory.has_stopped => SHORTEST,
        _ => Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX)),
    };
    Decision {
        pressure,
        step,
        again: again.clamp(SHORTEST, LONGEST),
    }
}

fn filled_in(per_s: u64, time: Duration) -> u64 {
    let bytes = u128::from(per_s) * time.as_micros() / 1_000_000;
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;
    /// A host of 24 GiB with two CPUs.
    const TOTAL: u64 = 24 << 30;

    fn marks() -> Marks {
        Marks::new(512 * MIB, TOTAL, 2, 10)
    }

    fn memory(mib: u64, stalls: u32) -> HostMemory {
        HostMemory {
            available: mib * MIB,
            stalls: Some(stalls),
            has_stopped: false,
        }
    }

    #[test]
    fn the_host_is_defended_in_the_documented_order() {
        let mut pressure = Pressure::Calm;
        let mut after = |mib, stalls| {
            let decision = defend(pressure, &marks(), memory(mib, stalls));
            pressure = decision.pressure;
            (decision.pressure, decision.step)
        };
        assert_eq!(after(640, 0), (Pressure::Calm, Step::ContinueOne));
        assert_eq!(after(639, 0), (Pressure::Tight, Step::ContinueOne));
        assert_eq!(after(767, 0), (Pressure::Tight, Step::ContinueOne));
        assert_eq!(after(511, 0), (Pressure::Full, Step::StopGrowing));
        assert_eq!(after(255, 0), (Pressure::Full, Step::StopAll));
        assert_eq!(after(575, 0), (Pressure::Full, Step::Nothing));
        assert_eq!(after(576, 0), (Pressure::Tight, Step::ContinueOne));
        assert_eq!(after(768, 0), (Pressure::Calm, Step::ContinueOne));
        // Stalls of more than 10 % count below 512 MiB and an eighth of the host.
        assert_eq!(after(3583, 1001).0, Pressure::Tight);
        assert_eq!(after(3583, 501).0, Pressure::Tight);
        assert_eq!(after(3583, 500).0, Pressure::Calm);
        assert_eq!(after(3584, 9999).0, Pressure::Calm);
        // The mark leaves memory for the largest growth.
        let large = marks().with_growth(1 << 30);
        let decision = defend(Pressure::Calm, &large, memory(1535, 0));
        assert_eq!(decision.pressure, Pressure::Tight);
    }

    #[test]
    fn memory_is_read_more_often_the_less_is_left() {
        let again = |mib| defend(Pressure::Calm, &marks(), memory(mib, 0)).again;
        assert_eq!([again(20_000), again(0)], [LONGEST, SHORTEST]);
        assert_eq!(again(512 + 1024), Duration::from_millis(250));
        // Thousands of stopped sandboxes continue within a minute.
        let stopped = HostMemory {
            has_stopped: true,
            ..memory(20_000, 0)
        };
        assert_eq!(defend(Pressure::Calm, &marks(), stopped).again, SHORTEST);
    }

    /// Sandboxes that want more memory than the host has, on CPUs that fill as much as they can.
    struct Host {
        available: u64,
        /// What each sandbox still wants, and whether it is stopped.
        sandboxes: Vec<(u64, bool)>,
    }

    impl Host {
        fn grow(&mut self, mut most: u64) -> Vec<usize> {
            let mut grown = Vec::new();
            for (at, (wants, stopped)) in self.sandboxes.iter_mut().enumerate() {
                let more = most.min(*wants);
                if !*stopped && more > 0 {
                    *wants -= more;
                    most -= more;
                    self.available = self.available.saturating_sub(more);
                    grown.push(at);
                }
            }
            grown
        }
    }

    proptest! {
        #[test]
        fn less_memory_never_means_less_defence_and_the_same_reading_no_other_state(
            before in 0..3_usize, mib in 0..6000_u64, less in 0..6000_u64, stalls in 0..3000_u32,
        ) {
            let before = [Pressure::Calm, Pressure::Tight, Pressure::Full][before];
            let of = |before, mib| defend(before, &marks(), memory(mib, stalls));
            let decision = of(before, mib);
            prop_assert!(of(before, mib.saturating_sub(less)).pressure >= decision.pressure);
            prop_assert!(of(before, mib.saturating_sub(less)).again <= decision.again);
            prop_assert_eq!(of(decision.pressure, mib), decision);
            // Nothing is stopped while starts are admitted.
            let stops = matches!(decision.step, Step::StopAll | Step::StopGrowing);
            prop_assert_eq!(stops, mib < 512);
            prop_assert!(decision.pressure != Pressure::Calm || mib >= 640);
        }

        /// However fast sandboxes grow, memory never runs out, and whoever waits continues once memory is given back.
        #[test]
        fn memory_never_runs_out_and_stopped_sandboxes_continue(
            available in 1024..24_000_u64, cpus in 1..128_u32,
            wants in prop::collection::vec(1..4000_u64, 1..60),
        ) {
            let marks = Marks::new(512 * MIB, TOTAL, cpus, 10);
            let wanted: u64 = wants.iter().sum();
            let sandboxes = wants.iter().map(|mib| (mib * MIB, false)).collect();
            let mut host = Host { available: marks.floor + available * MIB, sandboxes };
            let mut pressure = Pressure::Calm;
            let mut step = |host: &mut Host, grown: &mut Vec<usize>| {
                let has_stopped = host.sandboxes.iter().any(|(_, stopped)| *stopped);
                let memory = HostMemory { available: host.available, stalls: None, has_stopped };
                let decision = defend(pressure, &marks, memory);
                pressure = decision.pressure;
                match decision.step {
                    Step::StopAll => host.sandboxes.iter_mut().for_each(|(_, stopped)| *stopped = true),
                    Step::StopGrowing => grown.iter().for_each(|at| host.sandboxes[*at].1 = true),
                    Step::ContinueOne => {
                        if let Some((_, stopped)) = host.sandboxes.iter_mut().find(|(_, stopped)| *stopped) {
                            *stopped = false;
                        }
                    }
                    Step::Nothing => {}
                }
                *grown = host.grow(filled_in(marks.filled_per_s, decision.again));
            };
            let mut grown = Vec::new();
            for _ in 0..1000 {
                step(&mut host, &mut grown);
                prop_assert!(host.available > 0, "the kernel has no memory left");
            }
            host.available += 2 * wanted * MIB + marks.tight * 2;
            for _ in 0..1000 {
                step(&mut host, &mut grown);
            }
            prop_assert!(host.sandboxes.iter().all(|sandbox| *sandbox == (0, false)), "{:?}", host.sandboxes);
        }
    }
}
