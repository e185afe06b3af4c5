//! What a client may take up. Numbers are for one server; memory is bounded by their products.

use std::time::Duration;

/// Connections in all.
pub const CONNECTIONS: usize = 8192;
/// Connections of one peer: an address, or the 64 bits of an IPv6 network. Behind a proxy or on loopback
/// all clients are one peer.
pub const CONNECTIONS_OF_PEER: usize = 4096;
/// Bytes of the head of a request. HTTP/1.1 beyond it is answered with 431.
pub const HEAD: usize = 64 << 10;
/// Fields of a head.
pub const FIELDS: usize = 128;
/// Streams of one HTTP/2 connection at a time.
pub const STREAMS: u32 = 256;
/// Until a TLS handshake is done.
pub const HANDSHAKE: Duration = Duration::from_secs(10);
/// From the first byte of a head to its last.
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
        }
    }
}
