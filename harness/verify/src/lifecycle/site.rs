//! The interface to the tested server. The suite uses it through [`super::e2b`]; the tests of the judge use a
//! stand-in with faults.

use std::collections::BTreeMap;

use serde::Serialize;

use super::plan::{Action, AtDeadline};

/// State of a sandbox according to responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Seen {
    Running,
    Paused,
    Absent,
}

/// A response that the model can also give.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reply {
    Done,
    /// 0: no value has been written yet, or a cold boot has ended the process that held it.
    Value(u32),
    State(Seen),
    WasRunning,
    Resumed,
    NotFound,
    Conflict,
}

/// Why a request has no such response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Miss {
    NotFound,
    Conflict,
    /// The server rejected the request for lack of memory, disk space or rate limit, without an effect.
    Busy(String),
    /// The server did not accept the connection.
    NotSent(String),
    /// The request failed. Whether it took effect is unknown.
    Failed(String),
    /// The response is successful but invalid.
    Wrong(String),
}

/// A client's view of a sandbox.
#[derive(Clone, Debug)]
pub(super) struct Guest {
    pub(super) id: String,
    /// Access token for the agent; `None`: not required.
    pub(super) token: Option<String>,
}

/// A server with sandboxes, and the means to kill it.
pub(super) trait Site: Sync {
    fn create(&self, from: Option<&str>, at_deadline: AtDeadline) -> Result<Guest, Miss>;
    fn fork(&self, of: &Guest) -> Result<Guest, Miss>;
    /// Returns the id of the snapshot.
    fn snapshot(&self, of: &Guest) -> Result<String, Miss>;
    fn remove_snapshot(&self, id: &str) -> Result<(), Miss>;
    /// Tries to delete the installed template, which the server must refuse. Only on a server that the suite
    /// started.
    fn keeps_template(&self) -> Result<(), String>;
    /// Performs any action except [`Action::Deadline`] and [`Action::KillVmm`]. `Expire` only sets the deadline.
    fn act(&self, on: &Guest, action: Action) -> Result<Reply, Miss>;
    /// Whether the deadline of a sandbox is near. Also true if that is unknown.
    fn ends_soon(&self, of: &Guest) -> bool;
    /// The sandboxes of this run that are running or paused, by id.
    fn list(&self) -> Result<BTreeMap<String, Seen>, Miss>;
    /// Kills the server, restarts it, and returns when it responds.
    fn kill_server(&self, twice: bool) -> Result<(), String>;
    /// Kills the sandbox's VMM with SIGKILL, and returns when responses about the sandbox reflect it. `None`: it
    /// has no VMM.
    fn kill_vmm(&self, of: &Guest) -> Option<Result<(), String>>;
    /// Leftovers of these ended sandboxes and snapshots, one line each.
    fn leaks(&self, sandboxes: &[&str], snapshots: &[&str]) -> Vec<String>;
}
