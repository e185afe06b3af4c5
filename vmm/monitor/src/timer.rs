//! Time: pvclock pages, the wall clock, the one-shot timer (Xen public headers, `vcpu.h`, `xen.h`).

use core::{
    arch::x86_64::_rdtsc,
    ptr::{addr_of, addr_of_mut, write_volatile},
};

use crate::{
    events::{self, from_vmm},
    gate,
    layout::{BASE, Clock, offset},
    state::{entry, poke, rest, shared},
};

/// IA32_TSC_DEADLINE.
const MSR_TSC_DEADLINE: u32 = 0x6e0;
/// Offset of `time` in vcpu_info.
const TIME_IN_VCPU_INFO: u64 = 32;
/// Offset of the wall clock in shared_info.
const WALL_CLOCK: u64 = 3072;
/// pvclock flag: the TSC is synchronized on all CPUs.
const TSC_STABLE: u8 = 1;

fn tsc() -> u64 {
    unsafe { _rdtsc() }
}

fn clock() -> Clock {
    from_vmm(unsafe { addr_of!((*shared()).clock) })
}

fn set_deadline(value: u64) {
    unsafe { write_volatile(addr_of_mut!((*shared()).deadline_tsc), value) };
}

fn deadline() -> u64 {
    from_vmm(unsafe { addr_of!((*shared()).deadline_tsc) })
}

/// Writes one `pvclock_vcpu_time_info`: version u32, pad, tsc_timestamp u64, system_time u64, mul u32, shift i8, flags
/// u8.
fn publish(at: u64, clock: &Clock) {
    let version = crate::state::peek::<u32>(at) | 1;
    poke(at, version);
    poke(at + 8, clock.tsc_base);
    poke(at + 16, clock.ns_base);
    poke(at + 24, clock.mul);
    poke(at + 28, clock.shift as i8);
    poke(at + 29, TSC_STABLE);
    poke(at, version.wrapping_add(1));
}

/// Publishes the clock wherever the guest reads it.
pub fn publish_all() {
    let clock = clock();
    publish(entry().vcpu_info + TIME_IN_VCPU_INFO, &clock);
    publish(BASE + offset::SHARED_INFO + TIME_IN_VCPU_INFO, &clock);
    if rest().time_area != 0 {
        publish(rest().time_area, &clock);
    }
    let wall = BASE + offset::SHARED_INFO + WALL_CLOCK;
    let seconds = clock.wall_base_ns / 1_000_000_000;
    let version = crate::state::peek::<u32>(wall) | 1;
    poke(wall, version);
    poke(wall + 4, seconds as u32);
    poke(wall + 8, (clock.wall_base_ns % 1_000_000_000) as u32);
    poke(wall + 12, (seconds >> 32) as u32);
    poke(wall, version.wrapping_add(1));
}

/// Applies new clock parameters if there are any: at the start, and after a restore. After a restore, the clock has a
/// new TSC base, the LAPIC has no deadline, and the VMM has already adjusted `deadline_tsc`.
pub fn apply_clock() {
    let epoch = from_vmm(unsafe { addr_of!((*shared()).clock_epoch) });
    if epoch != rest().clock_epoch {
        rest().clock_epoch = epoch;
        rest().armed_tsc = 0;
        publish_all();
    }
}

/// The hypercall `VCPUOP_set_singleshot_timer`. `at_ns` is the system time in nanoseconds.
pub fn set(at_ns: u64) {
    set_deadline(clock().tsc_at(at_ns).max(1));
    arm();
}

/// The hypercall `VCPUOP_stop_singleshot_timer`.
pub fn stop() {
    set_deadline(0);
}

/// Arms the timer after an idle period, during which the VMM waits for the deadline instead of the LAPIC.
pub fn resume() {
    arm();
}

/// Ensures that the LAPIC interrupts no later than the deadline. If it is already armed for an earlier time, it is left
/// as it is: the handler of that interrupt arms it again, which is cheaper than a write of the register each time.
fn arm() {
    let (want, armed) = (deadline(), rest().armed_tsc);
    if want != 0 && (armed == 0 || want < armed) {
        rest().armed_tsc = want;
        gate::wrmsr(MSR_TSC_DEADLINE, want);
    }
}

/// Raises the timer's channel if the deadline has passed. Returns whether it has.
pub fn check() -> bool {
    let at = deadline();
    let due = at != 0 && tsc() >= at;
    if due {
        set_deadline(0);
        if rest().timer_port != 0 {
            events::raise(rest().timer_port);
        }
    }
    due
}

/// Handles an interrupt. `lapic` is true for the LAPIC timer's interrupt, which can be early.
pub fn fired(lapic: bool) {
    if lapic {
        rest().armed_tsc = 0;
    }
    if !check() {
        arm();
    }
}
