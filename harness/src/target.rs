//! What a run starts, behind one trait: the VMM's control socket, processes on the host, the tests' fake.

pub mod e2b;
pub mod forks;
pub(crate) mod group;
pub mod host_process;
pub mod vmm_direct;

use model::Timeline;

use crate::{
    event::{Failure, FailureCause, StartKind},
    scenario::ExecSpec,
};

/// Which clone of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CloneId {
    /// Position of its round in the plan.
    pub round: u32,
    /// Position in its round.
    pub arrival: u32,
}

impl std::fmt::Display for CloneId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.round, self.arrival)
    }
}

/// Something that starts sandboxes. Used from many threads at once.
pub trait Target: Sync {
    /// Starts one and waits until the create is answered. Stamps go into `timeline` as they become
    /// known, also when the start fails halfway.
    ///
    /// # Errors
    /// The step that failed. Nothing of the sandbox is left then.
    fn create(&self, id: CloneId, timeline: &mut Timeline) -> Result<Box<dyn Sandbox>, Failure>;

    /// Puts the host's page cache into the state that the next round wants.
    ///
    /// # Errors
    /// The template cannot be read.
    fn prepare_cache(&self, wanted: PageCache) -> std::io::Result<()>;

    /// Waits until all that the target keeps ready is ready again.
    ///
    /// # Errors
    /// It does not get ready.
    fn await_ready(&self) -> std::io::Result<()> {
        Ok(())
    }

    /// Makes what the clones of one round share. What the round before shared is gone then.
    ///
    /// # Errors
    /// It cannot be made.
    fn begin_round(&self) -> Result<(), Failure> {
        Ok(())
    }
}

/// State of the page cache for the template's memory file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageCache {
    /// The kernel was asked to drop it.
    Dropped,
    /// The whole file was read once.
    ReadAhead,
}

/// A started sandbox. Dropping it kills it.
pub trait Sandbox: Send {
    /// Runs a command or a cell and waits for its end.
    ///
    /// # Errors
    /// The command could not be run; what it said is not judged here.
    fn exec(&mut self, command: &ExecSpec) -> Result<Output, Failure>;

    /// Makes a file of root's of these bytes.
    ///
    /// # Errors
    /// It cannot be made, or there are none here.
    fn write_file(&mut self, path: &str, bytes: &[u8]) -> Result<(), Failure>;

    /// Replaces what it may reach by these options, as E2B has them, and waits for the answer.
    ///
    /// # Errors
    /// It was refused, or there are no policies here.
    fn set_network(&mut self, options: &serde_json::Value) -> Result<(), Failure>;

    /// The process whose memory is the sandbox's; `None` if there is none on this host.
    fn pid(&self) -> Option<u32>;

    /// How the target came by it; `None` where it does not tell.
    fn start_kind(&self) -> Option<StartKind> {
        None
    }

    /// Kills it and removes its files.
    ///
    /// # Errors
    /// Something is left; the message says what.
    fn kill(self: Box<Self>) -> Result<(), Failure>;
}

/// What a command said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// Exit status; absent when a signal ended it.
    pub status: Option<i32>,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
}

/// Runs a command and compares its answer.
///
/// # Errors
/// It could not be run, or its status or output is not what the scenario expects.
pub fn exec_and_compare(sandbox: &mut dyn Sandbox, command: &ExecSpec) -> Result<(), Failure> {
    let output = exec_checked(sandbox, command)?;
    if output.stdout == command.expect_stdout.as_bytes() {
        Ok(())
    } else {
        Err(wrong_output(command, &output))
    }
}

/// Runs a command whose output may be anything.
///
/// # Errors
/// It could not be run, or its status is not 0.
pub fn exec_checked(sandbox: &mut dyn Sandbox, command: &ExecSpec) -> Result<Output, Failure> {
    let output = sandbox.exec(command)?;
    match output.status {
        Some(0) => Ok(output),
        _ => Err(wrong_output(command, &output)),
    }
}

fn wrong_output(command: &ExecSpec, output: &Output) -> Failure {
    Failure {
        cause: FailureCause::WrongOutput,
        message: format!(
            "{} ended with status {:?}, stdout {:?}, stderr {:?}; expected status 0, stdout {:?}",
            command.describe(),
            output.status,
            shorten(&output.stdout),
            shorten(&output.stderr),
            command.expect_stdout,
        ),
    }
}

/// The first 200 bytes of an output, for messages.
fn shorten(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(200)]).into_owned()
}
