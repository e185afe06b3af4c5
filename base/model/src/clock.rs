//! The host's clocks as plain numbers of nanoseconds.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// The reading of CLOCK_MONOTONIC in nanoseconds: time since the host booted, suspend excluded.
#[must_use]
pub fn monotonic_ns() -> u64 {
    read(ClockId::CLOCK_MONOTONIC)
}

/// The reading of CLOCK_BOOTTIME in nanoseconds: time since the host booted, suspend included.
#[must_use]
pub fn boottime_ns() -> u64 {
    read(ClockId::CLOCK_BOOTTIME)
}

/// The reading of CLOCK_REALTIME in nanoseconds since 1970-01-01T00:00:00Z.
#[must_use]
pub fn unix_ns() -> u64 {
    read(ClockId::CLOCK_REALTIME)
}

/// The reading of CLOCK_REALTIME in whole milliseconds since 1970-01-01T00:00:00Z.
#[must_use]
pub fn unix_ms() -> u64 {
    unix_ns() / 1_000_000
}

/// A duration as whole nanoseconds. Durations above 584 years saturate at `u64::MAX`.
#[must_use]
pub fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn read(clock: ClockId) -> u64 {
    let time = clock_gettime(clock).expect("every Linux has these clocks");
    nanoseconds(Duration::from(time))
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn the_monotonic_clock_advances_with_sleep() {
        let before_ns = monotonic_ns();
        std::thread::sleep(Duration::from_millis(2));
        assert!(monotonic_ns() - before_ns >= 2_000_000);
    }

    #[test]
    fn the_wall_clock_agrees_with_the_standard_library() {
        let since_1970 = || nanoseconds(SystemTime::UNIX_EPOCH.elapsed().unwrap());
        let before_ns = since_1970();
        let now_ns = unix_ns();
        assert!((before_ns..=since_1970()).contains(&now_ns));
    }

    #[test]
    fn durations_above_584_years_saturate() {
        assert_eq!(nanoseconds(Duration::from_micros(3)), 3_000);
        assert_eq!(nanoseconds(Duration::MAX), u64::MAX);
    }
}
