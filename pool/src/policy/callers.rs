//! Estimates how long callers keep the host busy after they have got a sandbox.
//!
//! A create is followed by a first command, which a fill would delay. The CPU time of such commands is not known before
//! they run. Each sandbox is therefore expected to bring a typical amount of work, and the host to process the work of
//! all sandboxes on all of its cores. A single create thus delays fills for a moment, and a burst delays them until its
//! commands have run.

use std::time::Duration;

/// CPU time of a first command or cell: 5 ms for a static program, 30 ms for a cell that no warm-up ran (CPU time per
/// create in `results/unseen-python-ring3-2core-20261124` and `results/steady-ring3-2core-20261124`).
const WORK: Duration = Duration::from_millis(20);
/// Time until a caller that has got a sandbox sends a command.
const TURN: Duration = Duration::from_millis(10);
/// Maximum delay, whatever the number of creates.
pub(crate) const LONGEST: Duration = Duration::from_secs(1);

/// The expected work of callers. Times are in CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Callers {
    cores: u32,
    done_ns: u64,
}

impl Callers {
    pub(crate) fn new(cores: u32) -> Self {
        Self {
            cores: cores.max(1),
            done_ns: 0,
        }
    }

    /// Records that a caller requested a sandbox.
    pub(crate) fn asked(&mut self, now_ns: u64) {
        self.done_ns = self.done_ns.max(now_ns.saturating_add(nanos(TURN)));
    }

    /// Records that a caller got a sandbox.
    pub(crate) fn got(&mut self, now_ns: u64) {
        self.asked(now_ns);
        let longest_ns = now_ns.saturating_add(nanos(LONGEST));
        let done_ns = self.done_ns.saturating_add(nanos(WORK / self.cores));
        self.done_ns = done_ns.min(longest_ns);
    }

    /// Expected duration of the work.
    pub(crate) fn busy_for(&self, now_ns: u64) -> Duration {
        Duration::from_nanos(self.done_ns.saturating_sub(now_ns))
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_burst_is_expected_to_last_as_long_as_its_work() {
        let mut callers = Callers::new(2);
        assert!(callers.busy_for(7).is_zero());
        callers.got(7);
        assert_eq!(callers.busy_for(7), TURN + WORK / 2);
        for _ in 1..50 {
            callers.got(7);
        }
        assert_eq!(callers.busy_for(7), TURN + WORK * 25);
        assert!(callers.busy_for(7 + 600 * MS).is_zero());
    }

    #[test]
    fn a_steady_stream_leaves_time_for_fills() {
        let mut callers = Callers::new(2);
        let mut free = 0;
        for ms in 0..1000 {
            if ms % 50 == 0 {
                callers.got(ms * MS);
            }
            free += u32::from(callers.busy_for(ms * MS).is_zero());
        }
        assert_eq!(free, 600, "of each 50 ms, 20 are the caller's");
    }

    #[test]
    fn no_stream_of_callers_is_expected_to_last_for_ever() {
        let mut callers = Callers::new(1);
        for ms in 0..10_000 {
            callers.got(ms * MS);
        }
        assert_eq!(callers.busy_for(9999 * MS), LONGEST);
    }
}
