//! Targets: the interfaces through which a run starts sandboxes or host processes, behind the trait [`Target`].

pub mod adapter;
pub mod e2b;
pub mod forks;
pub(crate) mod group;
pub mod host_process;
pub mod mix;
pub mod nodes;
pub mod null;
pub mod vmm_direct;

use model::Timeline;

use crate::{
    account::PoolMemory,
    event::{Failure, FailureCause, StartKind},
    scenario::ExecSpec,
};

/// Identifies a clone within a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CloneId {
    /// Position of the round in the plan.
    pub round: u32,
    /// Position in the round.
    pub arrival: u32,
}

impl std::fmt::Display for CloneId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.round, self.arrival)
    }
}

/// Starts sandboxes. Called from many threads at the same time.
pub trait Target: Sync {
    /// Starts a sandbox and waits until the create returns. Stamps are written to `timeline` after each step, so
    /// they are kept if a later step fails.
    ///
    /// # Errors
    /// Returns an error that names the failed step. A clone of `vmm-direct` has then been removed. A server may
    /// have created a sandbox despite the failure, and removes it at the end of its lifetime.
    fn create(&self, id: CloneId, timeline: &mut Timeline) -> Result<Box<dyn Sandbox>, Failure>;

    /// Reads the template's memory file into the page cache or drops it from the cache. Targets that do not restore the
    /// template themselves do nothing.
    ///
    /// # Errors
    /// Returns an error if the memory file of the template cannot be read or dropped.
    fn prepare_cache(&self, wanted: PageCache) -> std::io::Result<()>;

    /// Waits until the warm pool of the target is full, and nothing is being filled or removed.
    ///
    /// # Errors
    /// Returns an error if this takes more than a minute, or if the state of the pool cannot be read.
    fn await_ready(&self) -> std::io::Result<()> {
        Ok(())
    }

    /// CPU time in nanoseconds that the processes of the target have used so far, including processes that have
    /// ended. `None` if it cannot be read.
    fn cpu_ns(&self) -> Option<u64> {
        None
    }

    /// Number of warm slots and memory of the pool; `None` for targets without a pool on this host.
    fn pool(&self) -> Option<Pool> {
        None
    }

    /// Prepares the state that the clones of one round share, and drops the state of the previous round.
    ///
    /// # Errors
    /// Returns an error that names the failed step.
    fn begin_round(&self) -> Result<(), Failure> {
        Ok(())
    }

    /// Version and platform for reports, determined when the target was prepared.
    fn about(&self) -> About {
        About::default()
    }
}

/// A target that is missing on this host. Every create fails with the reason.
#[derive(Clone, Debug)]
pub struct Absent(pub String);

impl Target for Absent {
    fn create(&self, _: CloneId, _: &mut Timeline) -> Result<Box<dyn Sandbox>, Failure> {
        Err(Failure {
            cause: FailureCause::Create,
            message: self.0.clone(),
        })
    }

    fn prepare_cache(&self, _: PageCache) -> std::io::Result<()> {
        Ok(())
    }
}

/// Self-description of a target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct About {
    /// Version of the program behind the target; `None` if it reports none.
    pub version: Option<String>,
    /// Isolation of a sandbox from the host, in a few words; `None` if unknown.
    pub platform: Option<String>,
}

impl About {
    /// Version and platform in one line; `None` without either.
    #[must_use]
    pub fn describe(&self) -> Option<String> {
        let parts = [self.version.as_deref(), self.platform.as_deref()];
        let parts: Vec<&str> = parts.into_iter().flatten().collect();
        (!parts.is_empty()).then(|| parts.join(", "))
    }
}

/// State of the pool of a server on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Sandboxes that are ready.
    pub warm: u32,
    /// Sandboxes that are becoming ready.
    pub filling: u32,
    /// `None` if it cannot be read.
    pub memory: Option<PoolMemory>,
}

/// State of the page cache with respect to the memory file of the template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageCache {
    /// The kernel was requested to drop the file.
    Dropped,
    /// The whole file has been read.
    ReadAhead,
}

/// A started sandbox. Dropping it kills it.
pub trait Sandbox: Send {
    /// Runs a command or a cell and waits until it ends.
    ///
    /// # Errors
    /// Returns an error if the command could not be run or exceeded its timeout. A status other than 0 is not an error.
    fn exec(&mut self, command: &ExecSpec) -> Result<Output, Failure>;

    /// Writes a file that is owned by root.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written, or if the target has no files (host processes).
    fn write_file(&mut self, path: &str, bytes: &[u8]) -> Result<(), Failure>;

    /// Replaces the network policy. `options` is the body of E2B's `PUT /sandboxes/{id}/network`.
    ///
    /// # Errors
    /// Returns an error if the policy was rejected, or if the target has no policies.
    fn set_network(&mut self, options: &serde_json::Value) -> Result<(), Failure>;

    /// Process id of the VMM; `None` if there is no such process or it is not found on this host.
    fn pid(&self) -> Option<u32>;

    /// Origin of the sandbox; `None` if the target does not report it.
    fn start_kind(&self) -> Option<StartKind> {
        None
    }

    /// Kills the sandbox and removes its files.
    ///
    /// # Errors
    /// Returns an error that names the sandbox or its directory if the sandbox cannot be killed or its files cannot be
    /// removed.
    fn kill(self: Box<Self>) -> Result<(), Failure>;
}

/// Result of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// Exit status; `None` if a signal ended the command, or a cell raised an exception.
    pub status: Option<i32>,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
}

/// Runs a command and compares its standard output with the expected one.
///
/// # Errors
/// Returns an error if the command could not be run, or if its status or output differs from the expected one.
pub fn exec_and_compare(sandbox: &mut dyn Sandbox, command: &ExecSpec) -> Result<(), Failure> {
    let output = exec_checked(sandbox, command)?;
    if output.stdout == command.expect_stdout.as_bytes() {
        Ok(())
    } else {
        Err(wrong_output(command, &output))
    }
}

/// Runs a command and accepts any output.
///
/// # Errors
/// Returns an error if the command could not be run, or if its status is not 0.
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
