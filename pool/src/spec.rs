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
    /// Directory of everything that outlives the process: sandboxes, snapshots, template names. At most 60 bytes long,
    /// since the paths of unix sockets below it are limited.
    pub state: PathBuf,
    /// Directories of templates made elsewhere; each sub-directory with a manifest is a template of that name.
    pub installed_templates: Option<PathBuf>,
    /// Directories of further files that templates name: root images, bases. Files elsewhere are not opened.
    pub images: Vec<PathBuf>,
    /// Warm slots of each template that is installed or was used.
    pub warm: WarmMarks,
    pub limits: SandboxLimits,
    pub missing_limits: MissingLimits,
    /// Most running sandboxes, warm slots included.
    pub max_sandboxes: u32,
    /// Host memory that is never given to sandboxes.
    pub memory_reserve: Bytes,
    /// Memory limit of the process that opens the pool, which enters a cgroup for it. Loaded templates are added to the
    /// limit. `None`: the process stays in its cgroup.
    pub server_memory: Option<Bytes>,
    /// Space that is never given to sandboxes, on the disk of the state directory and on that of the layers.
    pub disk_reserve: Bytes,
    /// Most paused sandboxes and snapshots together.
    pub max_saved: u32,
    /// Timeout of a start, and of an answer of a VMM that a former server has left.
    pub start_timeout: Duration,
    /// Gives each VM its TAP. `None`: sandboxes have no network.
    pub network: Option<Isolation>,
    /// Reads the lifetime from a note that a server of record version 1 has left; since version 2 the lifetime is in the
    /// record itself. If it returns `None`, the sandbox is ended.
    pub lifetime_of_note: fn(&str) -> Option<Lifetime>,
}

/// Filling of a template's stock begins below `low` and ends at `high`. Both zero: no warm slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WarmMarks {
    pub low: u32,
    pub high: u32,
}

/// The action if the host cannot enforce a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingLimits {
    /// The pool does not open, or the sandbox does not start.
    Refuse,
    /// A warning is logged, and sandboxes run without the limit.
    Allow,
}

/// Limits of one sandbox, enforced on its VMM process by cgroups (version 2 or 1).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxLimits {
    /// Memory for the VMM itself, in addition to guest RAM.
    pub memory_overhead: Bytes,
    /// Share of CPU time under contention, from 1 to 10000; the default of cgroups is 100.
    pub cpu_weight: u16,
    /// CPU bandwidth in thousandths of a core; `None`: no limit.
    pub cpu_millis: Option<u32>,
    /// Most threads of the VMM.
    pub pids: u32,
    /// Bytes per second, for reads and for writes of the disk; `None`: no limit.
    pub io_bytes_per_s: Option<u64>,
    /// Most space that the writable layer may take on the host's disk; beyond it, writes of the guest fail with I/O
    /// errors. `None`: the layer's size.
    pub layer: Option<Bytes>,
}

/// Settings that the agent gets at the start of a lease and after each resume.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Init {
    /// Environment of every process in the sandbox.
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

/// The fate of running sandboxes when the pool closes.
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
    /// The template as it was when the sandbox was made.
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

/// The state that a pause keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PauseMode {
    /// Memory, CPU and disk: a resume continues where the sandbox was paused.
    Memory,
    /// The disk: a resume is a cold boot.
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

/// Reports that a sandbox has ended. Its files and processes are already removed.
#[derive(Clone, Debug)]
pub struct Ended {
    pub id: SandboxId,
    /// Why it ended by itself, with the last line of the VMM's standard error. `None` if a caller or its deadline ended
    /// it.
    pub why: Option<String>,
}

/// A template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateInfo {
    /// 20 lower-case letters and digits. The id of an installed template is derived from its name, so it never changes.
    pub id: String,
    /// Names, `name` or `name:tag`; empty for an unnamed snapshot.
    pub names: Vec<String>,
    /// Guest RAM.
    pub memory: Bytes,
    pub vcpus: u8,
    /// Size of the disk as the guest sees it.
    pub disk: Bytes,
    pub created_unix_s: u64,
    /// Whether [`crate::Pool::snapshot`] made it.
    pub is_snapshot: bool,
    /// The sandbox that a snapshot was made of, which may have ended. `None` for other templates, and for snapshots of
    /// servers that did not record it.
    pub source: Option<SandboxId>,
    /// Sandboxes started from it since the pool was opened.
    pub spawned: u64,
    /// Present warm slots.
    pub warm: u32,
}

/// Resource usage of a sandbox, seen from the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// CPU time of its VMM in nanoseconds.
    pub cpu_ns: u64,
    /// Private memory in bytes.
    pub memory: u64,
    /// Bytes of its writable layer on the host's disk.
    pub disk: u64,
}

/// Gauges, and counters since the pool was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Gauge: sandboxes that run.
    pub running: u32,
    /// Gauge: sandboxes that are on disk.
    pub paused: u32,
    /// Gauge.
    pub warm: u32,
    /// Gauge: slots that are being filled.
    pub filling: u32,
    /// Creates served by a warm slot.
    pub warm_hits: u64,
    /// Creates for which a VM was made.
    pub warm_misses: u64,
    /// Creates, resumes, pauses, snapshots and forks that were refused for lack of memory, places or disk space.
    pub refused: u64,
    /// Failed jobs, by the part that failed.
    pub failed: BTreeMap<&'static str, u64>,
    /// Sandboxes whose VM exited by itself.
    pub died: u64,
    /// Gauge: memory that one more sandbox is expected to need, in bytes; of the template with the largest need.
    pub expected_bytes: u64,
    /// Gauge: memory available to sandboxes, in bytes.
    pub available_bytes: u64,
    /// Sum over the TAPs of all sandboxes.
    pub network: Counters,
}
