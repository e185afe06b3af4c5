//! The assignment of devices to slots of the register page, and the layout of a slot.

/// Bytes of the register page.
pub const PAGE_BYTES: usize = 4096;
/// Bytes between the starts of two slots in the register page.
pub const SLOT_STRIDE: u64 = 0x200;
/// Offset of `QueueNotify` in a slot (virtio 1.2, 4.2.2), for a platform that traps notifications separately.
pub const QUEUE_NOTIFY: u64 = 0x50;
/// Offset of `InterruptACK` in a slot. The devices ignore writes to it, so a platform may swallow them.
pub const INTERRUPT_ACK: u64 = 0x64;
/// Number of slots in use. They are numbered from 0.
pub const SLOTS: usize = Slot::ALL.len();

/// A device's place in the register page. Snapshots depend on the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    Root,
    Layer,
    Net,
    Vsock,
    Rng,
}

impl Slot {
    /// Every slot, in the order of the register page.
    pub(super) const ALL: [Self; 5] = [Self::Root, Self::Layer, Self::Net, Self::Vsock, Self::Rng];

    /// The slot's number: its index in [`Self::ALL`] and its bit in an interrupt set.
    pub(super) const fn index(self) -> usize {
        self as usize
    }

    /// The slot with this number, if one is in use.
    pub(super) fn at(index: usize) -> Option<Self> {
        Self::ALL.get(index).copied()
    }
}
