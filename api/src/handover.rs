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
//! The descriptors are the listening sockets, the internal socket, and the lock of the state directory. They have an
//! owner at every moment, so clients wait in a backlog and no other server gets in between.
//!
//! Until `serving`, the old process can go on: it kills the new one and opens its pool again. If the old process dies
//! before `given`, the new one exits; if it dies later, the new one serves. The next start recovers the sandboxes if both
//! die.
//!
//! The processes may be of different builds. The variable [`VARIABLE`] names the version of the protocol that the old one
//! speaks; a build that does not support it exits with an error, and one that ignores it fails to take the lock.

mod channel;
mod predecessor;
mod successor;

pub use channel::{Given, Role};
pub use predecessor::Predecessor;
pub use successor::{Successor, program};

use std::io;

/// Environment variable of a new process: the version of the protocol on its standard input.
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
    /// The new process ended without a reason. Contains its exit status.
    #[error(
        "the new server process ended ({0}) before it served: the log of the server has its messages"
    )]
    Ended(String),
    #[error("the new server process did not answer within {0} s")]
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
    /// The old process ended before it handed anything over.
    #[error("the old server process ended during the handover")]
    Abandoned,
    #[error("the connection between the old and the new server process failed")]
    Channel(#[source] io::Error),
}
