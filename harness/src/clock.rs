//! The one clock of every stamp: CLOCK_MONOTONIC of the host, in nanoseconds.

use std::time::Duration;

use nix::{
    errno::Errno,
    sys::time::TimeSpec,
    time::{ClockId, ClockNanosleepFlags, clock_gettime, clock_nanosleep},
};

/// Now, in nanoseconds of CLOCK_MONOTONIC.
#[must_use]
pub fn monotonic_ns() -> u64 {
    // CLOCK_MONOTONIC exists on every Linux; a failure would show as latencies of zero.
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |t| nanoseconds(Duration::from(t)))
}

/// Sleeps until an instant of [`monotonic_ns`]; returns at once when it is past.
pub fn sleep_until(instant_ns: u64) {
    let until = TimeSpec::from(Duration::from_nanos(instant_ns));
    while clock_nanosleep(
        ClockId::CLOCK_MONOTONIC,
        ClockNanosleepFlags::TIMER_ABSTIME,
        &until,
    ) == Err(Errno::EINTR)
    {}
}

/// A duration as whole nanoseconds; more than 584 years is the largest number.
#[must_use]
pub fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
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
