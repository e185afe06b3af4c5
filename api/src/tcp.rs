//! Settings of TCP connections from clients and between nodes.

use nix::sys::socket::{setsockopt, sockopt};
use tokio::net::TcpStream;

/// TCP keep-alive: first probe after a minute of silence, then one every ten seconds; the sixth lost probe ends the
/// connection.
const PROBE_AFTER_S: u32 = 60;
const PROBE_EVERY_S: u32 = 10;
const PROBES: u32 = 6;

/// Enables TCP keep-alive, so that the kernel detects clients that have disappeared without closing their connection.
pub(crate) fn probe(stream: &TcpStream) -> nix::Result<()> {
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    setsockopt(stream, sockopt::TcpKeepIdle, &PROBE_AFTER_S)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &PROBE_EVERY_S)?;
    setsockopt(stream, sockopt::TcpKeepCount, &PROBES)
}
