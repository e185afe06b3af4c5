//! Limits on the resources that clients can hold. Each applies to one server process; together they bound the server's
//! memory.

use std::time::Duration;

use super::peer::TrustedProxies;
pub use crate::proxy::head::{MAX_FIELDS as FIELDS, MAX_SIZE as HEAD};

/// Connections of all peers together.
pub const CONNECTIONS: usize = 8192;
/// Connections of one peer: an IPv4 address, or an IPv6 /64 network. All clients on 127.0.0.1 are one peer. For a
/// trusted proxy, this limits each client's in-flight requests instead.
pub const CONNECTIONS_OF_PEER: usize = 4096;
/// Concurrent streams of one HTTP/2 connection.
pub const STREAMS: u32 = 256;
/// Maximum duration of a TLS handshake.
pub const HANDSHAKE: Duration = Duration::from_secs(10);
/// Maximum time from the first byte of a request head to its last. For the first head of a connection, the time starts
/// when the TLS handshake completes or, without TLS, when the connection is accepted.
pub const HEAD_READ: Duration = Duration::from_secs(15);
/// Maximum idle time between requests of one connection. The SDKs keep pooled connections for up to five minutes, and a
/// request fails if the server closes its connection first.
pub const IDLE: Duration = Duration::from_secs(330);
/// Maximum pause between two pieces of a request body that has a `Content-Length` or is for the control plane.
pub const BODY_PAUSE: Duration = Duration::from_secs(60);
/// Maximum time for which a write may wait because the client accepts no data.
pub const WRITE_PAUSE: Duration = Duration::from_secs(900);
/// Time that in-flight requests have to complete when the server stops. Then the remaining connections are closed.
pub const DRAIN: Duration = Duration::from_secs(30);

/// The limits in force. The fields correspond to the constants of this module; tests use smaller values.
#[derive(Clone, Debug)]
pub struct Limits {
    pub connections: usize,
    pub connections_of_peer: usize,
    pub handshake: Duration,
    pub head_read: Duration,
    pub idle: Duration,
    pub body_pause: Duration,
    pub write_pause: Duration,
    pub drain: Duration,
    pub trusted_proxies: TrustedProxies,
}

impl Limits {
    /// Limits for a process that can open `files` files. Each connection may need a second descriptor for its sandbox.
    #[must_use]
    pub fn within(files: u64) -> Self {
        let half = usize::try_from(files / 2).unwrap_or(usize::MAX);
        let connections = CONNECTIONS.min(half);
        Self {
            connections,
            connections_of_peer: CONNECTIONS_OF_PEER.min(connections / 2),
            ..Self::default()
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: CONNECTIONS,
            connections_of_peer: CONNECTIONS_OF_PEER,
            handshake: HANDSHAKE,
            head_read: HEAD_READ,
            idle: IDLE,
            body_pause: BODY_PAUSE,
            write_pause: WRITE_PAUSE,
            drain: DRAIN,
            trusted_proxies: TrustedProxies::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_limits_follow_the_file_limit_and_leave_room_for_other_peers() {
        for (files, in_all, of_peer) in [(20_000, 8192, 4096), (4096, 2048, 1024), (64, 32, 16)] {
            let limits = Limits::within(files);
            assert_eq!(limits.connections, in_all);
            assert_eq!(limits.connections_of_peer, of_peer);
        }
    }
}
