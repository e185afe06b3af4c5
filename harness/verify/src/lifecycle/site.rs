//! The interface to what is verified. The suite uses it by [`super::e2b`]; the tests of the judge have a stand-in with
//! faults.

use std::collections::BTreeMap;

use serde::Serialize;

use super::plan::{Action, AtDeadline};

/// The state of a sandbox, as answers tell it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Seen {
    Running,
    Paused,
    Absent,
}

/// An answer that the model can give too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reply {
    Done,
    /// 0: no value was written yet, or a cold boot has ended the process that held it.
    Value(u32),
    State(Seen),
    WasRunning,
    Resumed,
    NotFound,
    Conflict,
}

/// Why a request has no such answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Miss {
    NotFound,
    Conflict,
    /// The server refused it for want of memory, space or rate, without an effect.
    Busy(String),
    /// The server did not accept the connection.
    NotSent(String),
    /// It failed. Whether it had its effect is not known.
    Failed(String),
    /// The answer is successful and makes no sense.
    Wrong(String),
}

/// A sandbox as a client knows it.
#[derive(Clone, Debug)]
pub(super) struct Guest {
    pub(super) id: String,
    /// For the agent; `None`: it needs none.
    pub(super) token: Option<String>,
}

/// A server with sandboxes, and the means of killing it.
pub(super) trait Site: Sync {
    fn create(&self, from: Option<&str>, at_deadline: AtDeadline) -> Result<Guest, Miss>;
    fn fork(&self, of: &Guest) -> Result<Guest, Miss>;
    /// Returns the id of the snapshot.
    fn snapshot(&self, of: &Guest) -> Result<String, Miss>;
    fn remove_snapshot(&self, id: &str) -> Result<(), Miss>;
    /// Tries to delete the installed template, which must be refused. Only on a server that the suite started.
    fn keeps_template(&self) -> Result<(), String>;
    /// Performs any other action but [`Action::Deadline`] and [`Action::KillVmm`]. `Expire` only sets the deadline.
    fn act(&self, on: &Guest, action: Action) -> Result<Reply, Miss>;
    /// Whether the deadline of a sandbox is near. True also if that is not known.
    fn ends_soon(&self, of: &Guest) -> bool;
    /// The sandboxes of this run that are running or paused, by id.
    fn list(&self) -> Result<BTreeMap<String, Seen>, Miss>;
    /// Kills the server, starts it again, and returns when it answers.
    fn kill_server(&self, twice: bool) -> Result<(), String>;
    /// Kills the sandbox's VMM with SIGKILL, and returns when answers about the sandbox take account of it. `None`: it
    /// has no VMM.
    fn kill_vmm(&self, of: &Guest) -> Option<Result<(), String>>;
    /// What is left of these sandboxes and snapshots, all of which have ended, one line each.
    fn leaks(&self, sandboxes: &[&str], snapshots: &[&str]) -> Vec<String>;
}
