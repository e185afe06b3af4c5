//! Why the pool says no.

use std::time::Duration;

use model::SandboxId;

use crate::SandboxState;

/// Why the pool says no; each variant is something a caller can act on.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// Nothing of this name.
    #[error("there is no template {0:?}")]
    NoTemplate(String),
    /// Nothing of this id, or it has ended.
    #[error("there is no sandbox {0}")]
    NoSandbox(SandboxId),
    /// The sandbox is not in a state in which this can be done.
    #[error("sandbox {id} is {}", state.name())]
    WrongState {
        /// Which.
        id: SandboxId,
        /// What it is instead.
        state: SandboxState,
    },
    /// One more would overcommit the host, by measured memory or by the configured number.
    #[error("no room for another sandbox: {why}")]
    Full {
        /// What is short, with figures.
        why: String,
        /// When to try again.
        retry_after: Duration,
    },
    /// The disk is full, or down to its reserve. What runs goes on.
    #[error(
        "no space on disk: {0}; delete paused sandboxes and snapshots that are not needed, end running sandboxes, \
         or give the disk more room"
    )]
    NoSpace(String),
    /// So many paused sandboxes and snapshots are kept, which is the limit. What runs goes on.
    #[error(
        "the limit of {0} paused sandboxes and snapshots is reached: resume or delete paused sandboxes, delete \
         snapshots that are not needed, or start the server with a larger --max-saved"
    )]
    TooManySaved(u32),
    /// Something builds on it.
    #[error("template {0:?} is in use: {1}")]
    InUse(String, String),
    /// A name that is taken, malformed, or means two things.
    #[error("{0}")]
    BadName(String),
    /// The VM could not be started, restored, snapshotted; the chain of causes in one line.
    #[error("{what}: {why}")]
    Failed {
        /// What was done.
        what: &'static str,
        /// Why it failed.
        why: String,
    },
    /// The guest's agent did not answer in time.
    #[error("the guest agent of {0} did not answer")]
    AgentSilent(SandboxId),
    /// The pool closes.
    #[error("the pool is closing")]
    Closing,
}
