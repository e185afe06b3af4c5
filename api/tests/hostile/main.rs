//! The real server with guests that are hostile from the first byte on: a stand-in for `cube-vmm` and its guest's agent
//! (`examples/hostile-guest`) that sends without end, says nothing, says half, breaks the framing, answers before it is
//! asked. Asserted is what others would notice: the server's memory, its log, places for starts, and how long the
//! neighbours' requests take beside those of a quiet server.
//!
//! Needs no KVM and no privileges.

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
