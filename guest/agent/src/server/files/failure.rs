//! Failures of requests for files.

use std::{io, path::Path};

use transport::Refusal;

/// A failed request: HTTP status and message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{status}: {message}")]
pub(crate) struct FileError {
    pub(crate) status: u16,
    pub(crate) message: String,
}

impl From<FileError> for Refusal {
    fn from(error: FileError) -> Self {
        Self {
            status: error.status,
            message: error.message,
        }
    }
}

impl FileError {
    pub(crate) fn new(status: u16, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
        }
    }

    /// The failure of an operation on `path`.
    pub(super) fn of(path: &Path, error: &io::Error) -> Self {
        let path = path.display();
        match error.kind() {
            io::ErrorKind::NotFound => Self::new(404, format!("path '{path}' does not exist")),
            io::ErrorKind::IsADirectory => Self::new(400, format!("path '{path}' is a directory")),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::new(507, format!("not enough disk space available for '{path}'"))
            }
            io::ErrorKind::NotADirectory
            | io::ErrorKind::InvalidFilename
            | io::ErrorKind::InvalidInput
            | io::ErrorKind::ReadOnlyFilesystem => {
                Self::new(400, format!("path '{path}': {error}"))
            }
            _ => Self::new(500, format!("path '{path}': {error}")),
        }
    }
}
