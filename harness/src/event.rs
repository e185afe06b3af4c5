//! What happens during a run. Events are the only thing that passes from the runner to recorders,
//! summaries, gates and reports; `events.jsonl` holds one per line.
//!
//! All `…_ns` stamps are CLOCK_MONOTONIC of the host in nanoseconds.

use std::collections::BTreeMap;

use model::{StartPhase, Timeline};
use serde::{Deserialize, Serialize};

use crate::{
    plan::{Row, Subject},
    scenario::Scenario,
};

/// Format of `events.jsonl`, in its first event.
pub const EVENTS_FORMAT: u32 = 1;

/// One line of `events.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunEvent {
    /// Always first.
    RunStarted(Box<RunStarted>),
    /// The round's time base is fixed and its workers are waiting for it.
    RoundStarted {
        /// Position in the plan.
        round: u32,
        /// See [`Subject`].
        subject: Subject,
        /// See [`Row`].
        row: Row,
        /// The base of its arrivals.
        base_ns: u64,
    },
    /// One start, ended well or not.
    Attempt(Attempt),
    /// The last attempt of a round is over.
    RoundEnded {
        /// Position in the plan.
        round: u32,
        /// When.
        at_ns: u64,
    },
    /// A sample of the host's memory at rest.
    Memory(MemoryPoint),
    /// What one held clone owns.
    Ledger(CloneLedger),
    /// A held clone was asked once more.
    AfterHold {
        /// Round in which it was started.
        round: u32,
        /// Its position in the round.
        arrival: u32,
        /// From question to answer; absent when it failed.
        took_ns: Option<u64>,
        /// Why there was no right answer.
        failure: Option<Failure>,
    },
    /// What else the host did, every 100 ms.
    Noise(NoiseSample),
    /// Always last, unless the run was killed.
    RunEnded {
        /// See [`EndReason`].
        why: EndReason,
        /// When.
        at_ns: u64,
    },
}

/// What was run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunStarted {
    /// [`EVENTS_FORMAT`].
    pub format: u32,
    /// The whole scenario, so that a report needs no other file of the tree.
    pub scenario: Scenario,
    /// Command line that does the same again.
    pub reproduce: String,
    /// Wall clock in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// Stamp of the same instant.
    pub at_ns: u64,
}

/// One start of a subject.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attempt {
    /// Position of its round in the plan.
    pub round: u32,
    /// See [`Subject`].
    pub subject: Subject,
    /// See [`Row`].
    pub row: Row,
    /// Position in its round.
    pub arrival: u32,
    /// When it should have started. Every latency counts from here.
    pub intended_ns: u64,
    /// When the worker began.
    pub actual_ns: u64,
    /// The phases it reached.
    pub timeline: Timeline,
    /// How the target came by it; absent where the target does not tell.
    #[serde(default)]
    pub start: Option<StartKind>,
    /// Page faults of its VMM from its beginning to first exec; absent without turns, and where there is no
    /// such process on this host.
    #[serde(default)]
    pub faults: Option<u64>,
    /// The turns that gave the right answer, in order.
    #[serde(default)]
    pub turns: Vec<Turn>,
    /// Absent when the first command and all turns gave the right answer.
    pub failure: Option<Failure>,
    /// When the worker was done with it, the kill included where it was not held.
    pub ended_ns: u64,
}

impl Attempt {
    /// Nanoseconds from the intended start to a phase; `None` if it was not reached.
    #[must_use]
    pub fn latency_ns(&self, phase: StartPhase) -> Option<u64> {
        let at = self.timeline.at(phase)?;
        Some(at.saturating_sub(self.intended_ns))
    }
}

/// One command, cell or exchange after the first command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turn {
    /// From question to answer; of an exchange all of it, with the start of the sandbox's end.
    pub took_ns: u64,
    /// Page faults of the clone's VMM meanwhile, minor and major, those that KVM takes for the guest among
    /// them; absent where there is no such process on this host.
    pub faults: Option<u64>,
    /// What was measured outside; absent for what is no exchange, and for one that nobody must hear of.
    #[serde(default)]
    pub exchange: Option<Exchanged>,
}

/// What a peer outside measured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exchanged {
    /// Round trips; or the time of all bytes, for each connection; or replacements of the policy, from question to
    /// answer.
    pub times_ns: Vec<u64>,
    /// Bytes that each connection moved; zero where that is not what was measured.
    #[serde(default)]
    pub bytes: u64,
    /// From answers that opened the policy to the first packet; zero where that was earlier.
    #[serde(default)]
    pub effects_ns: Vec<u64>,
}

/// How a server came by a sandbox. Two kinds are never in one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StartKind {
    /// It stood ready in the server's pool.
    Warm,
    /// It was restored from its template for this create.
    Restored,
}

impl StartKind {
    /// The name on the wire, in JSON and in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Warm => "warm",
            Self::Restored => "restored",
        }
    }

    /// From its name; `None` for other words.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Warm, Self::Restored]
            .into_iter()
            .find(|kind| kind.name() == name)
    }
}

/// Why a start did not reach its first command's right answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// For counting.
    pub cause: FailureCause,
    /// The chain of causes in one line.
    pub message: String,
}

/// What failures are counted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureCause {
    /// The process could not be started.
    Spawn,
    /// The VM could not be built from its template.
    Restore,
    /// The VM could not be let run.
    Resume,
    /// The agent did not take the identity.
    Identity,
    /// The agent's port, or the endpoint, did not answer.
    Connect,
    /// The endpoint refused the create, or its answer was not one.
    Create,
    /// The command could not be run.
    Exec,
    /// It ran, and its status or output was wrong.
    WrongOutput,
    /// What the policy allows did not get through, or could not be measured.
    Network,
    /// What the policy denies got through.
    Breach,
    /// A step took longer than its bound.
    Timeout,
    /// It could not be killed or its files not be removed.
    Kill,
}

impl FailureCause {
    /// The name in JSON and reports.
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

/// The host's memory at rest, in bytes. What could not be read is absent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemoryPoint {
    /// Samples of one group share everything but the number of clones.
    pub group: u32,
    /// Held clones.
    pub alive: u32,
    /// When.
    pub at_ns: u64,
    /// Lines of /proc/meminfo by their kernel names.
    pub meminfo: BTreeMap<String, u64>,
}

/// What one clone owns, in bytes. What could not be read is absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CloneLedger {
    /// Round in which it was started.
    pub round: u32,
    /// Its position in the round.
    pub arrival: u32,
    /// Pages of the template's memory mapping that are its own.
    pub guest_private_bytes: Option<u64>,
    /// Private pages of its VMM in all other mappings.
    pub vmm_private_bytes: Option<u64>,
    /// Page tables of the VMM process (VmPTE).
    pub page_tables_bytes: Option<u64>,
    /// Resident pages of the template's memory that it shares with the page cache.
    pub guest_shared_bytes: Option<u64>,
    /// Resident set size, because others publish it.
    pub rss_bytes: Option<u64>,
    /// Proportional set size, because others publish it.
    pub pss_bytes: Option<u64>,
}

/// What the host did besides.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct NoiseSample {
    /// When.
    pub at_ns: u64,
    /// Share of all CPU time since the last sample that the hypervisor gave to others, 0 to 1.
    pub steal_share: Option<f64>,
    /// Share that was not idle, 0 to 1.
    pub busy_share: Option<f64>,
    /// Run-queue average over a minute.
    pub load_1min: Option<f64>,
    /// MemAvailable.
    pub available_bytes: Option<u64>,
}

/// How a run came to its end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndReason {
    /// All rounds were run.
    Complete,
    /// `memory.stop_at_share` was reached; what was measured counts.
    MemoryShare,
    /// SIGINT or SIGTERM.
    Interrupted,
    /// The runner itself failed.
    Broken {
        /// The chain of causes in one line.
        message: String,
    },
}
