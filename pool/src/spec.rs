//! Types of the pool's interface.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use library::{info::TemplateInfo, rebuilt::RebuildState, vmms::VmmId};
use model::{Bytes, SandboxId, Timeline};
use netisolation::{Counters, Isolation, Policy};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::{
    claim::Claim,
    lifetime::{Lifetime, UnixMs},
};

/// Configuration of a pool.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// The program `cube-vmm` for new templates and for cold boots. The pool keeps a copy of it.
    pub vmm: PathBuf,
    /// Directory of everything that outlives the process: sandboxes, snapshots, template names. Its path must have at
    /// most 60 bytes, because the kernel limits the paths of the unix sockets below it.
    pub state: PathBuf,
    /// Directory of templates made elsewhere. Each subdirectory with a manifest is a template, named after the
    /// subdirectory.
    pub installed_templates: Option<PathBuf>,
    /// Further directories of files that template manifests may name (root images, bases). A template that names a file
    /// outside these and the template directories is rejected.
    pub images: Vec<PathBuf>,
    /// Minimum number of warm slots of each installed template. Beyond it, the number follows the template's creates.
    pub warm: WarmMarks,
    /// Like `warm`, for each other template that is in use. Disk templates have no warm slots.
    pub warm_in_use: WarmMarks,
    /// Warm slots of each installed template while neither the marks above nor the creates of others need the room.
    pub warm_spare: WarmMarks,
    /// Maximum number of warm slots of all templates together. It takes precedence over the marks.
    pub warm_slots: u32,
    /// Maximum memory of warm slots and loaded templates together. `None`: half of the host's memory.
    pub warm_memory: Option<Bytes>,
    /// A template is in use from its first create or fork until this time has passed without another one. Without
    /// configured marks it then loses its warm slots, and its memory is unloaded.
    pub idle: Duration,
    pub limits: SandboxLimits,
    pub missing_limits: MissingLimits,
    /// Maximum number of slots that have a VM or are getting one, warm slots included.
    pub max_sandboxes: u32,
    /// Host memory that is never given to sandboxes.
    pub memory_reserve: Bytes,
    /// Memory limit of this process, which enters its own cgroup when it opens the pool. The limit grows by the size of
    /// each loaded template. `None`: the process stays in its current cgroup.
    pub server_memory: Option<Bytes>,
    /// Disk space that is never given to sandboxes, on the disk of the state directory and on the disk of the layers.
    pub disk_reserve: Bytes,
    /// Maximum number of paused sandboxes and snapshots together.
    pub max_saved: u32,
    /// Disk space of all snapshots and built templates together, without root images. `None`: no limit. A template
    /// beyond the quota is refused; existing ones are never removed for it.
    pub template_quota: Option<Bytes>,
    /// Timeout for each step of a start, and for a start's wait in the queue. Steps of background sandboxes have ten
    /// times as long.
    pub start_timeout: Duration,
    /// How long a VMM left by a previous server may take to respond. Its sandbox ends after that, so this is much
    /// longer than any delay on a busy host.
    pub adopt_timeout: Duration,
    /// Provides the TAP of each VM. `None`: sandboxes have no network.
    pub network: Option<Isolation>,
    /// PEM of the certificate authority that guests with ruled names in their policy must trust. `None`: there is no
    /// authority, and guests are sent none.
    pub ca_bundle: Option<Arc<str>>,
    /// Reads the lifetime from a sandbox's note. Called only for records of version 1; since version 2 the lifetime is
    /// in the record itself. If it returns `None`, the sandbox is ended.
    pub lifetime_of_note: fn(&str) -> Option<Lifetime>,
    /// Generates ids of sandboxes.
    pub ids: Ids,
    /// Receives every change of a sandbox from the pool's opening on. A change is lost only if this process ends after
    /// the change was written and before it was received. The next server's [`Recovered`] then reveals it.
    pub changes: Option<mpsc::UnboundedSender<Change>>,
}

impl PoolConfig {
    /// A pool without templates, warm slots and network, for at most 1000 running and as many paused sandboxes. It
    /// keeps 512 MiB of memory and 64 MiB of disk space free.
    #[must_use]
    pub fn new(vmm: PathBuf, state: PathBuf) -> Self {
        Self {
            vmm,
            state,
            installed_templates: None,
            images: Vec::new(),
            warm: WarmMarks::default(),
            warm_in_use: WarmMarks::default(),
            warm_spare: WarmMarks::default(),
            warm_slots: 0,
            warm_memory: None,
            idle: Duration::from_secs(600),
            limits: SandboxLimits::default(),
            missing_limits: MissingLimits::Refuse,
            max_sandboxes: 1000,
            memory_reserve: Bytes::mib(512),
            server_memory: None,
            disk_reserve: Bytes::mib(64),
            max_saved: 1000,
            template_quota: None,
            start_timeout: Duration::from_secs(30),
            adopt_timeout: Duration::from_secs(600),
            network: None,
            ca_bundle: None,
            lifetime_of_note: |_| None,
            ids: Ids::default(),
            changes: None,
        }
    }
}

/// Makes ids of sandboxes from random bytes. In a cluster, ids name the node. The default encodes the bytes unchanged.
#[derive(Clone)]
pub struct Ids(Arc<dyn Fn([u8; 19]) -> SandboxId + Send + Sync>);

impl Ids {
    #[must_use]
    pub fn new(make: impl Fn([u8; 19]) -> SandboxId + Send + Sync + 'static) -> Self {
        Self(Arc::new(make))
    }

    pub(crate) fn make(&self, random: [u8; 19]) -> SandboxId {
        (self.0)(random)
    }
}

impl Default for Ids {
    fn default() -> Self {
        Self::new(SandboxId::from_random)
    }
}

impl std::fmt::Debug for Ids {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ids")
    }
}

/// Bounds of a template's warm stock: filling begins below `low` and ends at `high`. Both zero: no warm slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
    /// Share of CPU time under contention, from 1 to 10000; the cgroup default is 100.
    pub cpu_weight: u16,
    /// CPU bandwidth in thousandths of a core; `None`: no limit.
    pub cpu_millis: Option<u32>,
    /// Maximum number of VMM threads.
    pub pids: u32,
    /// Limit of disk reads, and of disk writes, in bytes per second each; `None`: no limit.
    pub io_bytes_per_s: Option<u64>,
    /// Maximum space of the writable layer on the host's disk. Beyond it, the guest's writes fail with I/O errors.
    /// `None`: the layer's full size.
    pub layer: Option<Bytes>,
}

impl Default for SandboxLimits {
    /// Enough memory and threads for every VMM, the usual weight, and no other limit.
    fn default() -> Self {
        Self {
            memory_overhead: Bytes::mib(64),
            cpu_weight: 100,
            cpu_millis: None,
            // One for each vCPU, plus a margin.
            pids: 64,
            io_bytes_per_s: None,
            layer: None,
        }
    }
}

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

/// The state of a sandbox as clients see it. While a pause or resume is under way, this is still the old state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SandboxState {
    Running,
    Paused(PauseMode),
}

/// The part of the state that a pause keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
    /// Running sandboxes whose VMM process exists, and paused ones. A running one that cannot be adopted ends later;
    /// [`Ended`] reports why.
    pub alive: Vec<Sandbox>,
    /// Leased sandboxes that are gone, with the reason.
    pub lost: Vec<(SandboxId, String)>,
    /// The lost sandboxes whose records could be read, in their recorded state.
    pub former: Vec<Sandbox>,
}

/// Reports that a sandbox has ended. Its files and processes are already removed.
#[derive(Clone, Debug)]
pub struct Ended {
    pub id: SandboxId,
    /// Why it ended on its own, for example the last line of the VMM's standard error, or why it could not be adopted
    /// from a previous server. `None` if a caller or the deadline ended it.
    pub why: Option<String>,
}

/// A change of a sandbox, reported after it was written to the sandbox's record.
#[derive(Clone, Debug)]
pub struct Change {
    pub at: UnixMs,
    pub id: SandboxId,
    pub kind: ChangeKind,
    /// The sandbox after the change. `None` after its end.
    pub sandbox: Option<Sandbox>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    Created,
    /// Its deadline or its network options.
    Updated,
    Paused,
    Resumed,
    /// A snapshot of it was made into a template.
    Snapshotted,
    /// It was taken over from another server, paused.
    Arrived,
    /// Another server has it now.
    Left,
    /// See [`Ended::why`].
    Ended(Option<String>),
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

/// Gauges, and counters since the pool was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Gauge: sandboxes that run.
    pub running: u32,
    /// Gauge: sandboxes that are on disk.
    pub paused: u32,
    /// Gauge: warm slots.
    pub warm: u32,
    /// Gauge: slots that are being filled.
    pub filling: u32,
    /// Gauge: slots that configuration and demand require, for all templates.
    pub warm_wanted: u32,
    /// Gauge: slots to which the stock is filled, for all templates. Less than `warm_wanted` if the budget is
    /// exhausted.
    pub warm_target: u32,
    /// Gauge: memory of warm slots and loaded templates, in bytes.
    pub warm_bytes: u64,
    /// Gauges: [`PoolConfig::warm_slots`], and the current limit on `warm_bytes`, which is lower while sandboxes need
    /// the memory.
    pub warm_limit: u32,
    pub warm_bytes_limit: u64,
    /// Gauges: all templates, and those whose memory is loaded.
    pub templates: u32,
    pub templates_loaded: u32,
    /// Gauges: number of templates whose memory is stored as a diff, disk space of these diffs in bytes, and size of
    /// the memory that they represent.
    pub memory_diffs: u32,
    pub memory_diff_bytes: u64,
    pub memory_diff_memory_bytes: u64,
    /// Templates that were used since the pool was opened, or have warm slots or loaded memory, by name, or by id if
    /// they have no name.
    pub stocks: BTreeMap<String, StockStats>,
    /// Creates served by a warm slot.
    pub warm_hits: u64,
    /// Creates for which a VM was made.
    pub warm_misses: u64,
    /// Creates, resumes, pauses, snapshots and forks that were refused for lack of memory, slots or disk space, or
    /// because of [`PoolConfig::max_saved`].
    pub refused: u64,
    /// Resumes by traffic that waited for room on a full host.
    pub wakes_waited: u64,
    /// Failed jobs, by the part that failed.
    pub failed: BTreeMap<&'static str, u64>,
    /// Sandboxes whose VM exited on its own.
    pub died: u64,
    /// Gauge: memory in bytes that one more sandbox of the template with the largest need is expected to take.
    pub expected_bytes: u64,
    /// Gauge: memory available to sandboxes, in bytes.
    pub available_bytes: u64,
    /// Totals over the TAPs of all sandboxes since the pool was opened.
    pub network: Counters,
    /// Gauges: the uses of each kept VMM, including the current one.
    pub vmms: BTreeMap<VmmId, VmmUse>,
    /// Gauge: directories of `images`, one for each installed template and each old version of one that is in use.
    pub images: u32,
    /// Gauges: the installed templates, by name.
    pub installed: BTreeMap<String, Installed>,
    /// Templates that were rebuilt.
    pub rebuilt: u64,
    /// Rebuilds that failed.
    pub rebuilds_failed: u64,
}

/// The warm stock of one template: gauges, and counters since the pool was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StockStats {
    /// Slots that configuration and demand require.
    pub wanted: u32,
    /// Slots to which the stock is filled.
    pub target: u32,
    pub warm: u32,
    pub is_loaded: bool,
    /// Creates served by a warm slot.
    pub hits: u64,
    /// Creates for which a VM was made.
    pub misses: u64,
}

/// An installed template: the VMM of its new sandboxes, and whether it has been rebuilt with the current one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installed {
    pub vmm: VmmId,
    pub state: RebuildState,
}

/// The uses of one VMM: VMs and files that must end or be migrated before the host is free of a bug in this VMM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmmUse {
    /// Whether it is the VMM that the server was configured with.
    pub is_present: bool,
    /// VMs that run in it, warm slots included.
    pub running: u32,
    /// Sandboxes that are paused with their memory.
    pub paused: u32,
    /// Installed templates and snapshots.
    pub templates: u32,
}
