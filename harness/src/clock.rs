//! Waits on CLOCK_MONOTONIC of the host, the clock of all time stamps.

use std::time::Duration;

pub use model::clock::{monotonic_ns, nanoseconds};
use nix::{
    errno::Errno,
    sys::time::TimeSpec,
    time::{ClockId, ClockNanosleepFlags, clock_nanosleep},
};

/// Sleeps until [`monotonic_ns`] reaches `instant_ns`; returns immediately if the instant has passed.
pub fn sleep_until(instant_ns: u64) {
    let until = TimeSpec::from(Duration::from_nanos(instant_ns));
    while clock_nanosleep(
        ClockId::CLOCK_MONOTONIC,
        ClockNanosleepFlags::TIMER_ABSTIME,
        &until,
    ) == Err(Errno::EINTR)
    {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleeping_ends_at_the_instant_or_later() {
        let until = monotonic_ns() + 2_000_000;
        sleep_until(until);
        assert!(monotonic_ns() >= until);
        sleep_until(0);
    }
}
