//! What a client may take up. Numbers are for one server; memory is bounded by their products.

use std::time::Duration;

use super::clients::TrustedProxies;

/// Connections in all.
pub const CONNECTIONS: usize = 8192;
/// Connections of one peer: an address, or the 64 bits of an IPv6 network. On loopback all clients are one peer; a
/// trusted proxy has no such limit, its clients have it, each for their requests under way.
pub const CONNECTIONS_OF_PEER: usize = 4096;
/// Bytes of the head of a request. HTTP/1.1 beyond it is answered with 431.
pub const HEAD: usize = 64 << 10;
/// Fields of a head.
pub const FIELDS: usize = 128;
/// Streams of one HTTP/2 connection at a time.
pub const STREAMS: u32 = 256;
/// Until a TLS handshake is done.
pub const HANDSHAKE: Duration = Duration::from_secs(10);
/// From the first byte of a head to its last; for the first one of a connection, from the moment in which it can be sent.
pub const HEAD_READ: Duration = Duration::from_secs(15);
/// Between requests of one connection. Pools of the SDKs keep connections for up to five minutes, and a
/// server that closes first costs them a failed request.
pub const IDLE: Duration = Duration::from_secs(330);
/// Between two pieces of a request body whose length was announced, or that the control plane reads.
pub const BODY_PAUSE: Duration = Duration::from_secs(60);
/// Until a client that has been written to has taken anything.
pub const WRITE_PAUSE: Duration = Duration::from_secs(900);
/// Until what is under way has ended when the server stops; what has not is cut off.
pub const DRAIN: Duration = Duration::from_secs(30);

/// The limits in force. Tests shrink them.
#[derive(Clone, Debug)]
pub struct Limits {
    /// See [`CONNECTIONS`].
    pub connections: usize,
    /// See [`CONNECTIONS_OF_PEER`].
    pub connections_of_peer: usize,
    /// See [`HANDSHAKE`].
    pub handshake: Duration,
    /// See [`HEAD_READ`].
    pub head_read: Duration,
    /// See [`IDLE`].
    pub idle: Duration,
    /// See [`BODY_PAUSE`].
    pub body_pause: Duration,
    /// See [`WRITE_PAUSE`].
    pub write_pause: Duration,
    /// See [`DRAIN`].
    pub drain: Duration,
    /// Peers that speak for others; see [`TrustedProxies`].
    pub trusted_proxies: TrustedProxies,
}

impl Limits {
    /// As many connections as a process with so many open files can serve: each may take a second file, towards its
    /// sandbox.
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
    fn a_server_with_few_files_serves_fewer_and_one_peer_never_takes_all() {
        for (files, in_all, of_peer) in [(20_000, 8192, 4096), (4096, 2048, 1024), (64, 32, 16)] {
            let limits = Limits::within(files);
            assert_eq!(limits.connections, in_all);
            assert_eq!(limits.connections_of_peer, of_peer);
        }
    }
}
