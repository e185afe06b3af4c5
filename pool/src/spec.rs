//! Types of the pool's interface.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use model::{Bytes, SandboxId, Timeline};
use netisolation::{Counters, Isolation, Policy};
use serde::{Deserialize, Serialize};

use crate::lifetime::{Lifetime, UnixMs};

/// How a pool is set up.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// The program `cube-vmm`.
    pub vmm: PathBuf,
    /// Where everything that outlives the process is: sandboxes, snapshots, template names. The path is
    /// short enough for unix sockets below it (60 bytes at most).
    pub state: PathBuf,
    /// Directories of templates made elsewhere; each sub-directory with a manifest is a template of that name.
    pub installed_templates: Option<PathBuf>,
    /// Directories of what templates name besides: root images, bases. Nothing that lies elsewhere is opened.
    pub images: Vec<PathBuf>,
    /// Warm slots for each template that was asked for or installed.
    pub warm: WarmMarks,
    /// Each sandbox's limits.
    pub limits: SandboxLimits,
    /// Whether sandboxes may run without a limit that the host cannot hold.
    pub missing_limits: MissingLimits,
    /// At most so many running sandboxes, warm slots included.
    pub max_sandboxes: u32,
    /// Memory of the host that is never given to sandboxes.
    pub memory_reserve: Bytes,
    /// What the process that opens the pool may take, in a control group of its own that it then enters; templates
    /// that it loads may be there besides. Absent: it stays in the group that it is in.
    pub server_memory: Option<Bytes>,
    /// Space on the disks of state directory and layers that is never given to sandboxes.
    pub disk_reserve: Bytes,
    /// At most so many paused sandboxes and snapshots are kept, together.
    pub max_saved: u32,
    /// How long a start may take before it counts as failed, and a VMM that a former server has left before it answers.
    pub start_timeout: Duration,
    /// What gives each VM its TAP; absent: sandboxes have no network.
    pub network: Option<Isolation>,
    /// Reads the lifetime out of a note that a server of record version 1 has left. Since version 2 the lifetime is in
    /// the record itself. Returns `None` for a note that cannot be read; its sandbox is ended.
    pub lifetime_of_note: fn(&str) -> Option<Lifetime>,
}

/// When to fill and when to stop: filling starts below `low` and ends at `high`. Both zero: no warm slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WarmMarks {
    /// Below it, filling starts.
    pub low: u32,
    /// At it, filling ends.
    pub high: u32,
}

/// What is done about a limit that the host cannot hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingLimits {
    /// The pool does not open, or the sandbox does not start.
    Refuse,
    /// The log says so, and the limit does not hold.
    Allow,
}

/// Limits of one sandbox as the host enforces them on its VMM process (cgroup v2, or v1).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxLimits {
    /// Above guest RAM, for the VMM itself.
    pub memory_overhead: Bytes,
    /// Share of the CPUs while they are short, from 1 to 10000; 100 is that of any other control group.
    pub cpu_weight: u16,
    /// CPU bandwidth in thousandths of a core; absent: no limit.
    pub cpu_millis: Option<u32>,
    /// Threads of the VMM.
    pub pids: u32,
    /// Bytes a second to and from the disk; absent: no limit.
    pub io_bytes_per_s: Option<u64>,
    /// What its writable layer may take of the host's disk; absent: the layer's size. Beyond it writes of the
    /// guest are I/O errors.
    pub layer: Option<Bytes>,
}

/// What the agent is told at the start of a lease and after each resume.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Init {
    /// Environment of every process in the sandbox.
    pub env_vars: BTreeMap<String, String>,
    /// What `X-Access-Token` must say; absent: the agent is open.
    pub access_token: Option<String>,
}

impl std::fmt::Debug for Init {
    /// Without the secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Init")
            .field("env_vars", &self.env_vars.len())
            .finish_non_exhaustive()
    }
}

/// Longest note in bytes.
pub const MAX_NOTE: usize = 256 << 10;

/// What happens to running sandboxes when the pool closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnClose {
    /// They go on; the next [`crate::Pool::open`] adopts them.
    Keep,
    Kill,
}

/// How a new timeout changes the deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeoutChange {
    /// Replaces the deadline, which may shorten the sandbox's life.
    Replace,
    /// Keeps the present deadline if that is later.
    Extend,
}

/// A new sandbox.
#[derive(Clone, Debug)]
pub struct CreateSpec {
    /// Id, name, `name:tag` or snapshot id.
    pub template: String,
    pub init: Init,
    /// The caller's own text, kept in the record and returned with the sandbox, also after a restart. The sandbox's id
    /// is not known yet when the caller writes it. At most [`MAX_NOTE`] bytes.
    pub note: String,
    pub lifetime: Lifetime,
    /// The network policy. A fork gets its source's policy, whatever this is.
    pub policy: Policy,
}

/// A sandbox as it was when the pool answered.
#[derive(Clone, Debug)]
pub struct Sandbox {
    pub id: SandboxId,
    /// The template it was made from, as it was then.
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
    /// Stamps of the last start, CLOCK_MONOTONIC of the host. Empty for a sandbox that was recovered.
    pub timeline: Timeline,
    /// Whether a warm slot served the create.
    pub warm: bool,
    /// Number of the sandbox's VM among all VMs of this server. A new number means that connections to the VM before
    /// are dead.
    pub generation: u64,
    /// When that VM became this sandbox's: at its create, resume or recovery.
    pub vm_since: UnixMs,
}

/// The answer to [`crate::Pool::connect`].
#[derive(Debug)]
pub struct Connected {
    pub sandbox: Sandbox,
    /// The sandbox was paused and this request resumed it.
    pub resumed: bool,
}

/// Something that happened to a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LifeEvent {
    pub at: UnixMs,
    /// For people.
    pub what: String,
}

/// The state of a sandbox as clients see it. It changes when a change has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SandboxState {
    Running,
    Paused(PauseMode),
}

/// What a pause keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PauseMode {
    /// Memory, CPU and disk: a resume goes on where it stopped.
    Memory,
    /// The disk only: a resume is a cold boot.
    FilesystemOnly,
}

/// Sandboxes that the state directory held when the pool was opened.
#[derive(Debug, Default)]
pub struct Recovered {
    /// Usable sandboxes: adopted while running, or paused on disk.
    pub alive: Vec<Sandbox>,
    /// Leased sandboxes that are gone, with the reason.
    pub lost: Vec<(SandboxId, String)>,
}

/// A sandbox has ended. Everything of it is removed already.
#[derive(Clone, Debug)]
pub struct Ended {
    pub id: SandboxId,
    /// Why it ended by itself, with the VMM's last words. `None` if a caller or its deadline ended it.
    pub why: Option<String>,
}

/// A template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateInfo {
    /// 20 lower-case letters and digits; derived from the name for installed templates, so that it is stable.
    pub id: String,
    /// Names, `name` or `name:tag`; empty for an unnamed snapshot.
    pub names: Vec<String>,
    /// Guest RAM.
    pub memory: Bytes,
    /// vCPUs.
    pub vcpus: u8,
    /// Size of the disk as the guest sees it.
    pub disk: Bytes,
    /// When it was made, seconds since 1970.
    pub created_unix_s: u64,
    /// Whether it was made by [`crate::Pool::snapshot`].
    pub is_snapshot: bool,
    /// The sandbox that it was made of, which may be gone. Absent for what is no snapshot, and for snapshots of
    /// servers that did not note it.
    pub source: Option<SandboxId>,
    /// Sandboxes started from it since the pool was opened.
    pub spawned: u64,
    /// Warm slots now.
    pub warm: u32,
}

/// What a sandbox uses, seen from the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// CPU time of its VMM in nanoseconds.
    pub cpu_ns: u64,
    /// Memory private to it, bytes.
    pub memory: u64,
    /// Bytes its writable layer takes on the host.
    pub disk: u64,
}

/// Counters since the pool was opened, and gauges. `Copy`able numbers only: they become metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Leased and running now.
    pub running: u32,
    /// Paused on disk now.
    pub paused: u32,
    /// Warm now.
    pub warm: u32,
    /// Being filled now.
    pub filling: u32,
    /// Creates served by a warm slot.
    pub warm_hits: u64,
    /// Creates that had to restore.
    pub warm_misses: u64,
    /// Creates refused for want of room.
    pub refused: u64,
    /// Starts that failed, by what failed.
    pub failed: BTreeMap<&'static str, u64>,
    /// VMs that ended unasked.
    pub died: u64,
    /// What one more sandbox is taken to need, bytes (measured); of the template whose sandboxes need most.
    pub expected_bytes: u64,
    /// Memory available to sandboxes now, bytes.
    pub available_bytes: u64,
    /// What passed their TAPs and what did not.
    pub network: Counters,
}
