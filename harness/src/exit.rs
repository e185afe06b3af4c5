//! How a command ends. One enum, one match.

use std::process::ExitCode;

use crate::{
    event::EndReason,
    gate::{GateResult, Verdict},
};

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

    /// The end of a run, from how it ended and its gates. Without an end it was killed.
    #[must_use]
    pub fn of_run(ended: Option<&EndReason>, gates: &[GateResult]) -> Self {
        let any = |verdict| gates.iter().any(|gate| gate.verdict == verdict);
        match ended {
            Some(EndReason::Interrupted) | None => Self::Interrupted,
            Some(EndReason::Broken { .. }) => Self::Bug,
            Some(EndReason::Complete | EndReason::MemoryShare) if any(Verdict::Fail) => {
                Self::GateFailed
            }
            Some(EndReason::Complete | EndReason::MemoryShare) if any(Verdict::Inconclusive) => {
                Self::Inconclusive
            }
            Some(EndReason::Complete | EndReason::MemoryShare) => Self::Pass,
        }
    }
}

impl From<End> for ExitCode {
    fn from(end: End) -> Self {
        Self::from(end.code())
    }
}
