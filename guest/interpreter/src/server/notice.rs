//! Messages from contexts to connections other than the one whose request is being handled.

use transport::Key;

/// Notices that are not yet delivered, and the connections that they are for.
pub(super) type Notices = Vec<(Key, Notice)>;

/// A message for a connection.
pub(super) enum Notice {
    /// The host ended while it ran the connection's cell, or the context was removed.
    HostDied,
    /// Another client has restarted the context.
    Restarted,
    /// No host can be started for the connection's cell.
    NoHost(String),
    /// The context that the connection waits for is ready; this is its response.
    Ready(Vec<u8>),
    /// The context that the connection waits for will not be ready.
    NotReady(String),
}
