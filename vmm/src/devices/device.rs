//! The interface between the bus and a device.

use super::queue::Virtqueue;
use super::ram::Ram;
use crate::watch::{DeviceToken, Watch};

/// The resources that a device may use during one call. `queues` is empty unless the device is active.
pub(super) struct Io<'a> {
    pub(super) queues: &'a mut [Virtqueue],
    pub(super) ram: &'a Ram,
    pub(super) watch: &'a mut Watch,
}

/// A device that a driver uses through the virtio-mmio transport.
pub(super) trait VirtioDevice {
    /// The driver has accepted `features` and starts to use the device.
    fn activate(&mut self, _features: u64, _io: &mut Io<'_>) {}
    /// The driver has reset the device.
    fn reset(&mut self, _watch: &mut Watch) {}
    /// The driver has added buffers to the queue with this index.
    fn notify(&mut self, queue: usize, io: &mut Io<'_>);
    /// A descriptor of the device became ready. The event may be stale: the device may have used the descriptor since.
    fn ready(&mut self, _token: DeviceToken, _io: &mut Io<'_>) {}
}
