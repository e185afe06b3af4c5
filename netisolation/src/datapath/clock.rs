//! CLOCK_MONOTONIC, the clock of the eBPF programs' timestamps.

use std::time::{Duration, SystemTime};

pub(crate) use model::clock::{monotonic_ns, nanoseconds};

/// The wall-clock time of a past reading of CLOCK_MONOTONIC.
pub(crate) fn wall_time(moment_ns: u64) -> SystemTime {
    let ago_ns = monotonic_ns().saturating_sub(moment_ns);
    SystemTime::now() - Duration::from_nanos(ago_ns)
}
