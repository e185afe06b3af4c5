//! Configuration of a pool.

use std::{path::PathBuf, sync::Arc, time::Duration};

use model::{Bytes, SandboxId};
use netisolation::Isolation;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::{change::Change, lifetime::Lifetime};

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
    /// Number of standard deviations by which the promised memory exceeds what all sandboxes are expected to need.
    pub memory_margin: u32,
    /// Share of time, in percent, above which waits for memory on the host (PSI) count as a shortage.
    pub memory_stalls: u32,
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
            memory_margin: 3,
            memory_stalls: 10,
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
