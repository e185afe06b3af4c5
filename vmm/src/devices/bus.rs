//! The owner of all devices of a VM.

use std::fs::File;
use std::io;
use std::os::unix::net::UnixStream;

use vmm_control::LostFrames;

use super::backend::{BackendSpec, DeviceError};
use super::backlog::Backlog;
use super::block::Block;
use super::device::{Io, VirtioDevice};
use super::interrupts::Interrupts;
use super::layer::Disk;
use super::net::Net;
use super::queue::Virtqueue;
use super::ram::Ram;
use super::registers::{Action, SLOT_BYTES, Transport};
use super::rng::Rng;
use super::slots::{PAGE_BYTES, SLOT_STRIDE, SLOTS, Slot};
use super::state::{BusState, DeviceStateError};
use super::vsock::Vsock;
use crate::extents::Extents;
use crate::watch::{DeviceToken, Watch};

/// One piece of work for a device.
#[derive(Clone, Copy, Debug)]
enum Work {
    Activate { features: u64 },
    Notify { queue: usize },
    Ready { token: DeviceToken },
}

/// The devices of one VM.
#[derive(Debug)]
pub struct DeviceBus {
    transports: [Transport; SLOTS],
    root: Block,
    pub(super) layer: Block,
    net: Net,
    vsock: Vsock,
    rng: Rng,
    backlog: Backlog,
    /// The content of the register page.
    page: Box<[u8; PAGE_BYTES]>,
    page_changed: bool,
}

impl DeviceBus {
    /// Creates devices that no driver has initialized.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if a file, TAP or socket of `spec` cannot be used.
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
            backlog: Backlog::new(watch).map_err(|source| DeviceError::Backlog { source })?,
            page: Box::new([0; PAGE_BYTES]),
            page_changed: true,
        };
        for slot in Slot::ALL {
            bus.render(slot);
        }
        Ok(bus)
    }

    /// Creates devices in the state of a snapshot, on the files and sockets of `spec`. The guest receives a reset for
    /// each vsock stream of the snapshot. Every queue of an active device is served once, because the snapshot may have
    /// been taken before the device served the driver's last request.
    ///
    /// # Errors
    /// Returns the errors of [`DeviceBus::new`], and [`DeviceError::State`] if `state` is invalid or does not match the
    /// disks of `spec`.
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
        for slot in Slot::ALL {
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

    fn resume(&mut self, slot: Slot, ram: &Ram, watch: &mut Watch) -> Interrupts {
        let transport = &self.transports[slot.index()];
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

    /// The state for a snapshot. It is consistent, because devices work only inside the methods of the bus.
    #[must_use]
    pub fn state(&self) -> BusState {
        BusState {
            slots: self.transports.iter().map(Transport::state).collect(),
            root_sectors: self.root.sectors(),
            layer_sectors: self.layer.sectors(),
            vsock: self.vsock.state(),
        }
    }

    /// Number of device slots in use.
    #[must_use]
    pub fn count(&self) -> usize {
        SLOTS
    }

    /// Frames that the network device did not deliver.
    #[must_use]
    pub fn lost_frames(&self) -> LostFrames {
        self.net.lost_frames()
    }

    /// The content that the register page must have now.
    #[must_use]
    pub fn registers(&self) -> &[u8; PAGE_BYTES] {
        &self.page
    }

    /// Closes all vsock clients, so that none waits forever for a guest that has ended.
    pub fn hang_up(&mut self, watch: &mut Watch) {
        self.vsock.hang_up(watch);
    }

    /// Whether [`DeviceBus::registers`] changed since the last call. The caller must check after every method that
    /// takes `ram`, because serving a queue can change its device's status register.
    pub fn take_page_changed(&mut self) -> bool {
        std::mem::take(&mut self.page_changed)
    }

    /// Serves a read of the register page for a platform that traps such reads. Bytes outside the page read as zero.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let start = usize::try_from(offset).unwrap_or(PAGE_BYTES);
        if let Some(bytes) = self.page.get(start..) {
            let len = bytes.len().min(data.len());
            data[..len].copy_from_slice(&bytes[..len]);
        }
    }

    /// Handles a write to the register page at `offset`. A notification is served before this returns. A write that
    /// is not four aligned bytes, or that addresses no register, is ignored. Returns the slots whose interrupts the
    /// caller must raise.
    pub fn write(&mut self, offset: u64, data: &[u8], ram: &Ram, watch: &mut Watch) -> Interrupts {
        let Some((slot, register, value)) = decode(offset, data) else {
            return Interrupts::NONE;
        };
        match self.transports[slot.index()].write(register, value, ram) {
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

    /// Serves a ready descriptor. An event for a vsock stream that has been closed in the meantime is ignored.
    pub fn ready(&mut self, token: DeviceToken, ram: &Ram, watch: &mut Watch) -> Interrupts {
        let slot = match token {
            DeviceToken::Tap => Slot::Net,
            DeviceToken::VsockListener | DeviceToken::VsockStream(_) => Slot::Vsock,
            DeviceToken::Backlog => return self.serve_backlog(ram, watch),
        };
        self.run(slot, Work::Ready { token }, ram, watch)
    }

    /// Gives every queue of the backlog another turn.
    fn serve_backlog(&mut self, ram: &Ram, watch: &mut Watch) -> Interrupts {
        let mut interrupts = Interrupts::NONE;
        for (slot, queue) in self.backlog.take() {
            interrupts |= self.run(slot, Work::Notify { queue }, ram, watch);
        }
        interrupts
    }

    /// Connects `stream` to a guest port, like a client of the vsock socket, but without the `OK` line. If the guest
    /// refuses the connection, the stream is closed.
    pub fn connect_guest(
        &mut self,
        port: u32,
        stream: UnixStream,
        ram: &Ram,
        watch: &mut Watch,
    ) -> Interrupts {
        match self.vsock.connect_guest(port, stream, watch) {
            Some(token) => self.run(Slot::Vsock, Work::Ready { token }, ram, watch),
            None => Interrupts::NONE,
        }
    }

    /// The root image.
    #[must_use]
    pub fn root(&self) -> &File {
        self.root.disk().base()
    }

    /// Writes the layer as the guest sees it into `file`. The file gets the size of the disk, with holes where the
    /// layer's files have holes. Returns the number of bytes copied.
    ///
    /// # Errors
    /// Returns an error if the layer cannot be read or `file` cannot be written, for example because the host's disk is
    /// full. `file` is then incomplete.
    pub fn copy_layer_to(&self, file: &File) -> io::Result<u64> {
        self.layer.disk().copy_to(file)
    }

    /// Appends to `target` the layer's blocks that were written since the base or come from an earlier diff, whatever
    /// their content. Returns their positions in the layer.
    ///
    /// # Errors
    /// Returns an error if the layer cannot be read or `target` cannot be written, for example because the host's disk
    /// is full.
    pub fn save_layer_diff(&self, target: &mut dyn io::Write) -> io::Result<Extents> {
        self.layer.disk().save_diff(target)
    }

    fn run(&mut self, slot: Slot, work: Work, ram: &Ram, watch: &mut Watch) -> Interrupts {
        let (transport, device) = self.device(slot);
        let queues: &mut [Virtqueue] = if transport.active() {
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
        let mut wants_interrupt = false;
        let mut unfinished = Vec::new();
        for (index, queue) in io.queues.iter_mut().enumerate() {
            wants_interrupt |= queue.publish(ram);
            if queue.was_cut() {
                unfinished.push(index);
            }
        }
        if transport.note_faults() {
            self.render(slot);
        }
        for queue in unfinished {
            self.backlog.put(slot, queue);
        }
        Interrupts::of(slot.index(), wants_interrupt)
    }

    fn device(&mut self, slot: Slot) -> (&mut Transport, &mut dyn VirtioDevice) {
        let device: &mut dyn VirtioDevice = match slot {
            Slot::Root => &mut self.root,
            Slot::Layer => &mut self.layer,
            Slot::Net => &mut self.net,
            Slot::Vsock => &mut self.vsock,
            Slot::Rng => &mut self.rng,
        };
        (&mut self.transports[slot.index()], device)
    }

    fn render(&mut self, slot: Slot) {
        let start = slot.index() * SLOT_BYTES;
        self.transports[slot.index()].render(&mut self.page[start..start + SLOT_BYTES]);
        self.page_changed = true;
    }
}

/// The slot, the register's offset in the slot, and the value of a write. Returns `None` if the write is not four bytes
/// long and aligned, or lies beyond the last slot.
fn decode(offset: u64, data: &[u8]) -> Option<(Slot, u32, u32)> {
    let value = u32::from_le_bytes(data.try_into().ok()?);
    let slot = Slot::at(usize::try_from(offset / SLOT_STRIDE).ok()?)?;
    let register = u32::try_from(offset % SLOT_STRIDE).ok()?;
    (register % 4 == 0).then_some((slot, register, value))
}
