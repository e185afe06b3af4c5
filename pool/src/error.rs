//! Errors of the pool.

use std::time::Duration;

use model::SandboxId;

use crate::{slot::Refusal, spec::MAX_NOTE};

/// Errors of the pool; each variant is something that a caller can act on.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// Nothing of this name.
    #[error("there is no template {0:?}")]
    NoTemplate(String),
    /// The sandbox's state does not allow the request.
    #[error("sandbox {0} {1}")]
    Refused(SandboxId, Refusal),
    /// The note has this many bytes.
    #[error("the note has {0} bytes; at most {MAX_NOTE} are kept")]
    NoteTooLong(usize),
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
    /// [`crate::Pool::drain`] or [`crate::Pool::close`] was called.
    #[error("the server is stopping and starts no new sandboxes")]
    Draining,
}

impl PoolError {
    pub(crate) fn not_found(id: &SandboxId) -> Self {
        Self::Refused(id.clone(), Refusal::NotFound)
    }

    /// Whether the sandbox is unknown or has ended.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused(_, Refusal::NotFound))
    }
}
