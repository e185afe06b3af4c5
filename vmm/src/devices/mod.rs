//! The virtio devices of a microVM, behind one page of registers.
//!
//! ```text
//! slot   0 root disk (read-only)   1 writable layer   2 net   3 vsock   4 entropy
//! page   slot i at offset i * 0x200; the guest reads it without an exit, a write comes to DeviceBus::write
//! ```
//! [`DeviceBus`] owns all of it: the transports, the devices, their descriptors and the bytes of the page.
//! It runs on the vCPU's thread between two `KVM_RUN`s: a notification is served before the guest goes on,
//! a ready descriptor when [`Watch`] reports it. It never blocks, except that a disk read may wait for the
//! host's disk when the page cache has no copy (`RWF_NOWAIT` could hand such reads to a helper thread). Each
//! serving is a turn of bounded work; a queue with more gets another turn after everything else that is ready.
//!
//! What must never happen: a reference into guest memory, and a panic, unbounded work or unbounded memory
//! that a guest can cause. A driver that breaks the rules of its queues gets its device switched off
//! (`DEVICE_NEEDS_RESET`) until it resets it.

mod block;
mod buffers;
mod console;
#[doc(hidden)]
pub mod fuzz;
mod interrupts;
mod layer;
mod leftover;
mod net;
mod queue;
mod registers;
mod rng;
pub mod state;
mod sys;
mod vsock;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use thiserror::Error;

pub use console::ConsoleLog;
pub use interrupts::Interrupts;
pub use state::{BusState, DeviceStateError};

use crate::extents::Extents;
use crate::watch::Watch;
use block::Block;
use layer::Disk;
pub use layer::LayerDiff;
use leftover::Leftover;
use net::Net;
use queue::Virtqueue;
use registers::{Action, SLOT_BYTES, Transport};
use rng::Rng;
use vsock::Vsock;

/// Guest memory.
#[cfg(not(fuzzing))]
pub type Ram = vm_memory::GuestMemoryMmap<()>;
/// Guest memory with another vCPU that writes to it.
#[cfg(fuzzing)]
pub type Ram = fuzz::Contested;

/// Bytes of the register page.
pub const PAGE_BYTES: usize = 4096;
/// Tokens of [`Watch`] from this one on belong to the devices; smaller ones are free for others.
pub const FIRST_TOKEN: u64 = 1 << 32;
/// Offset of `QueueNotify` in a slot (virtio 1.2, 4.2.2), for a platform that traps notifications apart.
pub const QUEUE_NOTIFY: u64 = 0x50;
/// Offset of `InterruptACK` in a slot: writes to it mean nothing here and may be swallowed.
pub const INTERRUPT_ACK: u64 = 0x64;
/// Distance of two slots in the register page.
pub const SLOT_STRIDE: u64 = 0x200;

const ROOT: usize = 0;
const LAYER: usize = 1;
const NET: usize = 2;
const VSOCK: usize = 3;
const RNG: usize = 4;
/// Slots in use, from 0 on.
pub const SLOTS: usize = 5;

/// What the devices stand on. The descriptors come from whoever started this process.
#[derive(Debug)]
pub struct BackendSpec {
    /// The root image, opened for reading.
    pub root: File,
    /// What the writable layer starts from, opened for reading.
    pub layer_base: File,
    /// What is laid over that, if the VM is restored from a diff.
    pub layer_diff: Option<LayerDiff>,
    /// A TAP with `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`; without one the guest has a card that nobody hears.
    pub tap: Option<OwnedFd>,
    /// The listening unix socket at which hosts connect to guest ports.
    pub vsock: OwnedFd,
    /// The layer's private file, empty and unlinked. It should be on a disk: in a tmpfs the guest's disk is the
    /// host's memory.
    pub scratch: File,
    /// Most bytes that the layer's private file may take; absent: the size of the layer. A write beyond it is
    /// an I/O error in the guest.
    pub layer_limit: Option<u64>,
}

/// Why the devices could not be set up.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// A disk file cannot be examined.
    #[error("cannot examine the {disk} disk")]
    Disk {
        /// `root` or `layer`.
        disk: &'static str,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The network descriptor is no usable TAP.
    #[error("cannot use the network descriptor as a TAP")]
    Tap {
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The TAP would hand out frames without the header that carries offloads.
    #[error("TAP has flags {flags:#x}: IFF_TAP, IFF_NO_PI and IFF_VNET_HDR must be set")]
    TapFlags {
        /// `IFF_…` flags found.
        flags: i32,
    },
    /// The socket for streams cannot be made.
    #[error("cannot listen for streams to the guest")]
    Listen {
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The pipe by which the devices wake their own thread cannot be made.
    #[error("cannot make the pipe for queues that wait for another turn")]
    Leftover {
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A snapshot's state makes no sense.
    #[error(transparent)]
    State(#[from] DeviceStateError),
}

/// What a device may touch while it works. The queues are empty while the driver does not run the device.
struct Io<'a> {
    queues: &'a mut [Virtqueue],
    ram: &'a Ram,
    watch: &'a mut Watch,
}

/// A device behind the transport.
trait VirtioDevice {
    /// The driver has taken these features and starts.
    fn activate(&mut self, _features: u64, _io: &mut Io<'_>) {}
    /// The driver forgets the device.
    fn reset(&mut self, _watch: &mut Watch) {}
    /// The driver put something into a queue.
    fn notify(&mut self, queue: usize, io: &mut Io<'_>);
    /// A descriptor of the device became ready.
    fn ready(&mut self, _token: u64, _io: &mut Io<'_>) {}
}

/// Something that a device shall do.
#[derive(Clone, Copy)]
enum Work {
    Activate { features: u64 },
    Notify { queue: usize },
    Ready { token: u64 },
}

/// The devices of one VM.
#[derive(Debug)]
pub struct DeviceBus {
    transports: [Transport; SLOTS],
    root: Block,
    layer: Block,
    net: Net,
    vsock: Vsock,
    rng: Rng,
    leftover: Leftover,
    page: Box<[u8; PAGE_BYTES]>,
    page_changed: bool,
}

impl DeviceBus {
    /// Devices that no driver has touched yet.
    ///
    /// # Errors
    /// A file, TAP or socket of `spec` cannot be used.
    pub fn new(spec: BackendSpec, watch: &mut Watch) -> Result<Self, DeviceError> {
        let disk = |file, private, disk| {
            Disk::new(file, private).map_err(|source| DeviceError::Disk { disk, source })
        };
        let root = Block::new(disk(spec.root, None, "root")?, "root");
        let layer = disk(spec.layer_base, Some(spec.scratch), "layer")?
            .with_diff(spec.layer_diff)
            .with_limit(spec.layer_limit);
        let layer = Block::new(layer, "layer");
        let net = Net::new(spec.tap, watch)?;
        let vsock = Vsock::new(spec.vsock, watch)?;
        let transports = [
            root.identity(),
            layer.identity(),
            Net::identity(),
            Vsock::identity(),
            Rng::identity(),
        ];
        let mut bus = Self {
            transports: transports.map(Transport::new),
            root,
            layer,
            net,
            vsock,
            rng: Rng,
            leftover: Leftover::new(watch).map_err(|source| DeviceError::Leftover { source })?,
            page: Box::new([0; PAGE_BYTES]),
            page_changed: true,
        };
        (0..SLOTS).for_each(|slot| bus.render(slot));
        Ok(bus)
    }

    /// Devices as a snapshot left them, on new descriptors. Streams of the snapshot are reset towards the
    /// guest, and every queue is served once: what the driver put into it may have been left.
    ///
    /// # Errors
    /// As [`DeviceBus::new`], and when a number of `state` cannot be true.
    pub fn restore(
        spec: BackendSpec,
        state: &BusState,
        ram: &Ram,
        watch: &mut Watch,
    ) -> Result<(Self, Interrupts), DeviceError> {
        let mut bus = Self::new(spec, watch)?;
        bus.check(state)?;
        for (slot, (transport, slot_state)) in
            bus.transports.iter_mut().zip(&state.slots).enumerate()
        {
            transport.restore(slot, slot_state, ram)?;
        }
        bus.vsock.restore(&state.vsock)?;
        let mut interrupts = Interrupts::NONE;
        for slot in 0..SLOTS {
            interrupts |= bus.resume(slot, ram, watch);
            bus.render(slot);
        }
        Ok((bus, interrupts))
    }

    fn check(&self, state: &BusState) -> Result<(), DeviceStateError> {
        if state.slots.len() != SLOTS {
            let found = state.slots.len();
            let expected = SLOTS;
            return Err(DeviceStateError::SlotCount { found, expected });
        }
        let disks = [
            ("root", self.root.sectors(), state.root_sectors),
            ("layer", self.layer.sectors(), state.layer_sectors),
        ];
        for (disk, found, expected) in disks {
            if found != expected {
                return Err(DeviceStateError::DiskSize {
                    disk,
                    found,
                    expected,
                });
            }
        }
        Ok(())
    }

    fn resume(&mut self, slot: usize, ram: &Ram, watch: &mut Watch) -> Interrupts {
        let transport = &self.transports[slot];
        if !transport.active() {
            return Interrupts::NONE;
        }
        let features = transport.features();
        let queues = transport.queues.len();
        let mut interrupts = self.run(slot, Work::Activate { features }, ram, watch);
        for queue in 0..queues {
            interrupts |= self.run(slot, Work::Notify { queue }, ram, watch);
        }
        interrupts
    }

    /// What a snapshot keeps. Taken between two `KVM_RUN`s, when no device works.
    #[must_use]
    pub fn state(&self) -> BusState {
        BusState {
            slots: self.transports.iter().map(Transport::state).collect(),
            root_sectors: self.root.sectors(),
            layer_sectors: self.layer.sectors(),
            vsock: self.vsock.state(),
        }
    }

    /// Slots in use, from 0 on.
    #[must_use]
    pub fn count(&self) -> usize {
        SLOTS
    }

    /// What the register page must hold now.
    #[must_use]
    pub fn registers(&self) -> &[u8; PAGE_BYTES] {
        &self.page
    }

    /// Closes all streams: the guest is over, and who waits for it shall not wait for ever.
    pub fn hang_up(&mut self, watch: &mut Watch) {
        VirtioDevice::reset(&mut self.vsock, watch);
    }

    /// Whether [`DeviceBus::registers`] changed since the last call. Asked after every call that takes
    /// `ram`: even serving a queue can switch a device off.
    pub fn take_page_changed(&mut self) -> bool {
        std::mem::take(&mut self.page_changed)
    }

    /// Serves a read of the register page on a platform that traps reads; zeros outside of it.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let start = usize::try_from(offset).unwrap_or(PAGE_BYTES);
        if let Some(bytes) = self.page.get(start..) {
            let len = bytes.len().min(data.len());
            data[..len].copy_from_slice(&bytes[..len]);
        }
    }

    /// Takes a write to the register page at `offset`; a notification is served before this returns.
    /// Writes that are not of 4 aligned bytes, or mean nothing, are ignored. Returns the slots that want
    /// their interrupt.
    pub fn write(&mut self, offset: u64, data: &[u8], ram: &Ram, watch: &mut Watch) -> Interrupts {
        let Some((slot, register, value)) = decode(offset, data) else {
            return Interrupts::NONE;
        };
        match self.transports[slot].write(register, value, ram) {
            Action::Nothing => Interrupts::NONE,
            Action::Notify { queue } => self.run(slot, Work::Notify { queue }, ram, watch),
            Action::Render => {
                self.render(slot);
                Interrupts::NONE
            }
            Action::Activate { features } => {
                let interrupts = self.run(slot, Work::Activate { features }, ram, watch);
                self.render(slot);
                interrupts
            }
            Action::Reset => {
                self.device(slot).1.reset(watch);
                self.render(slot);
                Interrupts::NONE
            }
        }
    }

    /// Whether a token of the watch belongs to a device.
    #[must_use]
    pub fn owns(token: u64) -> bool {
        token >= FIRST_TOKEN
    }

    /// Serves a ready descriptor. A token that no device knows any more is ignored: events may be older
    /// than what happened to their descriptor.
    pub fn ready(&mut self, token: u64, ram: &Ram, watch: &mut Watch) -> Interrupts {
        if !Self::owns(token) {
            return Interrupts::NONE;
        }
        if token == leftover::TOKEN {
            return self.go_on(ram, watch);
        }
        let slot = if token == net::TAP_TOKEN { NET } else { VSOCK };
        self.run(slot, Work::Ready { token }, ram, watch)
    }

    /// Gives every queue whose turn was cut another one.
    fn go_on(&mut self, ram: &Ram, watch: &mut Watch) -> Interrupts {
        let mut interrupts = Interrupts::NONE;
        for (slot, queue) in self.leftover.take() {
            interrupts |= self.run(slot, Work::Notify { queue }, ram, watch);
        }
        interrupts
    }

    /// Connects `stream` to a guest port, as if a client had come through the socket; no `OK` line is
    /// written. When the guest refuses, the stream is closed.
    pub fn connect_guest(
        &mut self,
        port: u32,
        stream: UnixStream,
        ram: &Ram,
        watch: &mut Watch,
    ) -> Interrupts {
        match self.vsock.connect_guest(port, stream, watch) {
            Some(token) => self.run(VSOCK, Work::Ready { token }, ram, watch),
            None => Interrupts::NONE,
        }
    }

    /// The root image.
    #[must_use]
    pub fn root(&self) -> &File {
        self.root.disk().base()
    }

    /// Writes the layer as the guest sees it into `file`, as large as the disk and with holes where
    /// nothing is. Returns the bytes of data in it.
    ///
    /// # Errors
    /// The system's, such as a full disk; `file` then holds a part.
    pub fn copy_layer_to(&self, file: &File) -> io::Result<u64> {
        self.layer.disk().copy_to(file)
    }

    /// Writes the blocks of the layer that are not its base's, one after another; says where they belong.
    ///
    /// # Errors
    /// The system's, such as a full disk.
    pub fn save_layer_diff(&self, target: &mut dyn io::Write) -> io::Result<Extents> {
        self.layer.disk().save_diff(target)
    }

    fn run(&mut self, slot: usize, work: Work, ram: &Ram, watch: &mut Watch) -> Interrupts {
        let (transport, device) = self.device(slot);
        let active = transport.active();
        let queues: &mut [Virtqueue] = if active {
            &mut transport.queues
        } else {
            &mut []
        };
        queues.iter_mut().for_each(Virtqueue::begin_turn);
        let mut io = Io { queues, ram, watch };
        match work {
            Work::Activate { features } => device.activate(features, &mut io),
            Work::Notify { queue } => device.notify(queue, &mut io),
            Work::Ready { token } => device.ready(token, &mut io),
        }
        let mut wants = false;
        let mut cut = Vec::new();
        for (index, queue) in io.queues.iter_mut().enumerate() {
            wants |= queue.publish(ram);
            if queue.was_cut() {
                cut.push(index);
            }
        }
        if transport.note_faults() {
            self.render(slot);
        }
        for queue in cut {
            self.leftover.put(slot, queue);
        }
        Interrupts::of(slot, wants)
    }

    fn device(&mut self, slot: usize) -> (&mut Transport, &mut dyn VirtioDevice) {
        let device: &mut dyn VirtioDevice = match slot {
            ROOT => &mut self.root,
            LAYER => &mut self.layer,
            NET => &mut self.net,
            VSOCK => &mut self.vsock,
            _ => &mut self.rng,
        };
        (&mut self.transports[slot.min(RNG)], device)
    }

    fn render(&mut self, slot: usize) {
        let bytes = &mut self.page[slot * SLOT_BYTES..(slot + 1) * SLOT_BYTES];
        self.transports[slot].render(bytes);
        self.page_changed = true;
    }
}

/// Which register of which slot a write means.
fn decode(offset: u64, data: &[u8]) -> Option<(usize, u32, u32)> {
    let value = u32::from_le_bytes(data.try_into().ok()?);
    let slot = usize::try_from(offset / SLOT_STRIDE).ok()?;
    let register = u32::try_from(offset % SLOT_STRIDE).ok()?;
    (slot < SLOTS && register % 4 == 0).then_some((slot, register, value))
}
