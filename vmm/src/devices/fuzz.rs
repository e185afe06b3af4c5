//! Devices under a driver made of random bytes: the entry point of the fuzz target and of a property test.
//!
//! The bytes are a program of register writes, memory writes and polls against devices on empty disks.
//! Nothing may panic or hang; the state reached at the end must be one that can be restored.

use std::ffi::CStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::libc;
use nix::sys::memfd::{MFdFlags, memfd_create};
use vm_memory::{Bytes, GuestAddress};

use super::{BackendSpec, BusState, DeviceBus, Ram, SLOT_STRIDE};
use crate::watch::{Events, KICK_SIGNAL, Watch};

const RAM_BYTES: usize = 1 << 20;
const DISK_BYTES: u64 = 64 << 10;
/// Registers that drivers write.
const REGISTERS: [u64; 16] = [
    0x14, 0x20, 0x24, 0x30, 0x38, 0x44, 0x50, 0x50, 0x64, 0x70, 0x80, 0x84, 0x90, 0xa0, 0xa4, 0x100,
];
/// A driver's whole set-up of a queue, so that the fuzzer need not find it: (register, value).
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

extern "C" fn ignore(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Runs the program in `bytes`.
///
/// # Panics
/// When the devices break their promise, or the host has no descriptors or memory left.
pub fn drive(bytes: &[u8]) {
    vmm_sys_util::signal::register_signal_handler(KICK_SIGNAL, ignore).expect("signal handler");
    let ram = Ram::from_ranges(&[(GuestAddress(0), RAM_BYTES)]).expect("guest memory");
    let mut watch = Watch::new().expect("epoll");
    let mut bus = DeviceBus::new(spec(), &mut watch).expect("devices");
    for step in bytes.chunks(8) {
        let mut padded = [0; 8];
        padded[..step.len()].copy_from_slice(step);
        perform(padded, &mut bus, &ram, &mut watch);
    }
    let state = bus.state();
    drop(bus);
    DeviceBus::restore(spec(), &state, &ram, &mut watch).expect("reached states can be restored");
}

/// Restores saved devices, whatever the state says, and polls them once.
///
/// # Panics
/// As [`drive`].
pub fn restore(state: &BusState) {
    vmm_sys_util::signal::register_signal_handler(KICK_SIGNAL, ignore).expect("signal handler");
    let ram = Ram::from_ranges(&[(GuestAddress(0), RAM_BYTES)]).expect("guest memory");
    let mut watch = Watch::new().expect("epoll");
    if let Ok((mut bus, _)) = DeviceBus::restore(spec(), state, &ram, &mut watch) {
        perform([3; 8], &mut bus, &ram, &mut watch);
    }
}

/// One step: what to do, to which slot, two bytes of detail and four of value.
fn perform(step: [u8; 8], bus: &mut DeviceBus, ram: &Ram, watch: &mut Watch) {
    let [what, slot, detail @ ..] = step;
    let [d0, d1, value @ ..] = detail;
    let base = u64::from(slot % 6) * SLOT_STRIDE;
    match what % 4 {
        0 => {
            let register = REGISTERS[usize::from(d0) % REGISTERS.len()];
            bus.write(base + register, &value, ram, watch);
        }
        1 => {
            let at = u64::from(u16::from_le_bytes([d0, d1])) % 0x4000;
            // Guest memory is larger than 16 bits and 4 bytes.
            let _fits = ram.write_slice(&value, GuestAddress(at));
        }
        2 => {
            for (register, value) in SET_UP {
                bus.write(base + register, &value.to_le_bytes(), ram, watch);
            }
        }
        _ => {
            let mut events = Events::default();
            let _polled = watch.wait(&mut events, Some(Duration::ZERO));
            for token in events.tokens() {
                bus.ready(token, ram, watch);
            }
        }
    }
}

fn spec() -> BackendSpec {
    BackendSpec {
        root: disk(c"root"),
        layer_base: disk(c"layer"),
        layer_diff: None,
        tap: None,
        vsock_path: socket_path(),
        scratch: std::env::temp_dir(),
    }
}

fn disk(name: &CStr) -> File {
    let file = File::from(memfd_create(name, MFdFlags::MFD_CLOEXEC).expect("memfd"));
    file.set_len(DISK_BYTES).expect("room for a sparse file");
    file
}

/// A path that no other run uses.
fn socket_path() -> PathBuf {
    static RUNS: AtomicU64 = AtomicU64::new(0);
    let run = RUNS.fetch_add(1, Ordering::Relaxed);
    let directory = std::env::temp_dir();
    Path::new(&directory).join(format!("cube-fuzz-{}-{run}", std::process::id()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    /// Steps that mostly set up, write rings and kick.
    fn any_step() -> impl Strategy<Value = [u8; 8]> {
        let notify = (0..5_u8, 0..3_u8).prop_map(|(slot, queue)| [0, slot, 6, 0, queue, 0, 0, 0]);
        let index = any::<u8>().prop_map(|index| [1, 0, 2, 0x20, index % 10, 0, 0, 0]);
        let set_up = (0..5_u8).prop_map(|slot| [2, slot, 0, 0, 0, 0, 0, 0]);
        prop_oneof![2 => notify, 2 => index, 1 => set_up, 5 => any::<[u8; 8]>()]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn no_program_breaks_the_devices(steps in prop::collection::vec(any_step(), 1..300)) {
            super::drive(&steps.concat());
        }
    }
}
