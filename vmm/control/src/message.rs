//! What can be asked of a VMM and what it answers.

use std::path::PathBuf;

use model::{Identity, RestoreSpec, Timeline, VmSpec};
use serde::{Deserialize, Serialize};

use crate::files::FileRole;

/// The body of a frame to a VMM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Call {
    /// What is asked.
    pub request: Request,
    /// What the descriptors beside the frame are, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<FileRole>,
}

impl From<Request> for Call {
    /// A call that needs no descriptors.
    fn from(request: Request) -> Self {
        Self {
            request,
            files: Vec::new(),
        }
    }
}

/// A request. Each is answered by exactly one `Result<Reply, Failure>`. A VMM opens nothing by path: the paths
/// in a spec are for the client, which opens them, and for messages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Build a VM from a kernel and run it. Beside the frame: [`crate::files::of_boot`].
    /// Answered with [`Reply::Started`] once the vCPU may run.
    Boot(VmSpec),
    /// Build a VM from a template and leave it paused. Beside the frame: [`crate::files::of_restore`].
    /// Answered with [`Reply::Started`].
    Restore {
        /// What to restore.
        spec: RestoreSpec,
        /// The directory in which the whole template really lies, links followed: a diff will name it.
        home: PathBuf,
    },
    /// Give the guest its identity, wall clock included, and wait until its agent says ready.
    /// Answered with [`Reply::Started`], whose timeline then has `agent_ready`.
    Identity {
        /// Who the clone is.
        identity: Identity,
        /// How long the agent may take, in milliseconds.
        within_ms: u64,
    },
    /// Stop the vCPU. Answered with [`Reply::Done`]; an already paused VM is no error.
    Pause,
    /// Let the vCPU run. Answered with [`Reply::Done`]; a running VM is no error.
    Resume,
    /// Write memory, state, layer and manifest to the empty files beside the frame; for a diff, extents too. The
    /// VM is paused while this happens and stays paused. Answered with [`Reply::Done`].
    Snapshot {
        /// How much of it to write.
        #[serde(default)]
        content: SnapshotContent,
    },
    /// Write the layer alone, as the guest's disk is now, to the empty file beside the frame; a VM can be
    /// booted from it. The VM is paused while this happens and stays paused. What the guest has not
    /// written back yet is not in it: have it sync before. Answered with [`Reply::Done`].
    SaveLayer,
    /// Write the list of guest pages that are private to this clone to the empty file beside the frame.
    /// Answered with [`Reply::Done`].
    RecordWorkingSet,
    /// Answered with [`Reply::Stats`].
    Stats,
    /// Answered with [`Reply::Done`]; the process then exits with status 0.
    Shutdown,
}

/// How much of a VM a snapshot holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotContent {
    /// All of it.
    #[default]
    Full,
    /// What differs from the whole template that the VM descends from. Such a snapshot can be restored
    /// while that template exists unchanged. A VM that was booted has none, and a template that is gone
    /// is no help: then the snapshot is full, as its manifest says.
    Diff,
}

/// A successful answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Reply {
    /// Nothing more to say.
    Done,
    /// The stamps so far.
    Started(Timeline),
    /// Counters.
    Stats(VmStats),
}

/// Where a VM is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmPhase {
    /// No VM was built yet.
    Empty,
    /// The vCPU does not run.
    Paused,
    /// The vCPU may run.
    Running,
    /// The guest shut down or crashed; the reason is in [`VmStats::exit_reason`].
    Exited,
}

/// Counters of one VM. All counts start at zero when the process starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmStats {
    /// See [`VmPhase`].
    pub phase: VmPhase,
    /// Why the guest ended; absent while it has not.
    pub exit_reason: Option<String>,
    /// Stamps so far.
    pub timeline: Timeline,
    /// KVM_RUN returns by reason (`io`, `mmio`, `intr`, …).
    pub exits: std::collections::BTreeMap<String, u64>,
    /// Bytes of guest memory that are private to this process, from /proc/self/pagemap; `null` if unreadable.
    pub guest_private_bytes: Option<u64>,
    /// Frames that the network device did not deliver. Zero from a VMM that does not count them.
    #[serde(default)]
    pub lost_frames: LostFrames,
    /// Epoll events that the VMM ignored because it did not register their token. Above zero only after a bug.
    #[serde(default)]
    pub unknown_events: u64,
}

/// Frames that a VM's network device did not deliver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LostFrames {
    /// Frames for the guest that did not fit its receive buffers, or that waited for buffers when the driver reset the
    /// device.
    pub to_guest: u64,
    /// Frames from the guest that the TAP did not accept, for example because its queue was full; without a TAP, all
    /// valid frames from the guest.
    pub from_guest: u64,
    /// Frames from the guest that are too short, too long, or ask for an offload that does not match their own headers.
    pub refused: u64,
}

/// A refusal or failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
#[serde(deny_unknown_fields)]
pub struct Failure {
    /// What a caller can act on.
    pub kind: FailureKind,
    /// The whole chain of causes in one line.
    pub message: String,
}

/// What a caller can act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// The request itself is wrong.
    BadSpec,
    /// The template is truncated, damaged, or of another format or platform.
    BadSnapshot,
    /// The VM is not in a phase in which this can be done.
    WrongPhase,
    /// This host cannot do it (no KVM, unknown behaviour of KVM).
    UnsuitableHost,
    /// A disk is full.
    NoSpace,
    /// The guest ended.
    GuestExited,
    /// The agent did not answer in time, or refused.
    AgentUnready,
    /// A system call failed for another reason.
    Io,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stats_decode_from_a_vmm_without_the_counters_and_at_a_client_that_does_not_know_them() {
        #[derive(Deserialize)]
        struct OldStats {
            exits: std::collections::BTreeMap<String, u64>,
        }
        let old = r#"{"phase":"running","exit_reason":null,"timeline":[],"exits":{"io":3},"guest_private_bytes":null}"#;
        let mut stats: VmStats = serde_json::from_str(old).unwrap();
        assert_eq!(stats.lost_frames, LostFrames::default());
        assert_eq!(stats.unknown_events, 0);
        stats.lost_frames.refused = 2;
        let new = serde_json::to_string(&stats).unwrap();
        assert!(new.contains(r#""lost_frames":{"to_guest":0,"from_guest":0,"refused":2}"#));
        let seen: OldStats = serde_json::from_str(&new).unwrap();
        assert_eq!(seen.exits["io"], 3);
    }
}
