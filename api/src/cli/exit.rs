//! Failures of commands, and the exit code of each.

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    /// A bug in this program.
    #[error("{0}")]
    Bug(String),
    /// The command line is wrong, or refers to an object that does not exist.
    #[error("{0}")]
    Usage(String),
    /// The host lacks something that the command needs, for example a file, an address or KVM.
    #[error("{0}")]
    UnsuitableHost(String),
    #[error("{0}")]
    TargetUnreachable(String),
}

impl Failure {
    pub(super) fn code(&self) -> u8 {
        match self {
            Self::Bug(_) => 1,
            Self::Usage(_) => 2,
            Self::UnsuitableHost(_) => 6,
            Self::TargetUnreachable(_) => 7,
        }
    }
}
