//! One virtqueue. The guest's side of it is untrusted.
//!
//! The `virtio-queue` crate walks the available ring and the descriptors. This module adds limits on a chain, used
//! entries that become visible all at once (a frame in several merged buffers needs that), a persistent fault state,
//! and turns. A ring with impossible addresses or indices is faulty and yields no chain until the driver resets the
//! device. An invalid chain is returned to the driver with length 0. A turn ends after a bounded amount of work, even
//! if the ring is refilled during it: by another vCPU, or by a request whose data becomes the next entry of the ring.

use std::sync::atomic::{Ordering, fence};

use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::buffers::{Buffers, MAX_SEGMENTS};
use super::ram::Ram;
use super::state::{DeviceStateError, QueueState};

/// Flag of the available ring that suppresses interrupts (virtio 1.2, 2.7.6).
const AVAIL_NO_INTERRUPT: u16 = 1;
/// Size of an entry of the used ring in bytes.
const USED_ENTRY: u64 = 8;
/// Limit on chains per turn, as a multiple of the ring's size. It is more than a driver can offer at once, and more
/// than the longest frame needs.
const TURN_RINGS: u32 = 2;
/// Limit on bytes per turn, about twice the longest block request. The chain that exceeds the limit is still served.
const TURN_BYTES: usize = 16 << 20;

/// One request of the driver.
#[derive(Debug)]
pub(super) struct Chain<'a> {
    /// Index of the chain's first descriptor, which identifies the chain when it is returned.
    pub(super) head: u16,
    pub(super) readable: Buffers<'a>,
    pub(super) writable: Buffers<'a>,
}

#[derive(Debug)]
pub(super) struct Virtqueue {
    queue: Queue,
    /// Number of used entries that were written but are not yet visible to the driver.
    staged: u16,
    /// Number of chains that were popped and put back.
    undone: u16,
    fault: bool,
    turn: Turn,
}

/// The remaining budget of a turn.
#[derive(Clone, Copy, Debug, Default)]
struct Turn {
    chains: u32,
    bytes: usize,
    /// The device asked for a chain after the turn had ended.
    cut: bool,
}

/// Half of a 64-bit address, which the driver writes in two parts.
#[derive(Clone, Copy, Debug)]
pub(super) enum Half {
    Low(u32),
    High(u32),
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Area {
    Descriptors,
    Available,
    Used,
}

impl Virtqueue {
    /// `max_size` is a constant of the device and must be a power of two.
    pub(super) fn new(max_size: u16) -> Self {
        let queue = Queue::new(max_size).unwrap_or_default();
        Self {
            queue,
            staged: 0,
            undone: 0,
            fault: false,
            turn: Turn::default(),
        }
    }

    pub(super) fn max_size(&self) -> u16 {
        self.queue.max_size()
    }

    pub(super) fn ready(&self) -> bool {
        self.queue.ready()
    }

    pub(super) fn fault(&self) -> bool {
        self.fault
    }

    pub(super) fn reset(&mut self) {
        self.queue.reset();
        self.staged = 0;
        self.undone = 0;
        self.fault = false;
    }

    /// Sets the number of entries. A size that is not a power of two, or exceeds [`Self::max_size`], is ignored.
    pub(super) fn set_size(&mut self, size: u32) {
        if let Ok(size) = u16::try_from(size) {
            self.queue.set_size(size);
        }
    }

    pub(super) fn set_event_idx(&mut self, enabled: bool) {
        self.queue.set_event_idx(enabled);
    }

    pub(super) fn set_address(&mut self, area: Area, half: Half) {
        let (low, high) = match half {
            Half::Low(value) => (Some(value), None),
            Half::High(value) => (None, Some(value)),
        };
        match area {
            Area::Descriptors => self.queue.set_desc_table_address(low, high),
            Area::Available => self.queue.set_avail_ring_address(low, high),
            Area::Used => self.queue.set_used_ring_address(low, high),
        }
    }

    /// Enables the queue, or marks it faulty if its rings are not entirely in guest memory.
    pub(super) fn enable(&mut self, ram: &Ram) {
        self.queue.set_ready(true);
        if !self.queue.is_valid(ram) {
            self.queue.set_ready(false);
            self.fault = true;
        }
    }

    /// Whether chains can be popped and completed.
    pub(super) fn usable(&self) -> bool {
        self.queue.ready() && !self.fault
    }

    /// Starts a turn of the device.
    pub(super) fn begin_turn(&mut self) {
        self.turn = Turn {
            chains: u32::from(self.queue.size()) * TURN_RINGS,
            bytes: TURN_BYTES,
            cut: false,
        };
    }

    /// Ends the turn early, because its last request took a long time.
    pub(super) fn end_turn(&mut self) {
        self.turn.chains = 0;
    }

    /// Whether the turn ended before the ring was empty. Another turn must then follow without a notification.
    pub(super) fn was_cut(&self) -> bool {
        self.turn.cut && self.usable()
    }

    /// The next request; `None` if the ring is empty or faulty, or the turn has ended.
    pub(super) fn pop<'a>(&mut self, ram: &'a Ram) -> Option<Chain<'a>> {
        loop {
            if self.turn.chains == 0 || self.turn.bytes == 0 {
                self.turn.cut = true;
                return None;
            }
            let chain = self.next_head(ram)?;
            self.turn.chains -= 1;
            let head = chain.head_index();
            match gather(chain, ram) {
                Some((readable, writable)) => {
                    let bytes = readable.len().saturating_add(writable.len());
                    self.turn.bytes = self.turn.bytes.saturating_sub(bytes);
                    return Some(Chain {
                        head,
                        readable,
                        writable,
                    });
                }
                None => self.complete(ram, head, 0),
            }
        }
    }

    fn next_head<'a>(&mut self, ram: &'a Ram) -> Option<virtio_queue::DescriptorChain<&'a Ram>> {
        if !self.usable() {
            return None;
        }
        match self.queue.iter(ram) {
            Ok(mut heads) => {
                self.undone = self.undone.saturating_sub(1);
                heads.next()
            }
            Err(_) => {
                self.fault = true;
                None
            }
        }
    }

    /// Puts the chain of the last `pop` back.
    pub(super) fn undo_pop(&mut self) {
        self.queue.go_to_previous_position();
        self.undone = self.undone.saturating_add(1);
    }

    /// Returns a chain to the driver with `len` bytes written. The driver sees it after [`Self::publish`].
    pub(super) fn complete(&mut self, ram: &Ram, head: u16, len: u32) {
        if head >= self.queue.size() {
            self.fault = true;
            return;
        }
        let slot = self.queue.next_used().wrapping_add(self.staged) % self.queue.size();
        let entry = u64::from(head) | (u64::from(len) << 32);
        let offset = 4 + u64::from(slot) * USED_ENTRY;
        match self.queue.used_ring().checked_add(offset) {
            Some(addr) if ram.write_obj(entry.to_le(), GuestAddress(addr)).is_ok() => {
                self.staged = self.staged.wrapping_add(1);
            }
            _ => self.fault = true,
        }
    }

    /// Makes all completed chains visible to the driver. Returns whether the driver wants an interrupt for them.
    pub(super) fn publish(&mut self, ram: &Ram) -> bool {
        if self.staged == 0 || self.fault {
            self.staged = 0;
            return false;
        }
        let old = self.queue.next_used();
        let new = old.wrapping_add(self.staged);
        self.staged = 0;
        self.queue.set_next_used(new);
        let index = GuestAddress(self.queue.used_ring().wrapping_add(2));
        if ram.store(new.to_le(), index, Ordering::Release).is_err() {
            self.fault = true;
            return false;
        }
        // The driver must see the index before the device reads whether it wants an interrupt (virtio 1.2, 2.7.10).
        fence(Ordering::SeqCst);
        self.wants_interrupt(ram, old, new)
    }

    fn wants_interrupt(&mut self, ram: &Ram, old: u16, new: u16) -> bool {
        let avail = self.queue.avail_ring();
        if !self.queue.event_idx_enabled() {
            let flags = ram.load::<u16>(GuestAddress(avail), Ordering::Relaxed);
            return flags.is_ok_and(|flags| u16::from_le(flags) & AVAIL_NO_INTERRUPT == 0);
        }
        let offset = 4 + u64::from(self.queue.size()) * 2;
        let at = GuestAddress(avail.wrapping_add(offset));
        match ram.load::<u16>(at, Ordering::Relaxed) {
            Ok(event) => {
                let event = u16::from_le(event);
                new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
            }
            Err(_) => {
                self.fault = true;
                false
            }
        }
    }

    /// Asks the driver for a notification when it adds a chain after all those seen so far. Chains that were put back
    /// count as seen, because the driver has already sent a notification for them. Returns true if a new chain has
    /// arrived in the meantime: the caller must then pop again. Does nothing and returns false after the turn was cut,
    /// because another turn follows anyway, and if the queue is not usable.
    pub(super) fn await_kick(&mut self, ram: &Ram) -> bool {
        if !self.usable() || self.turn.cut {
            return false;
        }
        let next = self.queue.next_avail();
        self.queue.set_next_avail(next.wrapping_add(self.undone));
        let more = self.queue.enable_notification(ram);
        self.queue.set_next_avail(next);
        self.fault |= more.is_err();
        more.unwrap_or(false)
    }

    pub(super) fn state(&self) -> QueueState {
        QueueState {
            size: self.queue.size(),
            ready: self.queue.ready(),
            fault: self.fault,
            desc_table: self.queue.desc_table(),
            avail_ring: self.queue.avail_ring(),
            used_ring: self.queue.used_ring(),
            next_avail: self.queue.next_avail(),
            next_used: self.queue.next_used(),
        }
    }

    /// Restores a queue from a snapshot after checking every number.
    pub(super) fn restore(
        max_size: u16,
        state: &QueueState,
        event_idx: bool,
        ram: &Ram,
    ) -> Result<Self, DeviceStateError> {
        let mut queue = Queue::try_from(virtio_queue::QueueState {
            max_size,
            next_avail: state.next_avail,
            next_used: state.next_used,
            event_idx_enabled: event_idx,
            size: state.size,
            ready: state.ready,
            desc_table: state.desc_table,
            avail_ring: state.avail_ring,
            used_ring: state.used_ring,
        })
        .map_err(|_| DeviceStateError::Queue { state: *state })?;
        if state.ready && !queue.is_valid(ram) {
            return Err(DeviceStateError::Queue { state: *state });
        }
        queue.set_ready(state.ready);
        Ok(Self {
            queue,
            staged: 0,
            undone: 0,
            fault: state.fault,
            turn: Turn::default(),
        })
    }
}

/// Collects a chain's readable and writable buffers. Returns `None` unless all of them are in guest memory, the chain
/// has an end and at most [`MAX_SEGMENTS`] descriptors, and no readable descriptor follows a writable one
/// (virtio 1.2, 2.7.4.2).
fn gather<'a>(
    chain: virtio_queue::DescriptorChain<&'a Ram>,
    ram: &'a Ram,
) -> Option<(Buffers<'a>, Buffers<'a>)> {
    let mut readable = Buffers::default();
    let mut writable = Buffers::default();
    let mut ended = false;
    for (index, descriptor) in chain.enumerate() {
        if index >= MAX_SEGMENTS {
            return None;
        }
        let len = usize::try_from(descriptor.len()).ok()?;
        let into = match (descriptor.is_write_only(), writable.len()) {
            (true, _) => &mut writable,
            (false, 0) => &mut readable,
            (false, _) => return None,
        };
        for slice in ram.get_slices(descriptor.addr(), len) {
            into.push(slice.ok()?);
        }
        if readable.segments() + writable.segments() > MAX_SEGMENTS {
            return None;
        }
        ended = !descriptor.has_next();
    }
    ended.then_some((readable, writable))
}
