//! Events of a run. They are the only data that the runner passes to the recorder, which writes one event per line to
//! `events.jsonl`. Summaries, gates and reports are computed from that file.
//!
//! All stamps with the suffix `_ns` are CLOCK_MONOTONIC of the host in nanoseconds.

use std::collections::{BTreeMap, BTreeSet};

use model::{StartPhase, Timeline};
use serde::{Deserialize, Serialize};

use crate::{
    account::PoolMemory,
    plan::{Row, Subject},
    scenario::{EventCount, EventTime, Scenario, TargetKind},
};

/// Format of `events.jsonl`, recorded in its first event.
pub const EVENTS_FORMAT: u32 = 2;
/// Format of records whose lines are bare events, without hashes.
pub const UNCHAINED_FORMAT: u32 = 1;

/// An event. [`crate::record`] describes the lines of `events.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunEvent {
    /// Always the first event.
    RunStarted(Box<RunStarted>),
    /// The systems of a comparison, including those missing on this host. Precedes the first round if the scenario
    /// has peers.
    Systems { systems: Vec<System> },
    /// The base time of the round is set, and its workers wait for it.
    RoundStarted {
        /// Position in the plan.
        round: u32,
        subject: Subject,
        row: Row,
        /// Time from which the arrivals are counted.
        base_ns: u64,
        /// Mean rate of the arrivals, if the scenario has several.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rate_per_s: Option<f64>,
    },
    /// Modules that a new sandbox had loaded before its first command, in a scenario with work.
    Loaded {
        /// Names of modules or, for commands, of programs that warm-ups of the template started.
        modules: BTreeSet<String>,
    },
    /// One start, successful or not.
    Attempt(Attempt),
    /// Activity of the run and of the rest of the host during a round. Precedes its `RoundEnded`; absent if the run
    /// does not have its own cgroup.
    RoundUsage {
        /// Position in the plan.
        round: u32,
        usage: RoundUsage,
    },
    /// The last attempt of a round has ended.
    RoundEnded {
        /// Position in the plan.
        round: u32,
        at_ns: u64,
    },
    /// Number of warm slots during a round of the target, if the scenario watches it.
    Stock {
        /// Position in the plan.
        round: u32,
        at_ns: u64,
        warm: u32,
    },
    /// Effects of the scenario's event in a round, as clients observed them.
    Happened(Happened),
    /// Cost of a measured round.
    Spent(Spent),
    /// A sample of the memory of the idle host.
    Memory(MemoryPoint),
    /// CPU time of held clones in a window in which they were idle.
    Idle(IdleSample),
    /// Memory of one held clone.
    Ledger(CloneLedger),
    /// A held clone repeated its first command, or failed to repeat a denied exchange.
    AfterHold {
        /// Round in which the clone was started.
        round: u32,
        /// Position of the clone in its round.
        arrival: u32,
        /// Time from request to response of the first command; `None` after a failure.
        took_ns: Option<u64>,
        failure: Option<Failure>,
    },
    /// Activity of the whole host, every 100 ms.
    Noise(NoiseSample),
    /// Always the last event, unless the run was killed or recording failed.
    RunEnded { why: EndReason, at_ns: u64 },
}

/// The first event: all data that a report needs about the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunStarted {
    /// [`EVENTS_FORMAT`], or [`UNCHAINED_FORMAT`] in older records.
    pub format: u32,
    /// The complete scenario, so that a report does not depend on the scenario file.
    pub scenario: Scenario,
    /// Command line that repeats the run.
    pub reproduce: String,
    /// Wall clock in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// The same instant on CLOCK_MONOTONIC.
    pub at_ns: u64,
}

/// CPU time and memory of a measured round. The time begins before the first start. It ends when the sandboxes that do
/// not outlive the round are killed and the warm pool is full again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spent {
    /// Position of the round in the plan.
    pub round: u32,
    pub subject: Subject,
    pub from_ns: u64,
    pub until_ns: u64,
    /// CPU time of the subject's processes: the server with all its descendants, or the VMMs or processes that the
    /// harness started. `None` if it cannot be read.
    pub cpu_ns: Option<u64>,
    /// CPU time of the server with all its descendants until the last start of the round has ended. `None` without a
    /// server on this host.
    pub server_cpu_ns: Option<u64>,
    /// Number of warm slots at `from_ns`; `None` without a pool.
    pub warm: Option<u32>,
    /// Number of slots that were warm or being filled at the end of the last start of the round; `None` without a
    /// pool.
    pub stock_after: Option<u32>,
    /// Memory of the pool at `from_ns`, while it is full and, unless clones are held over rounds, has no other
    /// sandboxes.
    pub memory: Option<PoolMemory>,
}

/// An event of the scenario, as clients observed it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Happened {
    /// Position of the round in the plan.
    pub round: u32,
    pub row: Row,
    /// Start of the event.
    pub at_ns: u64,
    /// Durations in nanoseconds; `None` for a condition that was not met in time.
    pub times: BTreeMap<EventTime, Vec<Option<u64>>>,
    pub counts: BTreeMap<EventCount, u64>,
    /// The first fault, in one line.
    pub failure: Option<String>,
}

/// A system of a comparison.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct System {
    pub subject: Subject,
    /// Name in the scenario; `target` for its target.
    pub name: String,
    pub kind: TargetKind,
    /// Version of the program behind it; `None` if it reports none.
    pub version: Option<String>,
    /// Isolation of its sandboxes from the host; `None` if unknown.
    pub platform: Option<String>,
    /// Why it cannot be measured here; `None` if the probe succeeded.
    pub missing: Option<String>,
}

/// One start of a subject.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attempt {
    /// Position of the round in the plan.
    pub round: u32,
    pub subject: Subject,
    pub row: Row,
    /// Position in the round.
    pub arrival: u32,
    /// Planned start. Latencies count from this instant.
    pub intended_ns: u64,
    pub actual_ns: u64,
    /// Position of the first command in the scenario's work; `None` if it was `exec` or the baseline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work: Option<usize>,
    /// Position of the template in the scenario's mix; `None` without a mix.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<u16>,
    /// Stamps of the phases that were reached.
    pub timeline: Timeline,
    /// Origin of the sandbox; `None` if the target does not report it.
    #[serde(default)]
    pub start: Option<StartKind>,
    /// Page faults of the VMM from its start to the first turn. `None` if the scenario has no turns, or if the VMM is
    /// not a process of this host.
    #[serde(default)]
    pub faults: Option<u64>,
    /// Successful turns, in order.
    #[serde(default)]
    pub turns: Vec<Turn>,
    /// `None` if the first command and all turns succeeded and the clone, unless it is held, was killed.
    pub failure: Option<Failure>,
    /// End of the attempt. The kill is included unless the clone is held.
    pub ended_ns: u64,
}

impl Attempt {
    /// Nanoseconds from the intended start to a phase; `None` if the phase was not reached.
    #[must_use]
    pub fn latency_ns(&self, phase: StartPhase) -> Option<u64> {
        let at = self.timeline.at(phase)?;
        Some(at.saturating_sub(self.intended_ns))
    }
}

/// One command, cell or exchange after the first command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turn {
    /// Time from request to response. For an exchange, this includes starting `cube-netprobe` in the sandbox.
    pub took_ns: u64,
    /// Minor and major page faults of the VMM during the turn, including faults that KVM handles for the guest. `None`
    /// if the VMM is not a process of this host.
    pub faults: Option<u64>,
    /// Measurements of the peer; `None` for commands, cells and denied exchanges.
    #[serde(default)]
    pub exchange: Option<Exchanged>,
}

/// Measurements of a peer outside the sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exchanged {
    /// `echo`: each round trip. `send` and `receive`: the transfer time of each connection. `churn`: each policy
    /// update, from request to response.
    pub times_ns: Vec<u64>,
    /// Bytes transferred on each connection of `send` and `receive`; otherwise 0.
    #[serde(default)]
    pub bytes: u64,
    /// `churn`: for each update that allows traffic, the time from its response to the first datagram after the
    /// request; 0 if that datagram arrived before the response.
    #[serde(default)]
    pub effects_ns: Vec<u64>,
}

/// Origin of a sandbox. Reports show results for each origin, in addition to those over all starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StartKind {
    /// Taken from the warm pool of the server.
    Warm,
    /// Restored from the template for this create.
    Restored,
}

impl StartKind {
    /// Name in the header `X-Cube-Start`, in JSON and in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Warm => "warm",
            Self::Restored => "restored",
        }
    }

    /// The kind with this name; `None` for other words.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Warm, Self::Restored]
            .into_iter()
            .find(|kind| kind.name() == name)
    }
}

/// A failed step of an attempt, or of a repeat in a held clone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    pub cause: FailureCause,
    /// The chain of causes in one line.
    pub message: String,
}

/// Categories by which failures are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureCause {
    /// A process could not be started.
    Spawn,
    /// The VM could not be restored from its template.
    Restore,
    /// The vCPU could not be resumed.
    Resume,
    /// The guest agent did not accept the identity.
    Identity,
    /// The guest agent or the API did not accept a connection, or the TLS handshake failed.
    Connect,
    /// The API rejected the create or the fork, or its response was invalid.
    Create,
    /// The command could not be run.
    Exec,
    /// The command ran, but its status or output differed from the expected one.
    WrongOutput,
    /// Traffic that the policy allows did not get through or could not be measured, a denied connection could not be
    /// tried, or the network of the sandbox could not be changed.
    Network,
    /// Traffic that the policy denies got through.
    Breach,
    /// A step exceeded its timeout.
    Timeout,
    /// The clone could not be killed, or its files could not be removed.
    Kill,
}

impl FailureCause {
    /// Name in JSON and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Spawn => "spawn",
            Self::Restore => "restore",
            Self::Resume => "resume",
            Self::Identity => "identity",
            Self::Connect => "connect",
            Self::Create => "create",
            Self::Exec => "exec",
            Self::WrongOutput => "wrong_output",
            Self::Network => "network",
            Self::Breach => "breach",
            Self::Timeout => "timeout",
            Self::Kill => "kill",
        }
    }
}

/// Memory of the idle host, in bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemoryPoint {
    /// Samples with the same group differ only in the number of clones.
    pub group: u32,
    /// Held clones.
    pub alive: u32,
    pub at_ns: u64,
    /// Values of /proc/meminfo by their kernel names; values that could not be read are absent.
    pub meminfo: BTreeMap<String, u64>,
    /// Reclaim since boot: `pgscan` and `pgsteal` in pages, `damon_bytes`; values that could not be read are absent.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub reclaim: BTreeMap<String, u64>,
}

/// CPU time of held clones in a window in which they were idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdleSample {
    /// Round of the first of these clones.
    pub round: u32,
    /// Number of clones whose VMM is a process of this host.
    pub clones: u32,
    pub window_ns: u64,
    /// Sum over all these VMMs.
    pub cpu_ns: u64,
}

/// Memory of one clone, in bytes. Values that could not be read are `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CloneLedger {
    /// Round in which the clone was started.
    pub round: u32,
    /// Position of the clone in its round.
    pub arrival: u32,
    /// Guest memory that the clone has written: private copies of pages of the template.
    pub guest_private_bytes: Option<u64>,
    /// Private pages of the VMM outside guest memory.
    pub vmm_private_bytes: Option<u64>,
    /// Page tables of the VMM process (VmPTE).
    pub page_tables_bytes: Option<u64>,
    /// Resident guest memory that is shared with the page cache.
    pub guest_shared_bytes: Option<u64>,
    /// Resident set size. Not used for results; recorded because other projects publish it.
    pub rss_bytes: Option<u64>,
    /// Proportional set size. Not used for results of `run`; recorded because other projects publish it.
    pub pss_bytes: Option<u64>,
}

/// Activity of the host since the previous sample.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct NoiseSample {
    pub at_ns: u64,
    /// Share of CPU time that the hypervisor gave to other VMs (steal), 0 to 1.
    pub steal_share: Option<f64>,
    /// Share of CPU time that was not idle, 0 to 1.
    pub busy_share: Option<f64>,
    /// Load average over one minute.
    pub load_1min: Option<f64>,
    /// MemAvailable.
    pub available_bytes: Option<u64>,
}

/// CPU time and waiting time during a round. Values that could not be read are `None`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoundUsage {
    /// Length of the round, including the creation of its workers.
    pub wall_ns: u64,
    /// CPU time of the harness, of its children and of the server's VMs.
    pub own_cpu_ns: Option<u64>,
    /// CPU time of everything else on the host, including kernel threads.
    pub foreign_cpu_ns: Option<u64>,
    /// CPU time of kernel threads, which is part of `foreign_cpu_ns`. Also `None` if this process does not see them.
    #[serde(default)]
    pub kernel_cpu_ns: Option<u64>,
    /// Whether the sandboxes run where the harness does not see their CPU time, so that `foreign_cpu_ns` may contain it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub client_only: bool,
    /// CPUs of the host.
    pub cores: usize,
    /// Share of the time in which some task of the host waited for memory.
    pub memory_wait_share: Option<f64>,
    /// Share of the time in which some task of the host waited for a CPU. The run's own tasks wait too, so no rule uses
    /// it.
    pub cpu_wait_share: Option<f64>,
}

impl RoundUsage {
    /// CPU time of other programs, in nanoseconds; `None` if it could not be read. Kernel threads are included if their
    /// time is unknown.
    #[must_use]
    pub fn programs_ns(&self) -> Option<u64> {
        let kernel_ns = self.kernel_cpu_ns.unwrap_or(0);
        Some(self.foreign_cpu_ns?.saturating_sub(kernel_ns))
    }

    /// [`Self::programs_ns`] as a share of the host's CPU time, 0 to 1.
    #[must_use]
    pub fn programs_share(&self) -> Option<f64> {
        Some(self.share(self.programs_ns()?))
    }

    /// Share of the host's CPU time that kernel threads used, 0 to 1; `None` if it is unknown.
    #[must_use]
    pub fn kernel_share(&self) -> Option<f64> {
        Some(self.share(self.kernel_cpu_ns?))
    }

    /// Share of the host's CPU time that nothing used, 0 to 1; `None` if it is unknown.
    #[must_use]
    pub fn idle_share(&self) -> Option<f64> {
        Some(1.0 - self.share(self.own_cpu_ns?.saturating_add(self.foreign_cpu_ns?)))
    }

    fn share(&self, cpu_ns: u64) -> f64 {
        let all_ns = self.wall_ns as f64 * self.cores as f64;
        // CPU time is counted at ticks on some kernels, so it can be ahead of the clock.
        (cpu_ns as f64 / all_ns).min(1.0)
    }
}

/// Reason for the end of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndReason {
    /// All rounds were run.
    Complete,
    /// `memory.stop_at_share` was reached. The results of the rounds before it are valid.
    MemoryShare,
    /// Starts failed in a scenario whose clones accumulate: memory or another limit of the host was reached. The
    /// results of earlier rounds are valid.
    Limit {
        /// Number of failed starts and of living clones.
        message: String,
    },
    /// SIGINT or SIGTERM was received.
    Interrupted,
    /// The runner failed.
    Broken {
        /// The chain of causes in one line.
        message: String,
    },
}
