//! Errors of reading and writing templates.

use std::{
    io,
    path::{Path, PathBuf},
};

use model::{Platform, TEMPLATE_FORMAT};
use vmm_control::files;

use crate::extents::ExtentsError;

/// Reasons why a template was rejected or could not be written.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error("cannot {verb} {path}")]
    File {
        /// `read`, `write`, …
        verb: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path} is not a valid template manifest")]
    Manifest {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error(
        "template has format {found}, but this program reads {TEMPLATE_FORMAT}: make the template again"
    )]
    Format { found: u32 },
    #[error(
        "template is for platform {}, but this host runs {}: make the template again on this host",
        found.name(),
        host.name()
    )]
    Platform {
        /// Platform of the template.
        found: Platform,
        /// Platform of the host.
        host: Platform,
    },
    #[error("{0} is not a VM state file")]
    Magic(PathBuf),
    /// A length or hash differs from the recorded one.
    #[error("{path} is damaged: {what}")]
    Damaged { path: PathBuf, what: String },
    /// The files of a template to verify cannot be opened.
    #[error(transparent)]
    Open(#[from] files::FilesError),
    #[error("cannot use {base}, the base of the diff {diff}")]
    Base {
        diff: PathBuf,
        base: PathBuf,
        #[source]
        source: Box<SnapshotError>,
    },
    #[error(
        "{base} is not the template that the diff {diff} was made from: the SHA-256 of its manifest differs"
    )]
    OtherBase { diff: PathBuf, base: PathBuf },
    #[error("memory or layer is too scattered for a diff: take a full snapshot")]
    Scattered(#[source] ExtentsError),
    /// Only after a bug.
    #[error("cannot encode the state")]
    Encode(#[source] postcard::Error),
}

impl SnapshotError {
    #[must_use]
    pub fn is_no_space(&self) -> bool {
        matches!(self, Self::File { source, .. } if source.kind() == io::ErrorKind::StorageFull
            || source.kind() == io::ErrorKind::QuotaExceeded)
    }
}

/// Turns an I/O error into a [`SnapshotError`] with the failed action and the file.
pub fn at(verb: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SnapshotError {
    let path = path.to_owned();
    move |source| SnapshotError::File { verb, path, source }
}

/// The error for a file that the client did not find and therefore omitted.
pub(crate) fn not_there() -> io::Error {
    io::Error::from_raw_os_error(nix::libc::ENOENT)
}

pub(super) fn damaged(path: &Path, what: impl Into<String>) -> SnapshotError {
    SnapshotError::Damaged {
        path: path.to_owned(),
        what: what.into(),
    }
}
