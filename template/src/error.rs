//! Errors of template builds.

use std::{fmt, fs, io, path::Path, time::Duration};

use envd::{ClientError, guest_text};
use vmm_control::ControlError;

/// Maximum number of lines of a guest's console in an error.
const LINES: usize = 30;

/// A failed build.
#[derive(Debug, thiserror::Error)]
#[error("cannot build the template: {step} failed")]
pub struct BuildError {
    pub step: Step,
    #[source]
    pub cause: Cause,
    /// The last lines of the guest's console, sanitized. Empty if there was no guest or it printed nothing.
    pub console: Vec<String>,
}

/// The step of a build that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Boot,
    Identity,
    Network,
    Files,
    Setup,
    Start,
    Ready,
    WarmUp,
    Sync,
    Quiet,
    Snapshot,
    Restore,
    FirstWork,
    WorkingSet,
    Record,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Boot => "booting the guest",
            Self::Identity => "the guest's agent",
            Self::Network => "switching the guest's network card",
            Self::Files => "copying files into the guest",
            Self::Setup => "the setup",
            Self::Start => "the start command",
            Self::Ready => "waiting for the guest to be ready",
            Self::WarmUp => "the warm-up",
            Self::Sync => "writing back the guest's files",
            Self::Quiet => "waiting for the guest to be idle",
            Self::Snapshot => "writing the snapshot",
            Self::Restore => "restoring the snapshot",
            Self::FirstWork => "the first work of a clone",
            Self::WorkingSet => "recording the working set",
            Self::Record => "recording the recipe",
        })
    }
}

/// The cause of a failed step. Text from the guest is sanitized.
#[derive(Debug, thiserror::Error)]
pub enum Cause {
    #[error(transparent)]
    Vmm(#[from] ControlError),
    #[error(transparent)]
    Agent(#[from] ClientError),
    #[error("cannot use {path}")]
    File {
        path: String,
        #[source]
        source: io::Error,
    },
    /// The caller has ended the build.
    #[error("the build was stopped")]
    Stopped(#[source] io::Error),
    #[error("the recipe has an empty command")]
    EmptyCommand,
    #[error("{command} failed with {status}: {stderr}")]
    Command {
        command: String,
        status: String,
        stderr: String,
    },
    #[error(
        "{path} at port {port} returned {status} and {answer:?} instead of 200 and {expects:?}"
    )]
    Answer {
        port: u16,
        path: String,
        status: u16,
        answer: String,
        expects: String,
    },
    #[error("the guest was not ready within {limit:?}")]
    NotReady {
        limit: Duration,
        /// Cause of the last failed attempt.
        #[source]
        last: Box<Cause>,
    },
}

impl Cause {
    pub(crate) fn file(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        move |source| Self::File {
            path: path.display().to_string(),
            source,
        }
    }
}

/// The last lines of a console file. None if it cannot be read.
pub(crate) fn last_lines(console: &Path) -> Vec<String> {
    let bytes = fs::read(console).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<_> = text.lines().map(guest_text).collect();
    lines[lines.len().saturating_sub(LINES)..].to_vec()
}
