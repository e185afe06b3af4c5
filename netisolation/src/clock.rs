//! CLOCK_MONOTONIC, which the programs' times are of.

use std::time::{Duration, SystemTime};

use nix::time::{ClockId, clock_gettime};

/// Nanoseconds.
pub(crate) fn monotonic() -> u64 {
    // The clock exists on every Linux; without it all answers of the resolver would have expired.
    clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map(|time| nanoseconds(Duration::from(time)))
        .unwrap_or(u64::MAX)
}

/// As the programs count it; what does not fit is for ever.
pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The wall clock's time of a moment.
pub(crate) fn wall_time(moment: u64) -> SystemTime {
    let ago = monotonic().saturating_sub(moment);
    SystemTime::now() - Duration::from_nanos(ago)
}
