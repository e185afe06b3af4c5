//! Failures of operations on paths.

use std::{io, path::Path};

use envd::{
    ConnectCode::{FailedPrecondition, Internal, InvalidArgument, NotFound, PermissionDenied},
    ConnectError,
};

/// Converts a failed operation on `path` to the response.
pub(crate) fn explain(path: &Path, failed: &io::Error) -> ConnectError {
    let path = path.display();
    let (code, message) = match failed.kind() {
        io::ErrorKind::NotFound => (NotFound, format!("file not found: '{path}'")),
        io::ErrorKind::NotADirectory => {
            let message = format!("file not found: a component of '{path}' is not a directory");
            (NotFound, message)
        }
        io::ErrorKind::PermissionDenied => (PermissionDenied, format!("'{path}': {failed}")),
        io::ErrorKind::InvalidFilename | io::ErrorKind::InvalidInput => {
            (InvalidArgument, format!("'{path}': {failed}"))
        }
        _ if failed.raw_os_error() == Some(libc::ELOOP) => (
            FailedPrecondition,
            format!("cyclic symlink or too long a chain of links at '{path}'"),
        ),
        _ => (Internal, format!("'{path}': {failed}")),
    };
    ConnectError::new(code, message)
}
