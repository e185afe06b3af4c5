//! The exit codes of `cube-bench` and `cube-verify`, and the signals that interrupt them.

use std::{
    io,
    process::ExitCode,
    sync::{Arc, atomic::AtomicBool},
};

use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};

/// Exit status of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Everything succeeded and every gate passed.
    Pass,
    /// A bug in this program, or an error that stopped a run.
    Bug,
    /// The command line, the scenario or a recorded run is invalid.
    Usage,
    /// A gate failed, or a required feature does not work.
    GateFailed,
    /// An attempt to break isolation or confinement succeeded, denied traffic passed, or clones share state that they
    /// must not share.
    Breach,
    /// No gate failed, but the result of a gate or a comparison is inconclusive, or a case is not proven.
    Inconclusive,
    /// The host lacks something that the command needs, or a file cannot be read or written.
    UnsuitableHost,
    /// The server or an artifact is missing, or all creates failed.
    TargetUnreachable,
    /// SIGINT or SIGTERM. Partial results are kept.
    Interrupted,
}

impl End {
    /// The exit code.
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

/// Installs handlers for SIGINT and SIGTERM. The first signal sets the returned flag; the second terminates the
/// process.
///
/// # Errors
/// Returns the error of the system call if a handler cannot be installed.
pub fn watch_signals() -> io::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        flag::register_conditional_default(signal, Arc::clone(&flag))?;
        flag::register(signal, Arc::clone(&flag))?;
    }
    Ok(flag)
}
