//! The virtio-mmio transport (virtio 1.2, 4.2): registers, feature negotiation, device status.
//!
//! ```text
//! driver ── write ──► Transport::write ──► Action (activate, notify, reset) ──► device
//!        ◄─ read ──── 512 bytes of the register page, rendered after each change
//! ```
//! The guest's reads do not reach this module: they return the rendered bytes. Therefore `InterruptStatus` is always 1,
//! and a device cannot announce a change of its configuration.

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_mmio as reg;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use super::queue::{Area, Half, Virtqueue};
use super::ram::Ram;
use super::state::{DeviceStateError, SlotState};

/// Bytes of the register page per device slot.
pub(super) const SLOT_BYTES: usize = 0x200;
/// Offset of the device's configuration in a slot.
const CONFIG: usize = 0x100;

const MAGIC: u32 = 0x7472_6976;
const VENDOR: u32 = u32::from_le_bytes(*b"CUBE");
/// The four shared-memory registers, from `SHMLenLow` on.
const SHM: std::ops::Range<usize> = 0x0b0..0x0c0;

const STATUS_FEATURES_OK: u32 = 8;
const STATUS_DRIVER_OK: u32 = 4;
const STATUS_NEEDS_RESET: u32 = 0x40;
/// ACKNOWLEDGE, DRIVER, DRIVER_OK, FEATURES_OK, NEEDS_RESET, FAILED.
const STATUS_ALL: u32 = 1 | 2 | STATUS_DRIVER_OK | STATUS_FEATURES_OK | STATUS_NEEDS_RESET | 0x80;

/// Features of every device: virtio 1, and suppression of notifications and interrupts by index.
pub(super) const COMMON_FEATURES: u64 = feature(VIRTIO_F_VERSION_1) | EVENT_IDX;
const EVENT_IDX: u64 = feature(VIRTIO_RING_F_EVENT_IDX);

/// The mask of a feature bit.
pub(super) const fn feature(bit: u32) -> u64 {
    1 << bit
}

/// The constant part of a device's registers.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    /// Virtio device type (virtio 1.2, 5).
    pub(super) device_id: u32,
    pub(super) features: u64,
    /// Largest size of each queue.
    pub(super) queue_sizes: &'static [u16],
    /// The configuration space, at most 256 bytes.
    pub(super) config: Vec<u8>,
}

/// The action that a register write requires of the bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Nothing,
    /// Render the registers again.
    Render,
    /// Activate the device: the driver has finished its initialization and accepted these features.
    Activate {
        features: u64,
    },
    /// Serve this queue.
    Notify {
        queue: usize,
    },
    /// Reset the device.
    Reset,
}

#[derive(Debug)]
pub(super) struct Transport {
    identity: Identity,
    status: u32,
    features: u64,
    device_features_sel: u32,
    driver_features_sel: u32,
    queue_sel: u32,
    pub(super) queues: Vec<Virtqueue>,
}

impl Transport {
    pub(super) fn new(identity: Identity) -> Self {
        let queues = identity
            .queue_sizes
            .iter()
            .map(|size| Virtqueue::new(*size));
        let queues = queues.collect();
        Self {
            identity,
            status: 0,
            features: 0,
            device_features_sel: 0,
            driver_features_sel: 0,
            queue_sel: 0,
            queues,
        }
    }

    /// Whether the driver has activated the device and no reset is needed. Otherwise its queues must not be accessed.
    pub(super) fn active(&self) -> bool {
        self.status & STATUS_DRIVER_OK != 0 && self.status & STATUS_NEEDS_RESET == 0
    }

    /// The features that the driver accepted. They are final only while [`Self::active`] is true.
    pub(super) fn features(&self) -> u64 {
        self.features
    }

    /// Handles a register write. `offset` is relative to the slot.
    pub(super) fn write(&mut self, offset: u32, value: u32, ram: &Ram) -> Action {
        match offset {
            reg::VIRTIO_MMIO_QUEUE_NOTIFY => return self.notify(value),
            reg::VIRTIO_MMIO_INTERRUPT_ACK => return Action::Nothing,
            reg::VIRTIO_MMIO_STATUS => return self.set_status(value),
            reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL => self.device_features_sel = value,
            reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL => self.driver_features_sel = value,
            reg::VIRTIO_MMIO_DRIVER_FEATURES => self.set_features(value),
            reg::VIRTIO_MMIO_QUEUE_SEL => self.queue_sel = value,
            _ => return self.write_queue(offset, value, ram),
        }
        Action::Render
    }

    fn notify(&self, value: u32) -> Action {
        match usize::try_from(value) {
            Ok(queue) if queue < self.queues.len() && self.active() => Action::Notify { queue },
            _ => Action::Nothing,
        }
    }

    fn set_features(&mut self, value: u32) {
        if self.status & STATUS_FEATURES_OK != 0 {
            return;
        }
        let value = u64::from(value);
        match self.driver_features_sel {
            0 => self.features = (self.features & !0xffff_ffff) | value,
            1 => self.features = (self.features & 0xffff_ffff) | (value << 32),
            _ => {}
        }
    }

    fn set_status(&mut self, value: u32) -> Action {
        if value == 0 {
            self.reset();
            return Action::Reset;
        }
        let kept = self.status & STATUS_NEEDS_RESET;
        let mut status = (value & STATUS_ALL & !STATUS_NEEDS_RESET) | kept;
        if status & self.status != self.status {
            return Action::Nothing;
        }
        let fresh = status & !self.status;
        if fresh & STATUS_FEATURES_OK != 0 && !self.features_acceptable() {
            status &= !STATUS_FEATURES_OK;
        }
        if status & STATUS_FEATURES_OK == 0 {
            status &= !STATUS_DRIVER_OK;
        }
        let activates = status & !self.status & STATUS_DRIVER_OK != 0;
        self.status = status;
        if activates && self.active() {
            return Action::Activate {
                features: self.features,
            };
        }
        Action::Render
    }

    fn features_acceptable(&self) -> bool {
        let modern = self.features & feature(VIRTIO_F_VERSION_1) != 0;
        modern && self.features & !self.identity.features == 0
    }

    fn write_queue(&mut self, offset: u32, value: u32, ram: &Ram) -> Action {
        let event_idx = self.features & EVENT_IDX != 0;
        let negotiated = self.status & STATUS_FEATURES_OK != 0;
        let Some(queue) = selected(self.queue_sel).and_then(|index| self.queues.get_mut(index))
        else {
            return Action::Nothing;
        };
        if offset == reg::VIRTIO_MMIO_QUEUE_READY {
            match (value, queue.ready()) {
                (0, true) => queue.reset(),
                (1, false) if negotiated => {
                    queue.set_event_idx(event_idx);
                    queue.enable(ram);
                }
                _ => {}
            }
            self.note_faults();
            return Action::Render;
        }
        if !queue.ready() {
            set_up(queue, offset, value);
        }
        Action::Nothing
    }

    /// Sets DEVICE_NEEDS_RESET if a queue is faulty. Returns whether that changed the status.
    pub(super) fn note_faults(&mut self) -> bool {
        let before = self.status;
        if self.queues.iter().any(Virtqueue::fault) {
            self.status |= STATUS_NEEDS_RESET;
        }
        self.status != before
    }

    fn reset(&mut self) {
        self.status = 0;
        self.features = 0;
        self.device_features_sel = 0;
        self.driver_features_sel = 0;
        self.queue_sel = 0;
        for queue in &mut self.queues {
            queue.reset();
        }
    }

    /// Writes the values that the driver reads to the slot's part of the register page.
    pub(super) fn render(&self, page: &mut [u8]) {
        page.fill(0);
        let features = match self.device_features_sel {
            0 => self.identity.features & 0xffff_ffff,
            1 => self.identity.features >> 32,
            _ => 0,
        };
        let queue = selected(self.queue_sel).and_then(|index| self.queues.get(index));
        put(page, reg::VIRTIO_MMIO_MAGIC_VALUE, MAGIC);
        put(page, reg::VIRTIO_MMIO_VERSION, 2);
        put(page, reg::VIRTIO_MMIO_DEVICE_ID, self.identity.device_id);
        put(page, reg::VIRTIO_MMIO_VENDOR_ID, VENDOR);
        put(page, reg::VIRTIO_MMIO_DEVICE_FEATURES, low_half(features));
        put(
            page,
            reg::VIRTIO_MMIO_QUEUE_NUM_MAX,
            queue.map_or(0, |queue| u32::from(queue.max_size())),
        );
        put(
            page,
            reg::VIRTIO_MMIO_QUEUE_READY,
            queue.map_or(0, |queue| u32::from(queue.ready())),
        );
        put(page, reg::VIRTIO_MMIO_INTERRUPT_STATUS, 1);
        put(page, reg::VIRTIO_MMIO_STATUS, self.status);
        // A length of all ones means that there is no shared memory (virtio 1.2, 4.2.2).
        page[SHM].fill(0xff);
        let config = &self.identity.config;
        page[CONFIG..CONFIG + config.len()].copy_from_slice(config);
    }

    pub(super) fn state(&self) -> SlotState {
        SlotState {
            status: self.status,
            features: self.features,
            device_features_sel: self.device_features_sel,
            driver_features_sel: self.driver_features_sel,
            queue_sel: self.queue_sel,
            queues: self.queues.iter().map(Virtqueue::state).collect(),
        }
    }

    /// Restores device slot `slot` from a snapshot.
    pub(super) fn restore(
        &mut self,
        slot: usize,
        state: &SlotState,
        ram: &Ram,
    ) -> Result<(), DeviceStateError> {
        self.check(slot, state)?;
        let event_idx = state.features & EVENT_IDX != 0;
        let sizes = self.identity.queue_sizes.iter().zip(&state.queues);
        self.queues = sizes
            .map(|(size, queue)| Virtqueue::restore(*size, queue, event_idx, ram))
            .collect::<Result<_, _>>()?;
        self.status = state.status;
        self.features = state.features;
        self.device_features_sel = state.device_features_sel;
        self.driver_features_sel = state.driver_features_sel;
        self.queue_sel = state.queue_sel;
        self.note_faults();
        Ok(())
    }

    fn check(&self, slot: usize, state: &SlotState) -> Result<(), DeviceStateError> {
        let expected = self.identity.queue_sizes.len();
        if state.queues.len() != expected {
            let found = state.queues.len();
            return Err(DeviceStateError::QueueCount {
                slot,
                found,
                expected,
            });
        }
        let negotiated = state.status & STATUS_FEATURES_OK != 0;
        let running = state.status & STATUS_DRIVER_OK != 0;
        if state.status & !STATUS_ALL != 0 || (running && !negotiated) {
            let status = state.status;
            return Err(DeviceStateError::Status { slot, status });
        }
        let offered = self.identity.features;
        let modern = state.features & feature(VIRTIO_F_VERSION_1) != 0;
        if negotiated && (state.features & !offered != 0 || !modern) {
            let features = state.features;
            return Err(DeviceStateError::Features {
                slot,
                features,
                offered,
            });
        }
        Ok(())
    }
}

fn set_up(queue: &mut Virtqueue, offset: u32, value: u32) {
    let (area, half) = match offset {
        reg::VIRTIO_MMIO_QUEUE_NUM => return queue.set_size(value),
        reg::VIRTIO_MMIO_QUEUE_DESC_LOW => (Area::Descriptors, Half::Low(value)),
        reg::VIRTIO_MMIO_QUEUE_DESC_HIGH => (Area::Descriptors, Half::High(value)),
        reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW => (Area::Available, Half::Low(value)),
        reg::VIRTIO_MMIO_QUEUE_AVAIL_HIGH => (Area::Available, Half::High(value)),
        reg::VIRTIO_MMIO_QUEUE_USED_LOW => (Area::Used, Half::Low(value)),
        reg::VIRTIO_MMIO_QUEUE_USED_HIGH => (Area::Used, Half::High(value)),
        _ => return,
    };
    queue.set_address(area, half);
}

fn selected(queue_sel: u32) -> Option<usize> {
    usize::try_from(queue_sel).ok()
}

fn put(page: &mut [u8], register: u32, value: u32) {
    let at = usize::try_from(register).unwrap_or(0);
    page[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn low_half(value: u64) -> u32 {
    u32::try_from(value & 0xffff_ffff).unwrap_or(0)
}
