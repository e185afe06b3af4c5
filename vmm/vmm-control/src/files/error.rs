//! Errors of opening and creating the files of a VM.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::FailureKind;

/// Reasons why the files of a VM could not be opened or made.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    #[error("cannot open /dev/kvm (is KVM enabled, and may this user open it?)")]
    Kvm(#[source] io::Error),
    #[error("cannot use the network descriptor as a TAP")]
    Tap(#[source] io::Error),
    #[error("cannot {verb} {path}")]
    File {
        /// `open`, `create`, …
        verb: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{0} already exists")]
    Exists(PathBuf),
    /// The manifest of a snapshot differs from the VM's [`super::Lineage`]. The VMM is broken or compromised.
    #[error("{path} does not match its VM: it names a different root image, base or size")]
    Lineage { path: PathBuf },
}

impl FilesError {
    /// The kind of failure, on which a caller can act.
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
