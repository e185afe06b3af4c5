//! Errors of reading and writing templates.

use std::{
    io,
    path::{Path, PathBuf},
};

use model::{Platform, TEMPLATE_FORMAT};
use vmm_control::files;

use crate::extents::ExtentsError;

/// Why a template is refused or could not be written.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// A file cannot be read or written.
    #[error("cannot {verb} {path}")]
    File {
        /// `read`, `write`, …
        verb: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The manifest is not what it should be.
    #[error("{path} is no template manifest")]
    Manifest {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: serde_json::Error,
    },
    /// Another format.
    #[error(
        "template of format {found}, this program reads {TEMPLATE_FORMAT}: make the template again"
    )]
    Format {
        /// What was found.
        found: u32,
    },
    /// Another platform.
    #[error("template of platform {}, this host runs {}: make the template again here", found.name(), host.name())]
    Platform {
        /// The template's.
        found: Platform,
        /// The host's.
        host: Platform,
    },
    /// Not a state file.
    #[error("{0} is not a VM state file")]
    Magic(PathBuf),
    /// Length or sum differ.
    #[error("{path} is damaged: {what}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What differs.
        what: String,
    },
    /// The files of a template to verify cannot be opened.
    #[error(transparent)]
    Open(#[from] files::FilesError),
    /// The base of a diff cannot be used.
    #[error("cannot use {base}, the base of the diff {diff}")]
    Base {
        /// The diff's directory.
        diff: PathBuf,
        /// The base's.
        base: PathBuf,
        /// The cause.
        #[source]
        source: Box<SnapshotError>,
    },
    /// The base of a diff is another template now.
    #[error(
        "{base} is not the template that the diff {diff} was made from: its manifest has another sum"
    )]
    OtherBase {
        /// The diff's directory.
        diff: PathBuf,
        /// The base's.
        base: PathBuf,
    },
    /// Too many scattered pages for a diff.
    #[error("too scattered for a diff, take a full snapshot")]
    Scattered(#[source] ExtentsError),
    /// The state cannot be encoded (a bug).
    #[error("the state cannot be encoded")]
    Encode(#[source] postcard::Error),
}

impl SnapshotError {
    /// Whether a full disk is the cause.
    #[must_use]
    pub fn is_no_space(&self) -> bool {
        matches!(self, Self::File { source, .. } if source.kind() == io::ErrorKind::StorageFull
            || source.kind() == io::ErrorKind::QuotaExceeded)
    }
}

/// Attaches what was done to which file.
pub fn at(verb: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SnapshotError {
    let path = path.to_owned();
    move |source| SnapshotError::File { verb, path, source }
}

/// The client found no such file, and left it out.
pub(crate) fn not_there() -> io::Error {
    io::Error::from_raw_os_error(nix::libc::ENOENT)
}

pub(super) fn damaged(path: &Path, what: impl Into<String>) -> SnapshotError {
    SnapshotError::Damaged {
        path: path.to_owned(),
        what: what.into(),
    }
}
