//! Errors of the pool.

use std::{io, time::Duration};

use library::error::LibraryError;
use model::SandboxId;

use crate::{sandbox::MAX_NOTE, slot::Refusal};

/// Errors of the pool. Callers can act on each variant.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    #[error("there is no template {0:?}")]
    NoTemplate(String),
    /// The sandbox's state does not allow the request.
    #[error("sandbox {0} {1}")]
    Refused(SandboxId, Refusal),
    /// The note has this many bytes.
    #[error("the note has {0} bytes; at most {MAX_NOTE} are kept")]
    NoteTooLong(usize),
    /// One more sandbox would exceed the measured memory or the configured number.
    #[error("no room for another sandbox: {why}")]
    Full {
        /// The resource that is short, with numbers.
        why: String,
        retry_after: Duration,
    },
    /// A disk is full or has only its reserve left. Running sandboxes keep running.
    #[error(
        "no space on disk: {0}; delete paused sandboxes and snapshots that are not needed, end running sandboxes, \
         or give the disk more room"
    )]
    NoSpace(String),
    /// The limit of paused sandboxes and snapshots is reached. Running sandboxes keep running.
    #[error(
        "the limit of {0} paused sandboxes and snapshots is reached: resume or delete paused sandboxes, delete \
         snapshots that are not needed, or raise pool.max_saved"
    )]
    TooManySaved(u32),
    /// The quota of templates is used up. Existing templates are never removed to make room.
    #[error(
        "templates and snapshots take {} MiB of {} MiB, and one more may need {} MiB: delete those that are not needed, \
         or raise pool.template_quota",
        taken >> 20, quota >> 20, need.div_ceil(1 << 20)
    )]
    TemplateQuota { taken: u64, need: u64, quota: u64 },
    /// The template, and the template or sandbox that needs it.
    #[error("template {0:?} is in use: {1}")]
    InUse(String, String),
    /// A disk template cannot be made from the files of this template, because they do not contain a complete disk.
    #[error(
        "the disk of template {0:?} is complete only together with its memory: create a sandbox from it and keep that \
         sandbox's disk"
    )]
    NoDisk(String),
    /// The name is malformed, given twice, or reserved by another template.
    #[error("{0}")]
    BadName(String),
    /// An operation on a VM or a file failed.
    #[error("{what}: {why}")]
    Failed {
        /// The operation.
        what: &'static str,
        /// The chain of causes in one line.
        why: String,
    },
    /// Files from another server are not as expected. Fetching them again would not help.
    #[error("{what}: {why}")]
    Unfit { what: &'static str, why: String },
    #[error("the guest agent of {0} did not answer")]
    AgentSilent(SandboxId),
    /// The pool is draining or closed, see [`crate::Pool::drain`] and [`crate::Pool::close`].
    #[error("the server is stopping and starts no new sandboxes")]
    Draining,
}

impl PoolError {
    /// The error of a file operation. `what` is its purpose.
    pub(crate) fn of_disk(what: &'static str, error: &io::Error) -> Self {
        LibraryError::of_disk(what, error).into()
    }

    pub(crate) fn not_found(id: &SandboxId) -> Self {
        Self::Refused(id.clone(), Refusal::NotFound)
    }

    /// Whether the sandbox is unknown or has ended.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused(_, Refusal::NotFound))
    }
}

impl From<LibraryError> for PoolError {
    fn from(error: LibraryError) -> Self {
        match error {
            LibraryError::NoTemplate(reference) => Self::NoTemplate(reference),
            LibraryError::BadName(why) => Self::BadName(why),
            LibraryError::NoSpace(why) => Self::NoSpace(why),
            LibraryError::Failed { what, why } => Self::Failed { what, why },
        }
    }
}
