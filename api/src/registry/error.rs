//! Why the registry says no.

use model::SandboxId;
use pool::PoolError;

use super::{lifecycle::Verdict, note::NoteError};

/// Why the registry says no.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// Unknown or ended.
    #[error("sandbox {0} was not found")]
    NotFound(SandboxId),
    /// It is paused already.
    #[error("sandbox {0} is already paused")]
    AlreadyPaused(SandboxId),
    /// It is paused, and this needs a running one.
    #[error("sandbox {0} is paused: connect to it first")]
    NotRunning(SandboxId),
    /// It runs, and this is for paused ones.
    #[error("sandbox {0} is already running")]
    AlreadyRunning(SandboxId),
    /// A cold boot was asked for, and the pause kept memory.
    #[error(
        "sandbox {0} was paused with its memory, and this server resumes such a pause only from memory"
    )]
    ColdBoot(SandboxId),
    /// Too many requests wait for the end of one change.
    #[error("too many requests wait for sandbox {0}")]
    Crowded(SandboxId),
    /// Its last resumes failed, and traffic does not wake it for a while.
    #[error("sandbox {id} did not come back; traffic wakes it again in {rest_s} s")]
    Resting {
        /// Which.
        id: SandboxId,
        /// For so long, in seconds.
        rest_s: u64,
    },
    /// The server stops.
    #[error("the server is stopping and starts no new sandboxes")]
    Draining,
    /// What is to be kept of a sandbox cannot be.
    #[error(transparent)]
    Note(#[from] NoteError),
    /// No random numbers for tokens.
    #[error("no random numbers")]
    Random(#[from] getrandom::Error),
    /// The pool's.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

impl RegistryError {
    /// The refusal that a verdict means; `None` for verdicts that are none.
    pub(super) fn of(verdict: Verdict, id: &SandboxId) -> Option<Self> {
        match verdict {
            Verdict::NotThere => Some(Self::NotFound(id.clone())),
            Verdict::AlreadyPaused => Some(Self::AlreadyPaused(id.clone())),
            Verdict::NotRunning => Some(Self::NotRunning(id.clone())),
            Verdict::Granted | Verdict::Start(_) | Verdict::Wait => None,
        }
    }
}
