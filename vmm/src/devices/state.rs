//! What a snapshot keeps of the devices, and why it may be refused.

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use super::queue::QueueState;
pub use super::registers::SlotState;
pub use super::vsock::VsockState;

/// The devices of one VM in a snapshot, about 700 bytes. Everything in it is checked by
/// [`super::DeviceBus::restore`]; the snapshot's header carries its version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BusState {
    /// Per device slot, in slot order.
    pub slots: Vec<SlotState>,
    /// Sectors of 512 bytes of the root disk: another image would not fit the guest's memory.
    pub root_sectors: u64,
    /// Sectors of 512 bytes of the writable layer.
    pub layer_sectors: u64,
    /// Streams between guest and host.
    pub vsock: VsockState,
}

/// A snapshot's device state that makes no sense.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum DeviceStateError {
    /// The snapshot was made with other devices.
    #[error("snapshot has {found} device slots, this build has {expected}")]
    SlotCount {
        /// In the snapshot.
        found: usize,
        /// In this build.
        expected: usize,
    },
    /// A device has another number of queues.
    #[error("device slot {slot} has {found} queues in the snapshot, {expected} in this build")]
    QueueCount {
        /// Device slot.
        slot: usize,
        /// In the snapshot.
        found: usize,
        /// In this build.
        expected: usize,
    },
    /// A queue lies outside guest memory or has an impossible size.
    #[error("queue cannot exist: {state:?}")]
    Queue {
        /// As found in the snapshot.
        state: QueueState,
    },
    /// The driver took features that the device does not offer.
    #[error(
        "device slot {slot} has features {features:#x} in the snapshot, offered are {offered:#x}"
    )]
    Features {
        /// Device slot.
        slot: usize,
        /// In the snapshot.
        features: u64,
        /// By this build.
        offered: u64,
    },
    /// A status register that no driver can reach.
    #[error("device slot {slot} has impossible status {status:#x}")]
    Status {
        /// Device slot.
        slot: usize,
        /// In the snapshot.
        status: u32,
    },
    /// The disk behind the restored VM has another size than the one in the snapshot.
    #[error("{disk} disk has {found} sectors, the snapshot was made with {expected}")]
    DiskSize {
        /// `root` or `layer`.
        disk: &'static str,
        /// Of the file given now.
        found: u64,
        /// In the snapshot.
        expected: u64,
    },
    /// More streams than a VM can have.
    #[error("snapshot has {found} open streams, at most {limit} can be")]
    StreamCount {
        /// In the snapshot.
        found: usize,
        /// Of this build.
        limit: usize,
    },
}
