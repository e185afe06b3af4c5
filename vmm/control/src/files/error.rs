//! Errors of opening and creating the files of a VM.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::FailureKind;

/// Why the files of a VM could not be opened or made.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// No KVM.
    #[error("cannot open /dev/kvm (is KVM enabled, and may this user open it?)")]
    Kvm(#[source] io::Error),
    /// The network descriptor is no usable TAP.
    #[error("cannot use the network descriptor as a TAP")]
    Tap(#[source] io::Error),
    /// A file.
    #[error("cannot {verb} {path}")]
    File {
        /// `open`, `create`, …
        verb: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The place of a snapshot is taken.
    #[error("{0} exists already")]
    Exists(PathBuf),
    /// A snapshot names files that its VM was not made from, or is of a VM of another size.
    #[error("{path} is not of its VM: another root image, another base, or another size")]
    Lineage {
        /// The manifest.
        path: PathBuf,
    },
}

impl FilesError {
    /// What a caller can act on.
    #[must_use]
    pub fn kind(&self) -> FailureKind {
        match self {
            Self::Kvm(_) => FailureKind::UnsuitableHost,
            Self::Exists(_) => FailureKind::BadSpec,
            Self::Lineage { .. } => FailureKind::BadSnapshot,
            Self::File { source, .. } if is_full(source) => FailureKind::NoSpace,
            Self::File { verb: "open", .. } => FailureKind::BadSpec,
            Self::Tap(_) => FailureKind::BadSpec,
            Self::File { .. } => FailureKind::Io,
        }
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

pub(crate) fn failed(verb: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FilesError {
    let path = path.to_owned();
    move |source| FilesError::File { verb, path, source }
}
