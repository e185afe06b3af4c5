//! Requests to a VMM and its replies.

use std::path::PathBuf;

use model::{Identity, RestoreSpec, Timeline, VmSpec};
use serde::{Deserialize, Serialize};

use crate::files::FileRole;

/// The body of a frame to a VMM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Call {
    pub request: Request,
    /// The roles of the descriptors that accompany the frame, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<FileRole>,
}

impl From<Request> for Call {
    /// A call without descriptors.
    fn from(request: Request) -> Self {
        Self {
            request,
            files: Vec::new(),
        }
    }
}

/// A request. The VMM replies to each with exactly one `Result<Reply, Failure>`. It opens nothing by path: the paths in
/// a specification are for the client, which opens the files, and for messages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Build a VM from a kernel and run it, with the descriptors of [`crate::files::of_boot`]. The reply is
    /// [`Reply::Started`], once the vCPU may run.
    Boot(VmSpec),
    /// Restore a VM from a template and leave it paused, with the descriptors of [`crate::files::of_restore`]. The
    /// reply is [`Reply::Started`].
    Restore {
        spec: RestoreSpec,
        /// The real directory of the whole template, with symbolic links resolved. A diff of the VM will name this
        /// directory.
        home: PathBuf,
    },
    /// Send the identity and the wall clock to the guest, and wait until its agent reports ready. The reply is
    /// [`Reply::Started`], with a stamp for `agent_ready`.
    Identity {
        identity: Identity,
        /// Time limit for the agent in milliseconds.
        within_ms: u64,
    },
    /// Stop the vCPU. The reply is [`Reply::Done`], even for a VM that is already paused.
    Pause,
    /// Let the vCPU run. The reply is [`Reply::Done`], even for a VM that already runs.
    Resume,
    /// Write memory, state, layer, manifest and, for a diff, extents to the empty files that accompany the frame. The
    /// VM is paused first and remains paused. The reply is [`Reply::Done`].
    Snapshot {
        #[serde(default)]
        content: SnapshotContent,
    },
    /// Write only the layer, in the current state of the guest's disk, to the empty file that accompanies the frame. A
    /// VM can boot from the result. The VM is paused first and remains paused. The layer does not contain data that the
    /// guest has not written back, so run `sync` in the guest first. The reply is [`Reply::Done`].
    SaveLayer,
    /// Write the working set of this clone to the empty file that accompanies the frame. The reply is [`Reply::Done`].
    RecordWorkingSet,
    /// Read the VM's counters. The reply is [`Reply::Stats`].
    Stats,
    /// Exit with status 0 after the reply, [`Reply::Done`].
    Shutdown,
}

/// The part of a VM that a snapshot contains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotContent {
    /// All memory and the whole layer.
    #[default]
    Full,
    /// Only the difference from the whole template that the VM descends from. Such a snapshot can be restored while
    /// that template exists unchanged. If the VM was booted, or its template no longer exists, the snapshot is full.
    /// The manifest shows which.
    Diff,
}

/// The reply to a successful request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// Success without data.
    Done,
    /// The stamps of the start so far.
    Started(Timeline),
    Stats(VmStats),
}

/// The state of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmPhase {
    /// No VM has been built.
    Empty,
    /// The vCPU does not run.
    Paused,
    /// The vCPU may run.
    Running,
    /// The guest shut down or crashed; the reason is in [`VmStats::exit_reason`].
    Exited,
}

/// State and counters of one VM. All counts start at zero when the process starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmStats {
    pub phase: VmPhase,
    /// Reason why the guest ended. `null` until then.
    pub exit_reason: Option<String>,
    pub timeline: Timeline,
    /// Number of returns from KVM_RUN by kind (`device_write`, `idle`, `resume`, …).
    pub exits: std::collections::BTreeMap<String, u64>,
    /// How long the guest will do nothing unless an external event wakes it, in nanoseconds: its vCPU is halted, and
    /// its next timer is due after this time. `u64::MAX` if it has no timer. `null` while the vCPU runs, on the
    /// platform `hvm`, whose VMM cannot detect halts, and from a VMM that does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_ns: Option<u64>,
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

/// A request was refused or failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    pub kind: FailureKind,
    /// The error and its causes in one line.
    pub message: String,
}

/// The kind of a failure, on which a caller can act.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// The request is invalid.
    BadSpec,
    /// The template is truncated or damaged, or has a different format or platform.
    BadSnapshot,
    /// The VM is not in a phase that allows the request.
    WrongPhase,
    /// The host does not support the request: it has no KVM, or a KVM that fits neither platform.
    UnsuitableHost,
    /// A disk is full.
    NoSpace,
    /// The guest ended.
    GuestExited,
    /// The agent did not respond in time, or rejected the identity.
    AgentUnready,
    /// A system call failed for another reason.
    Io,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stats_of_older_and_newer_vmms_and_clients_are_compatible() {
        #[derive(Deserialize)]
        struct OldStats {
            exits: std::collections::BTreeMap<String, u64>,
        }
        let old = r#"{"phase":"running","exit_reason":null,"timeline":[],"exits":{"io":3},"guest_private_bytes":null}"#;
        let mut stats: VmStats = serde_json::from_str(old).unwrap();
        assert_eq!(stats.lost_frames, LostFrames::default());
        assert_eq!((stats.unknown_events, stats.idle_ns), (0, None));
        stats.lost_frames.refused = 2;
        let new = serde_json::to_string(&stats).unwrap();
        assert!(new.contains(r#""lost_frames":{"to_guest":0,"from_guest":0,"refused":2}"#));
        let seen: OldStats = serde_json::from_str(&new).unwrap();
        assert_eq!(seen.exits["io"], 3);
    }
}
