//! A guest driver for tests: initializes devices like Linux and fills their queues.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use vm_memory::{Bytes, GuestAddress};

use super::slots::Slot;
use super::{
    BackendSpec, BusState, DeviceBus, DeviceError, Interrupts, LayerDiff, Ram, SLOT_STRIDE,
};
use crate::watch::tests::test_watch;
use crate::watch::{Events, Token, Watch};

pub(super) const ROOT: usize = Slot::Root.index();
pub(super) const LAYER: usize = Slot::Layer.index();
pub(super) const NET: usize = Slot::Net.index();
pub(super) const VSOCK: usize = Slot::Vsock.index();
pub(super) const RNG: usize = Slot::Rng.index();

pub(super) const RAM_BYTES: usize = 16 << 20;
/// Start of the area for test data; the rings lie below it.
pub(super) const DATA: u64 = 4 << 20;
const DEADLINE: Duration = Duration::from_secs(20);

const STATUS: u64 = 0x70;

/// A descriptor of a chain: address and length.
#[derive(Clone, Copy, Debug)]
pub(super) enum Piece {
    Read(u64, u32),
    Write(u64, u32),
}

/// A VM without a vCPU: memory, devices and the driver's state.
pub(super) struct Guest {
    pub(super) ram: Ram,
    pub(super) bus: DeviceBus,
    pub(super) watch: Watch,
    pub(super) dir: TempDir,
    pub(super) raised: Interrupts,
}

/// The driver's side of a queue.
#[derive(Clone, Debug)]
pub(super) struct DriverQueue {
    slot: usize,
    index: u32,
    pub(super) size: u16,
    base: u64,
    avail_idx: u16,
    used_idx: u16,
    free: Vec<u16>,
    chains: Vec<Vec<u16>>,
}

pub(super) fn ram() -> Ram {
    Ram::from_ranges(&[(GuestAddress(0), RAM_BYTES)]).unwrap()
}

/// Creates a temporary file with this content.
pub(super) fn file_with(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

pub(super) fn spec(dir: &TempDir, root: &[u8], layer: &[u8], tap: Option<OwnedFd>) -> BackendSpec {
    BackendSpec {
        root: file_with(root),
        layer_base: file_with(layer),
        layer_diff: None,
        tap,
        vsock: UnixListener::bind(socket_path(dir)).unwrap().into(),
        scratch: tempfile::tempfile_in(dir.path()).unwrap(),
        layer_limit: None,
    }
}

fn socket_path(dir: &TempDir) -> PathBuf {
    dir.path().join("v.sock")
}

impl Guest {
    pub(super) fn new() -> Self {
        Self::with_disks(&[0; 8192], &[0; 8192])
    }

    pub(super) fn with_disks(root: &[u8], layer: &[u8]) -> Self {
        Self::with(root, layer, None)
    }

    pub(super) fn with_diff(layer: &[u8], diff: Option<LayerDiff>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut spec = spec(&dir, &[0; 4096], layer, None);
        spec.layer_diff = diff;
        Self::on(dir, spec)
    }

    pub(super) fn with_limit(layer: &[u8], limit: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut spec = spec(&dir, &[0; 4096], layer, None);
        spec.layer_limit = Some(limit);
        Self::on(dir, spec)
    }

    pub(super) fn with_scratch(layer: &[u8], scratch: File) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut spec = spec(&dir, &[0; 4096], layer, None);
        spec.scratch = scratch;
        Self::on(dir, spec)
    }

    pub(super) fn with(root: &[u8], layer: &[u8], tap: Option<OwnedFd>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let spec = spec(&dir, root, layer, tap);
        Self::on(dir, spec)
    }

    fn on(dir: TempDir, spec: BackendSpec) -> Self {
        let mut watch = test_watch();
        let bus = DeviceBus::new(spec, &mut watch).unwrap();
        Self {
            ram: ram(),
            bus,
            watch,
            dir,
            raised: Interrupts::NONE,
        }
    }

    /// A clone of this VM: the same memory, and new devices restored from `state`.
    pub(super) fn restore(self, state: &BusState) -> Result<Self, DeviceError> {
        let Self { ram, bus, .. } = self;
        drop(bus);
        let dir = tempfile::tempdir().unwrap();
        let mut watch = test_watch();
        let root = vec![0; usize::try_from(state.root_sectors).unwrap() * 512];
        let layer = vec![0; usize::try_from(state.layer_sectors).unwrap() * 512];
        let spec = spec(&dir, &root, &layer, None);
        let (bus, raised) = DeviceBus::restore(spec, state, &ram, &mut watch)?;
        Ok(Self {
            ram,
            bus,
            watch,
            dir,
            raised,
        })
    }

    pub(super) fn vsock_path(&self) -> PathBuf {
        socket_path(&self.dir)
    }

    pub(super) fn write(&mut self, slot: usize, register: u64, value: u32) {
        let offset = u64::try_from(slot).unwrap() * SLOT_STRIDE + register;
        self.raised |= self
            .bus
            .write(offset, &value.to_le_bytes(), &self.ram, &mut self.watch);
    }

    pub(super) fn read(&self, slot: usize, register: u64) -> u32 {
        let mut bytes = [0; 4];
        let offset = u64::try_from(slot).unwrap() * SLOT_STRIDE + register;
        self.bus.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    pub(super) fn status(&self, slot: usize) -> u32 {
        self.read(slot, STATUS)
    }

    /// The initialization sequence of virtio 1.2, 3.1.1. Accepts every offered feature except those in `refused`.
    pub(super) fn init(&mut self, slot: usize, refused: u64) -> Vec<DriverQueue> {
        assert_eq!(self.read(slot, 0), 0x7472_6976);
        assert_eq!(self.read(slot, 4), 2);
        self.write(slot, STATUS, 0);
        self.write(slot, STATUS, 1);
        self.write(slot, STATUS, 3);
        let taken = self.offered(slot) & !refused;
        for half in [0, 1] {
            self.write(slot, 0x24, half);
            let bits = u32::try_from((taken >> (32 * half)) & 0xffff_ffff).unwrap();
            self.write(slot, 0x20, bits);
        }
        self.write(slot, STATUS, 0xb);
        assert_eq!(self.status(slot), 0xb, "features were refused");
        let mut queues = Vec::new();
        loop {
            let index = u32::try_from(queues.len()).unwrap();
            self.write(slot, 0x30, index);
            let max = self.read(slot, 0x34);
            if max == 0 {
                break;
            }
            queues.push(self.init_queue(slot, index, u16::try_from(max).unwrap()));
        }
        self.write(slot, STATUS, 0xf);
        assert_eq!(self.status(slot), 0xf);
        queues
    }

    fn offered(&mut self, slot: usize) -> u64 {
        self.write(slot, 0x14, 1);
        let high = u64::from(self.read(slot, 0x10));
        self.write(slot, 0x14, 0);
        high << 32 | u64::from(self.read(slot, 0x10))
    }

    fn init_queue(&mut self, slot: usize, index: u32, size: u16) -> DriverQueue {
        let queue = DriverQueue::new(slot, index, size);
        assert_eq!(self.read(slot, 0x44), 0, "queue in use");
        self.write(slot, 0x38, u32::from(size));
        let areas = [
            (0x80, queue.desc()),
            (0x90, queue.avail()),
            (0xa0, queue.used()),
        ];
        for (register, address) in areas {
            self.write(slot, register, u32::try_from(address).unwrap());
            self.write(slot, register + 4, 0);
        }
        self.write(slot, 0x44, 1);
        assert_eq!(self.read(slot, 0x44), 1);
        queue
    }

    pub(super) fn notify(&mut self, queue: &DriverQueue) {
        self.write(queue.slot, 0x50, queue.index);
    }

    /// Waits up to `timeout` and serves the ready descriptors. Returns their number.
    pub(super) fn poll(&mut self, timeout: Duration) -> usize {
        let mut events = Events::default();
        self.watch.wait(&mut events, Some(timeout)).unwrap();
        for token in events.tokens() {
            if let Token::Device(token) = token {
                self.raised |= self.bus.ready(token, &self.ram, &mut self.watch);
            }
        }
        events.len()
    }

    /// Serves ready descriptors until `done` returns true. Panics if that takes too long.
    pub(super) fn until(&mut self, mut done: impl FnMut(&mut Self) -> bool) {
        let deadline = Instant::now() + DEADLINE;
        while !done(self) {
            assert!(Instant::now() < deadline, "condition not met in time");
            self.poll(Duration::from_millis(1));
        }
    }

    pub(super) fn put(&self, at: u64, bytes: &[u8]) {
        self.ram.write_slice(bytes, GuestAddress(at)).unwrap();
    }

    pub(super) fn get(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.ram.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        bytes
    }
}

impl DriverQueue {
    fn new(slot: usize, index: u32, size: u16) -> Self {
        let base = 0x10000 + u64::try_from(slot).unwrap() * 0x20000 + u64::from(index) * 0x8000;
        Self {
            slot,
            index,
            size,
            base,
            avail_idx: 0,
            used_idx: 0,
            free: (0..size).rev().collect(),
            chains: vec![Vec::new(); usize::from(size)],
        }
    }

    pub(super) fn desc(&self) -> u64 {
        self.base
    }

    pub(super) fn avail(&self) -> u64 {
        self.base + 0x4000
    }

    pub(super) fn used(&self) -> u64 {
        self.base + 0x6000
    }

    pub(super) fn room(&self) -> usize {
        self.free.len()
    }

    /// The descriptors of an offered chain.
    pub(super) fn chain(&self, head: u16) -> &[u16] {
        &self.chains[usize::from(head)]
    }

    /// Offers a chain. Returns its head.
    pub(super) fn add(&mut self, ram: &Ram, pieces: &[Piece]) -> u16 {
        let ids: Vec<u16> = pieces.iter().map(|_| self.free.pop().unwrap()).collect();
        for (at, piece) in pieces.iter().enumerate() {
            let next = ids.get(at + 1).copied();
            let (addr, len, write) = match *piece {
                Piece::Read(addr, len) => (addr, len, 0),
                Piece::Write(addr, len) => (addr, len, 2),
            };
            let flags = write | u16::from(next.is_some());
            self.put_desc(ram, ids[at], addr, len, flags, next.unwrap_or(0));
        }
        let head = ids[0];
        self.chains[usize::from(head)] = ids;
        self.offer(ram, head);
        head
    }

    pub(super) fn put_desc(&self, ram: &Ram, id: u16, addr: u64, len: u32, flags: u16, next: u16) {
        let at = self.desc() + u64::from(id) * 16;
        ram.write_obj(addr, GuestAddress(at)).unwrap();
        ram.write_obj(len, GuestAddress(at + 8)).unwrap();
        ram.write_obj(flags, GuestAddress(at + 12)).unwrap();
        ram.write_obj(next, GuestAddress(at + 14)).unwrap();
    }

    /// Puts a head into the available ring and asks for an interrupt after the next used entry.
    pub(super) fn offer(&mut self, ram: &Ram, head: u16) {
        let at = self.avail() + 4 + u64::from(self.avail_idx % self.size) * 2;
        ram.write_obj(head, GuestAddress(at)).unwrap();
        self.avail_idx = self.avail_idx.wrapping_add(1);
        ram.write_obj(self.avail_idx, GuestAddress(self.avail() + 2))
            .unwrap();
    }

    /// Number of chains returned since the initialization, modulo 2^16.
    pub(super) fn given_back(&self, ram: &Ram) -> u16 {
        ram.read_obj(GuestAddress(self.used() + 2)).unwrap()
    }

    /// The next returned chain, and the number of bytes written to it.
    pub(super) fn take(&mut self, ram: &Ram) -> Option<(u16, u32)> {
        let device: u16 = ram.read_obj(GuestAddress(self.used() + 2)).unwrap();
        if device == self.used_idx {
            return None;
        }
        let at = self.used() + 4 + u64::from(self.used_idx % self.size) * 8;
        let head: u32 = ram.read_obj(GuestAddress(at)).unwrap();
        let len: u32 = ram.read_obj(GuestAddress(at + 4)).unwrap();
        self.used_idx = self.used_idx.wrapping_add(1);
        let event = GuestAddress(self.avail() + 4 + u64::from(self.size) * 2);
        ram.write_obj(self.used_idx, event).unwrap();
        let head = u16::try_from(head).unwrap();
        let ids = std::mem::take(&mut self.chains[usize::from(head)]);
        self.free.extend(ids);
        Some((head, len))
    }
}
