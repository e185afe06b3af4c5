//! Device state in snapshots, and the reasons to reject it. [`super::DeviceBus::restore`] checks each number.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The devices of one VM in a snapshot, about 700 bytes. The snapshot's header carries the format version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BusState {
    /// One entry per device slot, in slot order.
    pub slots: Vec<SlotState>,
    /// Size of the root disk in sectors of 512 bytes. A restored VM must have an image of the same size.
    pub root_sectors: u64,
    /// Size of the writable layer in sectors of 512 bytes.
    pub layer_sectors: u64,
    /// Streams between guest and host.
    pub vsock: VsockState,
}

/// The transport registers and queues of one device slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotState {
    /// The device status register.
    pub status: u32,
    /// The features that the driver accepted.
    pub features: u64,
    /// The 32-bit half of the device features that reads return (0: low, 1: high, other: zero).
    pub device_features_sel: u32,
    /// The 32-bit half of the driver features that writes set (0: low, 1: high, other: none).
    pub driver_features_sel: u32,
    /// Index of the queue that the queue registers refer to.
    pub queue_sel: u32,
    /// The queues in the device's order.
    pub queues: Vec<QueueState>,
}

/// One virtqueue. Addresses are zero if the driver never set the queue up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueState {
    /// Number of entries, a power of two.
    pub size: u16,
    /// Whether the driver enabled the queue.
    pub ready: bool,
    /// Whether the device stopped serving the queue because the driver broke the rules of virtio.
    pub fault: bool,
    /// Guest-physical address of the descriptor table.
    pub desc_table: u64,
    /// Guest-physical address of the available ring.
    pub avail_ring: u64,
    /// Guest-physical address of the used ring.
    pub used_ring: u64,
    /// Index of the next entry of the available ring to read, free-running modulo 2^16.
    pub next_avail: u16,
    /// Index of the next entry of the used ring to write, free-running modulo 2^16.
    pub next_used: u16,
}

/// The streams of the vsock device. Their sockets are not part of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VsockState {
    /// Host port of the next stream that the host opens.
    pub next_host_port: u32,
    /// (host port, guest port) of each stream that the guest has seen: first the streams for which a reset is pending,
    /// then the open streams, oldest first.
    pub open: Vec<(u32, u32)>,
}

/// Reasons why the device state of a snapshot is invalid.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum DeviceStateError {
    #[error("snapshot has {found} device slots, but this build has {expected}")]
    SlotCount { found: usize, expected: usize },
    #[error("device slot {slot} has {found} queues in the snapshot, but {expected} in this build")]
    QueueCount {
        slot: usize,
        found: usize,
        expected: usize,
    },
    /// The queue's size is not allowed, or a ring lies outside guest memory.
    #[error("queue state is impossible: {state:?}")]
    Queue { state: QueueState },
    #[error(
        "device slot {slot} has features {features:#x} in the snapshot, but this build offers {offered:#x}"
    )]
    Features {
        slot: usize,
        features: u64,
        offered: u64,
    },
    /// No sequence of register writes leads to this status.
    #[error("device slot {slot} has impossible status {status:#x}")]
    Status { slot: usize, status: u32 },
    #[error("{disk} disk has {found} sectors, but the snapshot was made with {expected}")]
    DiskSize {
        /// `root` or `layer`.
        disk: &'static str,
        /// Size of the file that the client sent.
        found: u64,
        /// Size in the snapshot.
        expected: u64,
    },
    #[error("snapshot has {found} open streams: the limit is {limit}")]
    StreamCount { found: usize, limit: usize },
}
