//! Timeouts of probes and events, and the echo server that controls use.

use std::time::Duration;

/// Time for which the probe waits for a response that must not come.
pub(super) const BLOCKED_MS: u64 = 1200;
/// Timeout of a response that must come, long enough for a busy host.
pub(super) const PASS_MS: u64 = 20_000;
/// Time limit for events. The server reports an event within a second of the packet.
pub(super) const EVENT_TIMEOUT: Duration = Duration::from_secs(8);
/// An echo server outside that the neighbour's policy allows.
pub(super) const ECHO: &str = "198.51.100.20:5000";
