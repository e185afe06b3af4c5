//! Timeouts of probes and events, and the echo server that controls use.

use std::time::Duration;

/// How long the probe waits for an answer that must not come.
pub(super) const BLOCKED_MS: u64 = 1200;
/// How long an answer that must come may take on a busy host.
pub(super) const PASS_MS: u64 = 20_000;
/// How long events may take. The server reports them in the second after the packet.
pub(super) const EVENT_TIMEOUT: Duration = Duration::from_secs(8);
/// An echo server outside that the neighbour's policy allows.
pub(super) const ECHO: &str = "198.51.100.20:5000";
