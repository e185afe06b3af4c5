//! Hands a running server over to a new process of the same or another build.
//!
//! ```text
//!   old process                                     new process
//!   starts the program on disk ───────────────────► checks options, certificate, keys
//!                              ◄──────── prepared ─
//!   requests wait, changes finish, pool closes
//!            ─ given, with descriptors ───────────► opens network and pool, accepts
//!                              ◄───────── serving ─
//!   forwards and finishes its connections
//! ```
//! The descriptors are the listening sockets, the internal socket, and the lock of the state directory. They always
//! have an owner, so clients wait in a backlog and no other server can take over in between.
//!
//! Until `serving`, the old process can take control back: it kills the new one and opens its pool again. If the old
//! process dies before `given`, the new one exits. If it dies later, the new one serves. If both die, the next start
//! recovers the sandboxes.
//!
//! The processes may run different builds. The variable [`VARIABLE`] contains the protocol version of the old one. A
//! build that does not support it exits with an error, and one that ignores it fails to take the lock.

mod channel;
mod predecessor;
mod successor;

pub use channel::{Given, Role};
pub use predecessor::Predecessor;
pub use successor::{Successor, program};

use std::io;

/// Environment variable of a new process: the protocol version on its standard input.
pub const VARIABLE: &str = "CUBE_HANDOVER";
/// Version of the protocol.
const VERSION: u32 = 1;

/// Why a handover failed.
#[derive(Debug, thiserror::Error)]
pub enum HandoverError {
    #[error("cannot start {program}")]
    Start {
        program: String,
        #[source]
        source: io::Error,
    },
    /// The new process cannot serve, for this reason.
    #[error("the new server process failed: {0}")]
    Failed(String),
    /// The new process exited without reporting a reason. Contains its exit status.
    #[error(
        "the new server process exited ({0}) before it served: see its messages in the server's log"
    )]
    Ended(String),
    #[error("the new server process did not respond within {0} s")]
    Late(u64),
    #[error("changes of sandboxes did not finish within {0} s: try again")]
    Busy(u64),
    #[error("the server is stopping")]
    Stopping,
    #[error("unexpected message in a handover: {0:?}")]
    Protocol(String),
    #[error(
        "this program does not support version {0} of the handover: start it after the old server has stopped"
    )]
    Version(String),
    /// The old process exited before it handed anything over.
    #[error("the old server process exited during the handover")]
    Abandoned,
    #[error("the connection between the old and the new server process failed")]
    Channel(#[source] io::Error),
}
