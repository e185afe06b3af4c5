//! The clock of deadlines. Deadlines are wall-clock time, because clients see them, but a sandbox lives for as long as
//! was requested even if the wall clock is set meanwhile: time passes as in CLOCK_BOOTTIME, which nobody can set. When
//! the wall clock was set, [`Clock::follow`] returns by how much, and the driver moves all deadlines by as much.

use crate::{host, lifetime::UnixMs};

/// Changes of up to this many milliseconds are not followed: the two clocks are not read at the same moment.
const JITTER_MS: i64 = 1000;

/// Both clocks at one moment, in milliseconds.
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
}

#[derive(Debug)]
pub(crate) struct Clock {
    last: Reading,
}

impl Clock {
    pub(crate) fn new(now: Reading) -> Self {
        Self { last: now }
    }

    /// The time, as if the wall clock had not been set since the last [`Clock::follow`].
    pub(crate) fn now(&self) -> UnixMs {
        self.at(Reading::now())
    }

    fn at(&self, now: Reading) -> UnixMs {
        let passed = now.elapsed.saturating_sub(self.last.elapsed);
        self.last.wall.saturating_add(passed)
    }

    /// Follows the wall clock. Returns by how many milliseconds it was set; `None` if it was not.
    pub(crate) fn follow(&mut self, now: Reading) -> Option<i64> {
        let step = i64::try_from(i128::from(now.wall) - i128::from(self.at(now))).ok()?;
        if step.abs() <= JITTER_MS {
            return None;
        }
        self.last = now;
        Some(step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slot::{Event, Slot, Stage, transition};

    const DAY: i64 = 86_400_000;
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
        // A request or deadline that is decided before the driver follows the clock.
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
}
