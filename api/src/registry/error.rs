//! Errors of the registry.

use pool::PoolError;

use super::note::NoteError;

/// Errors of the registry, most of them the pool's.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// Metadata and options are too long, or a recovered note cannot be read.
    #[error(transparent)]
    Note(#[from] NoteError),
    /// No random bytes are available for a token.
    #[error("no random numbers")]
    Random(#[from] getrandom::Error),
    #[error(transparent)]
    Pool(#[from] PoolError),
}
