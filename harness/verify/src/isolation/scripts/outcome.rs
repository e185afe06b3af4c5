//! The errors that stop a script.

use std::io;

use crate::sandbox::SandboxError;

/// A script could not run to its end.
#[derive(Debug, thiserror::Error)]
pub(super) enum ScriptError {
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error("cannot use a socket, a process or the packet capture")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Failed(String),
}
