//! Errors of the library.

use std::io;

/// Errors of the library. Callers can act on each variant.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    #[error("there is no template {0:?}")]
    NoTemplate(String),
    /// The name is malformed, given twice, or reserved by another template.
    #[error("{0}")]
    BadName(String),
    /// A disk or a quota is full.
    #[error("no space on disk: {0}")]
    NoSpace(String),
    /// An operation on a file failed.
    #[error("{what}: {why}")]
    Failed {
        /// The operation.
        what: &'static str,
        why: String,
    },
}

impl LibraryError {
    /// The error of a file operation. `what` is its purpose.
    #[must_use]
    pub fn of_disk(what: &'static str, error: &io::Error) -> Self {
        if is_full(error) {
            return Self::NoSpace(format!("{what}: {error}"));
        }
        Self::Failed {
            what,
            why: error.to_string(),
        }
    }
}

/// Whether an operation failed because a disk or a quota is full.
#[must_use]
pub fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_or_quota_is_no_space_and_other_errors_name_the_operation() {
        for errno in [nix::errno::Errno::ENOSPC, nix::errno::Errno::EDQUOT] {
            let error = LibraryError::of_disk("write the sandbox's record", &errno.into());
            assert!(matches!(error, LibraryError::NoSpace(_)), "{error}");
        }
        let error = LibraryError::of_disk("write", &nix::errno::Errno::EROFS.into());
        assert!(
            error.to_string().contains("write: Read-only file system"),
            "{error}"
        );
    }
}
