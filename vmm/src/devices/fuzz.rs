//! Devices with a driver that random bytes control: the entry points of the fuzz targets and of a property test.
//!
//! The bytes are a program against devices on empty disks: register writes, memory writes, whole chains, polls, host
//! clients, and, in fuzzing builds, writes of another vCPU between two accesses of the devices ([`rival`]). The devices
//! must not panic or hang, a step must do a bounded amount of work, a queue must return every chain that it took,
//! devices must work after a reset, and the final state must be restorable.

#[cfg(fuzzing)]
mod rival;

use std::ffi::CStr;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nix::libc;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket,
};
use vm_memory::{Bytes, GuestAddress};

use super::backend::BackendSpec;
use super::bus::DeviceBus;
use super::ram::Ram;
use super::slots::{QUEUE_NOTIFY, SLOT_STRIDE, Slot};
use super::state::{BusState, QueueState};
use crate::watch::{Events, KICK_SIGNAL, Token, Watch};

const RAM_BYTES: usize = 1 << 20;
const DISK_BYTES: u64 = 64 << 10;
/// Registers that drivers write.
const REGISTERS: [u64; 16] = [
    0x14, 0x20, 0x24, 0x30, 0x38, 0x44, 0x50, 0x50, 0x64, 0x70, 0x80, 0x84, 0x90, 0xa0, 0xa4, 0x100,
];
/// Addresses of the rings of initialized queues, and of the data of their chains.
const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const DATA: u64 = 0x4000;
/// Number of entries of an initialized queue.
const ENTRIES: u16 = 8;
/// A driver's whole initialization of queue 0 as (register, value), so that the fuzzer need not discover it.
const SET_UP: [(u64, u32); 11] = [
    (0x70, 0),
    (0x70, 3),
    (0x24, 1),
    (0x20, 1),
    (0x70, 0xb),
    (0x38, 8),
    (0x80, 0x1000),
    (0x90, 0x2000),
    (0xa0, 0x3000),
    (0x44, 1),
    (0x70, 0xf),
];
/// Lengths of descriptors.
const LENGTHS: [u32; 8] = [0, 1, 16, 44, 512, 4096, 0x1_0000, u32::MAX];
/// Limit on concurrent host clients.
const MAX_CLIENTS: usize = 8;
const QUEUE_SELECT: u64 = 0x30;

#[cfg(fuzzing)]
pub use rival::Contested;
#[cfg(fuzzing)]
pub(super) use rival::act;

extern "C" fn ignore(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// A VM without a vCPU.
struct Vm {
    ram: Ram,
    watch: Watch,
    bus: DeviceBus,
    clients: Vec<UnixStream>,
}

/// Runs the program in `bytes`.
///
/// # Panics
/// If the devices break a rule in the module's documentation, or the host has no free descriptor or memory.
pub fn drive(bytes: &[u8]) {
    let mut vm = Vm::new();
    for step in bytes.chunks(8) {
        let mut padded = [0; 8];
        padded[..step.len()].copy_from_slice(step);
        let before = vm.queues();
        vm.perform(padded);
        check_queues(&before, &vm.queues());
        #[cfg(fuzzing)]
        rival::step_over();
    }
    vm.serves_after_reset();
    let Vm {
        ram,
        mut watch,
        bus,
        ..
    } = vm;
    let state = bus.state();
    drop(bus);
    DeviceBus::restore(spec(), &state, &ram, &mut watch).expect("reached states can be restored");
}

/// Restores devices from any state and polls them once.
///
/// # Panics
/// Like [`drive`].
pub fn restore(state: &BusState) {
    let (ram, mut watch) = host();
    if let Ok((bus, _)) = DeviceBus::restore(spec(), state, &ram, &mut watch) {
        let clients = Vec::new();
        Vm {
            ram,
            watch,
            bus,
            clients,
        }
        .poll();
    }
}

/// Guest memory, and the epoll set for the devices.
fn host() -> (Ram, Watch) {
    vmm_sys_util::signal::register_signal_handler(KICK_SIGNAL, ignore).expect("signal handler");
    let ram = Ram::from_ranges(&[(GuestAddress(0), RAM_BYTES)]).expect("guest memory");
    #[cfg(fuzzing)]
    rival::begin(&ram);
    (ram, Watch::new().expect("epoll"))
}

/// Checks that a step returned as many chains to a ring as it took from it, unless the ring became faulty.
fn check_queues(before: &[QueueState], after: &[QueueState]) {
    for (old, new) in before.iter().zip(after) {
        let is_same = old.used_ring == new.used_ring && old.size == new.size;
        if !(old.ready && new.ready && is_same) || old.fault {
            continue;
        }
        let taken = new.next_avail.wrapping_sub(old.next_avail);
        let given = new.next_used.wrapping_sub(old.next_used);
        assert!(given == taken || new.fault, "{old:?} became {new:?}");
    }
}

impl Vm {
    fn new() -> Self {
        let (ram, mut watch) = host();
        let bus = DeviceBus::new(spec(), &mut watch).expect("devices");
        Self {
            ram,
            watch,
            bus,
            clients: Vec::new(),
        }
    }

    fn queues(&self) -> Vec<QueueState> {
        let slots = self.bus.state().slots;
        slots.into_iter().flat_map(|slot| slot.queues).collect()
    }

    /// One step: operation, slot, two bytes of detail and four bytes of value.
    fn perform(&mut self, step: [u8; 8]) {
        let [what, slot, detail @ ..] = step;
        let [d0, d1, value @ ..] = detail;
        match what % 8 {
            0 => {
                let register = REGISTERS[usize::from(d0) % REGISTERS.len()];
                self.write(slot, register, u32::from_le_bytes(value));
            }
            1 => {
                let at = u64::from(u16::from_le_bytes([d0, d1])) % 0x4000;
                self.put(at, &value);
            }
            2 => self.set_up(slot),
            3 => self.poll(),
            4 => self.offer(d0, d1, value),
            5 => self.contest(d0, d1, value),
            6 => self.feed(d0, d1),
            _ => self.host(d0, d1, value),
        }
    }

    fn write(&mut self, slot: u8, register: u64, value: u32) {
        let at = u64::from(slot % 6) * SLOT_STRIDE + register;
        let bytes = value.to_le_bytes();
        self.bus.write(at, &bytes, &self.ram, &mut self.watch);
    }

    /// Writes to guest memory. Ignores a write that does not lie within it.
    fn put(&self, at: u64, bytes: &[u8]) {
        let _fits = self.ram.write_slice(bytes, GuestAddress(at));
    }

    fn word(&self, at: u64) -> u16 {
        self.ram.read_obj(GuestAddress(at)).expect("in memory")
    }

    fn set_up(&mut self, slot: u8) {
        for (register, value) in SET_UP {
            self.write(slot, register, value);
        }
    }

    fn poll(&mut self) {
        let mut events = Events::default();
        let _polled = self.watch.wait(&mut events, Some(Duration::ZERO));
        for token in events.tokens() {
            if let Token::Device(token) = token {
                self.bus.ready(token, &self.ram, &mut self.watch);
            }
        }
    }

    /// Writes a chain of one to four descriptors into the table and the ring. `shape` contains their number and which
    /// of them are writable; each byte of `pieces` selects a length and an address.
    fn offer(&self, first: u8, shape: u8, pieces: [u8; 4]) {
        let first = u16::from(first) % ENTRIES;
        let count = u16::from(shape & 3) + 1;
        for (index, piece) in (0..count).zip(pieces) {
            let entry = DESCRIPTORS + u64::from((first + index) % ENTRIES) * 16;
            let is_last = index + 1 == count;
            let writes = u16::from(shape >> (2 + index) & 1);
            let flags = u16::from(!is_last) | writes << 1;
            self.put(entry, &(DATA + u64::from(piece >> 3) * 0x100).to_le_bytes());
            self.put(entry + 8, &LENGTHS[usize::from(piece & 7)].to_le_bytes());
            self.put(entry + 12, &flags.to_le_bytes());
            self.put(entry + 14, &((first + index + 1) % ENTRIES).to_le_bytes());
        }
        let index = self.word(AVAILABLE + 2);
        let at = AVAILABLE + 4 + u64::from(index % ENTRIES) * 2;
        self.put(at, &first.to_le_bytes());
        self.put(AVAILABLE + 2, &index.wrapping_add(1).to_le_bytes());
    }

    /// Lets the rival change a word of the rings or of the data after `after` accesses.
    #[cfg_attr(
        not(fuzzing),
        expect(unused_variables, reason = "only fuzzing builds have a rival")
    )]
    fn contest(&self, after: u8, place: u8, value: [u8; 4]) {
        #[cfg(fuzzing)]
        {
            let [low, high, far @ ..] = value;
            let entry = u64::from(place >> 3) % u64::from(ENTRIES);
            let at = match place & 7 {
                0 => DESCRIPTORS + entry * 16,
                1 => DESCRIPTORS + entry * 16 + 8,
                2 => DESCRIPTORS + entry * 16 + 12,
                3 => DESCRIPTORS + entry * 16 + 14,
                4 => AVAILABLE + 2,
                5 => AVAILABLE + 4 + entry * 2,
                6 => USED + entry,
                _ => DATA + u64::from(u16::from_le_bytes(far) % 0x1000),
            };
            rival::change(rival::Change {
                after: after.into(),
                at,
                bytes: [low, high],
            });
        }
    }

    /// Lets the rival offer chains endlessly, or stops it.
    #[cfg_attr(
        not(fuzzing),
        expect(unused_variables, reason = "only fuzzing builds have a rival")
    )]
    fn feed(&self, every: u8, stop: u8) {
        #[cfg(fuzzing)]
        match stop % 4 {
            0 => rival::rest(),
            _ => rival::feed(AVAILABLE, u16::from(every % 4) + 1),
        }
    }

    /// An action of a host client.
    fn host(&mut self, which: u8, what: u8, value: [u8; 4]) {
        let count = self.clients.len();
        match what % 4 {
            0 if count < MAX_CLIENTS => {
                let (near, far) = UnixStream::pair().expect("socket pair");
                far.set_nonblocking(true).expect("a socket");
                let port = u32::from_le_bytes(value);
                self.bus
                    .connect_guest(port, near, &self.ram, &mut self.watch);
                self.clients.push(far);
            }
            1 if count > 0 => drop(self.clients.remove(usize::from(which) % count)),
            _ if count > 0 => {
                let client = &mut self.clients[usize::from(which) % count];
                let _full_or_gone = client.write(&value.repeat(usize::from(what)));
            }
            _ => {}
        }
        self.poll();
    }

    /// Checks that a driver that resets the devices and follows the rules is served.
    fn serves_after_reset(&mut self) {
        #[cfg(fuzzing)]
        rival::rest();
        for slot in [Slot::Root, Slot::Layer, Slot::Rng] {
            self.serves(slot);
            #[cfg(fuzzing)]
            rival::step_over();
        }
    }

    fn serves(&mut self, slot: Slot) {
        let number = u8::try_from(slot.index()).expect("few slots");
        self.put(AVAILABLE, &[0; 0x2000]);
        self.write(number, 0x70, 0);
        self.write(number, QUEUE_SELECT, 0);
        self.set_up(number);
        // A read of the first sector, or a request for random bytes.
        self.put(DATA, &[0; 16]);
        self.put(DATA + 0x400, &[0xff]);
        let pieces = [2, 1 << 3 | 4, 4 << 3 | 1, 0];
        if slot == Slot::Rng {
            self.offer(0, 0b0100, [4, 0, 0, 0]);
        } else {
            self.offer(0, 0b11010, pieces);
        }
        self.write(number, QUEUE_NOTIFY, 0);
        assert_eq!(self.word(USED + 2), 1, "{slot:?} does not answer");
        let status = self.word(DATA + 0x400).to_le_bytes()[0];
        assert!(
            slot == Slot::Rng || status == 0,
            "{slot:?}: status {status}"
        );
    }
}

fn spec() -> BackendSpec {
    BackendSpec {
        root: disk(c"root"),
        layer_base: disk(c"layer"),
        layer_diff: None,
        tap: None,
        vsock: listener(),
        scratch: disk(c"scratch"),
        layer_limit: None,
    }
}

fn disk(name: &CStr) -> File {
    let file = File::from(memfd_create(name, MFdFlags::MFD_CLOEXEC).expect("memfd"));
    file.set_len(DISK_BYTES).expect("room for a sparse file");
    file
}

/// A listening socket with a name chosen by the kernel, which needs no file.
fn listener() -> OwnedFd {
    let kind = (
        AddressFamily::Unix,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC,
    );
    let socket = socket(kind.0, kind.1, kind.2, None).expect("a socket");
    bind(socket.as_raw_fd(), &UnixAddr::new_unnamed()).expect("a name");
    listen(&socket, Backlog::MAXCONN).expect("a listening socket");
    socket
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    /// Steps that mostly initialize, write rings and notify.
    fn any_step() -> impl Strategy<Value = [u8; 8]> {
        let notify = (0..5_u8, 0..3_u8).prop_map(|(slot, queue)| [0, slot, 6, 0, queue, 0, 0, 0]);
        let index = any::<u8>().prop_map(|index| [1, 0, 2, 0x20, index % 10, 0, 0, 0]);
        let set_up = (0..5_u8).prop_map(|slot| [2, slot, 0, 0, 0, 0, 0, 0]);
        prop_oneof![2 => notify, 2 => index, 1 => set_up, 5 => any::<[u8; 8]>()]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn random_programs_do_not_break_the_devices(steps in prop::collection::vec(any_step(), 1..300)) {
            super::drive(&steps.concat());
        }
    }
}
