//! The clock of deadlines. Deadlines are wall-clock time, because clients see them. A sandbox nevertheless lives for
//! the requested time even if the wall clock is set: its lifetime is measured in CLOCK_BOOTTIME, which cannot be set.
//! [`Clock::follow`] detects a step of the wall clock, and the driver moves all deadlines by the same amount.
//!
//! A record contains the difference of the two clocks to which its deadline refers ([`Reading::offset_ms`]). If the
//! wall clock was set while no server ran, the next server finds another difference ([`Reading::step_since`]).

use crate::{host, lifetime::UnixMs};

/// Steps of up to this many milliseconds are ignored, because the two clocks are not read at the same instant.
const JITTER_MS: i64 = 1000;

/// Both clocks at the same time, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    /// CLOCK_REALTIME, since 1970.
    pub(crate) wall: UnixMs,
    /// CLOCK_BOOTTIME, since the host booted, suspend included.
    pub(crate) elapsed: u64,
}

impl Reading {
    pub(crate) fn now() -> Self {
        Self {
            wall: host::unix_ms(),
            elapsed: host::boottime_ms(),
        }
    }

    /// The wall-clock time at which the host would have booted. Within one boot it changes only if the clock is set.
    pub(crate) fn offset_ms(self) -> i64 {
        let offset = i128::from(self.wall) - i128::from(self.elapsed);
        i64::try_from(offset).unwrap_or(i64::MAX)
    }

    /// The step of the wall clock in milliseconds since a reading with this offset, in the same boot. `None` if it was
    /// not set.
    pub(crate) fn step_since(self, offset_ms: i64) -> Option<i64> {
        let step = self.offset_ms().checked_sub(offset_ms)?;
        (step.saturating_abs() > JITTER_MS).then_some(step)
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    last: Reading,
}

impl Clock {
    pub(crate) fn new(now: Reading) -> Self {
        Self { last: now }
    }

    /// The offset to which the deadlines of this clock refer.
    pub(crate) fn offset_ms(&self) -> i64 {
        self.last.offset_ms()
    }

    /// The time, as if the wall clock had not been set since the last [`Clock::follow`].
    pub(crate) fn now(&self) -> UnixMs {
        self.at(Reading::now())
    }

    fn at(&self, now: Reading) -> UnixMs {
        let passed = now.elapsed.saturating_sub(self.last.elapsed);
        self.last.wall.saturating_add(passed)
    }

    /// Follows the wall clock. Returns its step in milliseconds. `None` if it was not set.
    pub(crate) fn follow(&mut self, now: Reading) -> Option<i64> {
        let step = now.step_since(self.offset_ms())?;
        self.last = now;
        Some(step)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::slot::{Event, Slot, Stage, transition};

    const DAY: i64 = 86_400_000;
    const HOUR: i64 = DAY / 24;
    const START: UnixMs = 1_800_000_000_000;

    fn reading(elapsed: u64, set_by: i64) -> Reading {
        Reading {
            wall: (START + elapsed).saturating_add_signed(set_by),
            elapsed,
        }
    }

    /// A sandbox lives for 300 s, although the wall clock is set by a day after 100 s.
    fn lives_as_long_as_requested(set_by: i64) {
        let mut clock = Clock::new(reading(0, 0));
        let started = transition(Slot::new(Stage::Starting), Event::Started, START);
        let mut slot = started.unwrap().0;
        slot.set_deadline(START, 300);
        assert_eq!(clock.follow(reading(99_000, 0)), None);
        // A request or deadline that is handled before the driver follows the clock.
        assert_eq!(clock.at(reading(100_000, set_by)), START + 100_000);
        let step = clock.follow(reading(100_500, set_by)).unwrap();
        assert_eq!(step, set_by);
        slot.clock_was_set(step);
        assert_eq!(clock.follow(reading(100_600, set_by)), None);
        let due = slot.due().unwrap();
        assert_eq!(due, (START + 300_000).saturating_add_signed(set_by));
        assert!(clock.at(reading(299_999, set_by)) < due);
        assert!(clock.at(reading(300_000, set_by)) >= due);
    }

    #[test]
    fn a_clock_that_jumps_by_a_day_neither_ends_nor_prolongs_a_sandbox() {
        lives_as_long_as_requested(DAY);
        lives_as_long_as_requested(-DAY);
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Wait(u64),
        /// The wall clock is set by this many hours.
        Set(i64),
        /// The driver's tick.
        Tick,
        /// The record is written.
        Write,
        /// A client sets the deadline, and the record is written.
        SetDeadline(u64),
        /// Another server starts.
        Restart,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..50_000u64).prop_map(Step::Wait),
            (-48..48i64).prop_map(Step::Set),
            Just(Step::Tick),
            Just(Step::Write),
            (0..400_000u64).prop_map(Step::SetDeadline),
            Just(Step::Restart),
        ]
    }

    proptest! {
        /// The remaining time changes only with elapsed time, whatever happens to the wall clock, whenever a record is
        /// written, and whether or not a server runs.
        #[test]
        fn what_is_left_of_a_life_depends_on_no_wall_clock(
            steps in prop::collection::vec(step(), 0..60),
        ) {
            let (mut elapsed, mut set_by, mut ends_at) = (1_000_000, 0, 1_300_000);
            let mut clock = Clock::new(reading(elapsed, set_by));
            let mut due = START + ends_at;
            let mut record = (due, clock.offset_ms());
            for step in steps {
                match step {
                    Step::Wait(ms) => elapsed += ms,
                    Step::Set(hours) => set_by += hours * HOUR,
                    Step::Tick => {
                        if let Some(step) = clock.follow(reading(elapsed, set_by)) {
                            due = due.saturating_add_signed(step);
                        }
                    }
                    Step::Write => record = (due, clock.offset_ms()),
                    Step::SetDeadline(ms) => {
                        ends_at = elapsed + ms;
                        due = clock.at(reading(elapsed, set_by)) + ms;
                        record = (due, clock.offset_ms());
                    }
                    Step::Restart => {
                        let now = reading(elapsed, set_by);
                        let (recorded, offset_ms) = record;
                        let step = now.step_since(offset_ms).unwrap_or(0);
                        due = recorded.saturating_add_signed(step);
                        clock = Clock::new(now);
                    }
                }
                let now = clock.at(reading(elapsed, set_by));
                let left = i128::from(due) - i128::from(now);
                prop_assert_eq!(left, i128::from(ends_at) - i128::from(elapsed));
            }
        }
    }
}
