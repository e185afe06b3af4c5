//! A sandbox as callers ask for it and as they see it.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use library::info::TemplateInfo;
use model::{SandboxId, Timeline};
use netisolation::Policy;
use serde::{Deserialize, Serialize};

use crate::{
    claim::Claim,
    lifetime::{Lifetime, UnixMs},
    state::SandboxState,
};

/// Settings that the pool sends to the agent when a sandbox is created and after each resume.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Init {
    /// Environment of each process in the sandbox.
    pub env_vars: BTreeMap<String, String>,
    /// Required in `X-Access-Token`; `None`: the agent is open.
    pub access_token: Option<String>,
}

impl std::fmt::Debug for Init {
    /// Leaves out the token and the values.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Init")
            .field("env_vars", &self.env_vars.len())
            .finish_non_exhaustive()
    }
}

/// Longest note in bytes.
pub const MAX_NOTE: usize = 256 << 10;

/// The fate of sandboxes when the pool closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnClose {
    /// Running sandboxes keep running and paused ones remain on disk. The next [`crate::Pool::open`] adopts both.
    Keep,
    /// All sandboxes are ended and removed, including paused ones.
    Kill,
    /// Running sandboxes are ended. Paused ones remain on disk for the next [`crate::Pool::open`].
    EndRunning,
    /// Like [`OnClose::Keep`], for a process that continues without the pool while the next server runs: it stays in
    /// its cgroup, and so within its memory limit.
    HandOver,
}

/// How a new timeout changes the deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeoutChange {
    /// Replaces the deadline, which may shorten the sandbox's life.
    Replace,
    /// Keeps the current deadline if it is later.
    Extend,
    /// Like [`Self::Extend`], but not beyond `until`, and without effect on the timeout of later resumes.
    Renew { until: UnixMs },
}

/// A new sandbox.
#[derive(Clone, Debug)]
pub struct CreateSpec {
    /// Id, name, `name:tag` or snapshot id.
    pub template: String,
    pub init: Init,
    /// Opaque text of the caller, at most [`MAX_NOTE`] bytes. The pool keeps it in the record and returns it with the
    /// sandbox, even after a restart. It cannot contain the sandbox's id, which is not known yet.
    pub note: String,
    pub lifetime: Lifetime,
    /// The network policy. Ignored for a fork, which gets its source's policy.
    pub policy: Policy,
    pub priority: Priority,
}

/// CPU priority of a sandbox under contention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    /// [`SandboxLimits::cpu_weight`].
    #[default]
    Normal,
    /// A weight of 10, a tenth of a sandbox's default, for work without a waiting user: builds of templates. Such a
    /// sandbox is never served by a warm slot. A fork has its source's priority.
    Background,
}

impl Priority {
    /// Timeout for work that has `normal` as its timeout at normal priority: ten times as long with a tenth of the CPU
    /// time.
    pub(crate) fn patience(self, normal: Duration) -> Duration {
        match self {
            Self::Normal => normal,
            Self::Background => normal * 10,
        }
    }
}

/// A sandbox at the time of the pool's response.
#[derive(Clone, Debug)]
pub struct Sandbox {
    pub id: SandboxId,
    /// The template as it was when the sandbox's first VM was made.
    pub template: Arc<TemplateInfo>,
    pub state: SandboxState,
    pub lifetime: Lifetime,
    /// The text of [`CreateSpec::note`] or of the last [`crate::Pool::set_policy`].
    pub note: Arc<str>,
    /// Unix socket of the vsock device: `CONNECT <port>\n` reaches a vsock port of the guest. Nothing listens on it
    /// while the sandbox is paused.
    pub vsock: PathBuf,
    /// The guest's console, bounded in size.
    pub console: PathBuf,
    /// Process id of the VMM; 0 while the sandbox is paused.
    pub pid: u32,
    /// Timestamps of the last start or resume, in the host's CLOCK_MONOTONIC. Empty for a recovered sandbox.
    pub timeline: Timeline,
    /// Whether a warm slot served the create.
    pub warm: bool,
    /// Number of the sandbox's VM, unique within this server process. When the number changes, connections to the
    /// previous VM are dead.
    pub generation: u64,
    /// Time at which the sandbox got this VM: its create, resume or recovery.
    pub vm_since: UnixMs,
    /// The caller's claim, if several servers can run the sandbox.
    pub claim: Option<Claim>,
}

/// Response of [`crate::Pool::connect`].
#[derive(Debug)]
pub struct Connected {
    pub sandbox: Sandbox,
    /// Whether this request resumed the sandbox, which was paused.
    pub resumed: bool,
}

/// An event in the life of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LifeEvent {
    pub at: UnixMs,
    /// A description for users, not for programs.
    pub what: String,
}

/// Resource usage of a sandbox, seen from the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// CPU time of its VMM in nanoseconds.
    pub cpu_ns: u64,
    /// Private memory of its VMM in bytes.
    pub memory: u64,
    /// Bytes of its writable layer on the host's disk.
    pub disk: u64,
}
