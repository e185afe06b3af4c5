//! How a command fails. One enum, one match.

/// Every bad end a command can have.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    /// This program did what it should never do.
    #[error("{0}")]
    Bug(String),
    /// The command line is wrong, or asks for what is not there.
    #[error("{0}")]
    Usage(String),
    /// The host cannot run this: files, addresses, KVM.
    #[error("{0}")]
    UnsuitableHost(String),
    /// No server answers.
    #[error("{0}")]
    TargetUnreachable(String),
}

impl Failure {
    /// The number that scripts see.
    pub(super) fn code(&self) -> u8 {
        match self {
            Self::Bug(_) => 1,
            Self::Usage(_) => 2,
            Self::UnsuitableHost(_) => 6,
            Self::TargetUnreachable(_) => 7,
        }
    }
}
