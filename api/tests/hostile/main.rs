//! Tests the real server with guests that are hostile from their first byte on. The stand-in for `cube-vmm` and the
//! agent (`examples/hostile-guest`) sends endless data, stays silent, stops halfway, breaks the framing, or answers
//! before it is asked. The tests check the effects on others: the server's memory, its log, its capacity for starts,
//! and the latency of neighbours compared with a quiet server.
//!
//! Needs neither KVM nor privileges.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod control_plane;
mod data_plane;
#[path = "../server/http.rs"]
#[expect(
    dead_code,
    reason = "shared with the tests of real VMs, which need more of it"
)]
mod http;
mod memory;
mod server;
mod starts;
