//! How a command ends. One enum, one match.

use std::process::ExitCode;

/// Every end a command can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// All gates hold.
    Pass,
    /// This program did what it should never do.
    Bug,
    /// The command line or the scenario is wrong.
    Usage,
    /// A gate does not hold.
    GateFailed,
    /// A sandbox reached what it must not reach.
    Breach,
    /// No gate failed, but one could not be judged.
    Inconclusive,
    /// The host cannot run this.
    UnsuitableHost,
    /// What is to be measured is not there, or not one create was answered.
    TargetUnreachable,
    /// SIGINT or SIGTERM; partial results are kept.
    Interrupted,
}

impl End {
    /// The number that scripts see.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Pass => 0,
            Self::Bug => 1,
            Self::Usage => 2,
            Self::GateFailed => 3,
            Self::Breach => 4,
            Self::Inconclusive => 5,
            Self::UnsuitableHost => 6,
            Self::TargetUnreachable => 7,
            Self::Interrupted => 130,
        }
    }
}

impl From<End> for ExitCode {
    fn from(end: End) -> Self {
        Self::from(end.code())
    }
}
