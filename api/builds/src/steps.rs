//! The steps of a build: the meaning of their arguments, and their execution in the guest.
//!
//! Order, defaults and error texts are those of E2B's builder (`packages/orchestrator/pkg/template/build/commands` of
//! its infrastructure), with three differences. The value of an ENV step sees the variables of earlier steps. A `PATH`
//! of the image or of an ENV step comes before the one that the login profile sets. COPY merges directories with `mv`,
//! because not every image has GNU tar.

mod copy;
mod env;
mod run;
mod user;
mod workdir;

use std::{path::PathBuf, time::Duration};

use rest::LogLevel;

use super::{
    command::Command,
    guest::{CommandError, Guest},
    log::BuildLog,
    output::Lines,
    plan::{At, Step, StepKind},
    settings::Settings,
};

/// Where a step is executed.
pub(super) struct Place<'a> {
    pub(super) guest: &'a Guest,
    /// Settings after the previous steps.
    pub(super) settings: &'a Settings,
    pub(super) log: &'a BuildLog,
    pub(super) at: At,
    /// `builder 1/2`
    pub(super) prefix: &'a str,
    /// The archive of a COPY. May be missing.
    pub(super) archive: Option<PathBuf>,
    /// Time limit of a RUN.
    pub(super) run_limit: Duration,
}

/// The result of a step.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) settings: Settings,
    pub(super) disk: Disk,
}

/// Whether a step may have changed the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Disk {
    Changed,
    Unchanged,
}

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum StepError {
    /// A sentence for the user.
    #[error("{0}")]
    Failed(String),
    #[error("build was cancelled")]
    Cancelled,
}

impl StepError {
    fn text(text: impl Into<String>) -> Self {
        Self::Failed(text.into())
    }

    /// Wraps the error of a command with its purpose.
    pub(super) fn of(what: impl std::fmt::Display) -> impl FnOnce(CommandError) -> Self {
        move |error| match error {
            CommandError::Cancelled => Self::Cancelled,
            error => Self::Failed(format!("{what}: {error}")),
        }
    }
}

/// Executes a step.
pub(super) async fn perform(step: &Step, place: &Place<'_>) -> Result<Done, StepError> {
    let args: Vec<_> = step.args.iter().map(String::as_str).collect();
    if args.iter().any(|arg| arg.contains('\0')) {
        let name = step.kind.name();
        return Err(StepError::Failed(format!(
            "{name} has an argument with a NUL byte"
        )));
    }
    match step.kind {
        StepKind::Run => run::perform(&args, place).await,
        StepKind::Copy => copy::perform(&args, step.files.as_deref(), place).await,
        StepKind::Env => env::perform(&args, place).await,
        StepKind::Workdir => workdir::perform(&args, place).await,
        StepKind::User => user::perform(&args, place).await,
    }
}

impl Place<'_> {
    /// Runs a command whose output becomes part of the log.
    async fn run(&self, command: &Command, level: LogLevel) -> Result<(), CommandError> {
        self.guest.run(command, self.lines(level)).await
    }

    fn lines(&self, level: LogLevel) -> Lines {
        Lines::new(self.log, level, self.at, self.prefix)
    }

    /// Runs a script as root and returns its standard output, which must be UTF-8. Its standard error becomes part of
    /// the log.
    async fn ask(&self, script: &str, args: &[&str]) -> Result<String, CommandError> {
        let command = Command::of_root(script, args, self.settings);
        let (output, ended) = self.guest.capture(&command).await?;
        self.lines(LogLevel::Info).add_stderr(&output.stderr);
        ended?;
        String::from_utf8(output.stdout)
            .map_err(|_| CommandError::Output("its output is not UTF-8"))
    }
}
