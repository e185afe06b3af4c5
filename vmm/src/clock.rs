//! The host's clocks.

use nix::time::{ClockId, clock_gettime};

fn now(clock: ClockId) -> u64 {
    // Neither clock can fail on Linux; zero would show at once in any report.
    clock_gettime(clock).map_or(0, |t| {
        let (s, ns) = (t.tv_sec().cast_unsigned(), t.tv_nsec().cast_unsigned());
        s * 1_000_000_000 + ns
    })
}

/// CLOCK_MONOTONIC in nanoseconds.
#[must_use]
pub fn monotonic_ns() -> u64 {
    now(ClockId::CLOCK_MONOTONIC)
}

/// CLOCK_REALTIME in nanoseconds since 1970.
#[must_use]
pub fn unix_ns() -> u64 {
    now(ClockId::CLOCK_REALTIME)
}
