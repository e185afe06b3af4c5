//! The hypercalls that a Linux kernel with a PV entry uses, with the numbers and structures of Xen's public headers.
//! All others return -ENOSYS; unexpected ones are also logged.

use crate::{
    debugreg, emulate, events,
    layout::M2P,
    log::{self, log},
    pagetable,
    state::{Trap, direct, entry, peek, poke, rest, shared},
    timer,
};

const EINVAL: i64 = -22;
const ENOENT: i64 = -2;
const ENOSYS: i64 = -38;

#[unsafe(no_mangle)]
extern "C" fn monitor_hypercall_dispatch(a: u64, b: u64, c: u64, d: u64, _e: u64, nr: u64) -> i64 {
    timer::apply_clock();
    dispatch(nr as u32, [a, b, c, d])
}

fn dispatch(nr: u32, args: [u64; 4]) -> i64 {
    let [a, b, c, d] = args;
    match nr {
        0 => set_trap_table(a),
        1 => mmu_update(a, b, c),
        2 | 10 | 21 => 0, // set_gdt, update_descriptor, vm_assist: the monitor does not depend on them
        3 => {
            entry().kernel_sp = b;
            entry().last_write_fault = 0;
            0
        }
        4 => set_callbacks(a, b, c),
        5 => 0, // fpu_taskswitch: CR0.TS is never set
        8 => {
            debugreg::set(a, b);
            0
        }
        9 => debugreg::get(a) as i64,
        12 => memory_op(a, b),
        13 => multicall(a, b),
        14 => update_va_mapping(a, b, c),
        17 => xen_version(a, b),
        18 => console_io(a, b, c),
        24 => vcpu_op(a, b, c),
        25 => set_segment_base(a, b),
        26 => mmuext_op(a, b, c),
        29 => sched_op(a, b),
        30 => callback_op(a, b),
        32 => events::operation(a, b),
        33 if a == 6 => 0, // physdev_op set_iopl
        7 | 20 | 28 | 33 | 34 | 40 => ENOSYS,
        _ => {
            log!("monitor: hypercall {nr}({a:#x}, {b:#x}, {c:#x}, {d:#x})");
            ENOSYS
        }
    }
}

/// `xen.h`, `trap_info`: vector u8, flags u8, cs u16, address u64. The list ends with address 0.
fn set_trap_table(mut at: u64) -> i64 {
    for _ in 0..256 {
        let [vector, flags] = peek::<[u8; 2]>(at);
        let address = peek::<u64>(at + 8);
        if address == 0 {
            break;
        }
        rest().traps[vector as usize] = Trap { address, flags };
        at += 16;
    }
    0
}

/// `xen.h`, `mmu_update`: ptr u64, whose low bits are the command, and val u64.
fn mmu_update(mut at: u64, count: u64, done_at: u64) -> i64 {
    const MACHPHYS: u64 = 1;
    const PRESERVE_AD: u64 = 2;
    for done in 0..count {
        let (ptr, value) = (peek::<u64>(at), peek::<u64>(at + 8));
        let ok = match ptr & 3 {
            MACHPHYS => true,
            command => pagetable::update(ptr & !3, value, command == PRESERVE_AD),
        };
        if !ok {
            if done_at != 0 {
                poke(done_at, done as u32);
            }
            return EINVAL;
        }
        at += 16;
    }
    if done_at != 0 {
        poke(done_at, count as u32);
    }
    0
}

fn update_va_mapping(va: u64, value: u64, flags: u64) -> i64 {
    if !pagetable::update_va(va, value) {
        return EINVAL;
    }
    match flags & 3 {
        1 => pagetable::flush(),
        2 => invlpg(va),
        _ => {}
    }
    0
}

/// Flushes the translation of a page, unless it is the page of the user-mode write fault that the kernel is handling.
/// That flush is unnecessary with one vCPU: the kernel breaks copy-on-write, so the stale translation is read-only, and
/// the next write faults and makes the CPU walk the tables again. The exception ends when user code runs again, because
/// the CPU may then cache a writable translation.
fn invlpg(va: u64) {
    let last = core::mem::take(&mut entry().last_write_fault);
    if last == 0 || last != va >> 12 {
        crate::gate::invlpg(va);
    }
}

/// `xen.h`, `mmuext_op`: cmd u32, arg1 u64, arg2 u64.
fn mmuext_op(mut at: u64, count: u64, done_at: u64) -> i64 {
    for done in 0..count {
        let ok = mmuext(peek::<u32>(at), peek::<u64>(at + 8));
        if !ok {
            if done_at != 0 {
                poke(done_at, done as u32);
            }
            return EINVAL;
        }
        at += 24;
    }
    if done_at != 0 {
        poke(done_at, count as u32);
    }
    0
}

fn mmuext(cmd: u32, arg: u64) -> bool {
    match cmd {
        0..=2 => true, // PIN_L1..L3: only L4 tables need changes
        3 => pagetable::pin_l4(arg << 12),
        4 => {
            pagetable::forget_shadow(arg << 12);
            true
        }
        5 => pagetable::switch(arg << 12),
        6 | 8 | 10 => {
            pagetable::flush();
            true
        }
        7 | 9 | 11 => {
            invlpg(arg);
            true
        }
        12 | 13 | 15 => true, // FLUSH_CACHE, SET_LDT, NEW_USER_BASEPTR
        _ => {
            log!("monitor: mmuext_op {cmd}");
            false
        }
    }
}

fn set_callbacks(event: u64, _failsafe: u64, syscall: u64) -> i64 {
    rest().event_target = event;
    entry().syscall_target = syscall;
    0
}

/// `callback.h`, register: type u16, flags u16, address u64.
fn callback_op(cmd: u64, at: u64) -> i64 {
    const REGISTER: u64 = 0;
    const EVENT: u16 = 0;
    const SYSCALL: u16 = 2;
    if cmd != REGISTER {
        return ENOSYS;
    }
    let address = peek::<u64>(at + 8);
    match peek::<u16>(at) {
        EVENT => rest().event_target = address,
        SYSCALL => entry().syscall_target = address,
        _ => {}
    }
    0
}

/// The hypercall `memory_op` (`memory.h`).
fn memory_op(cmd: u64, at: u64) -> i64 {
    const CURRENT_RESERVATION: u64 = 3;
    const MAXIMUM_RESERVATION: u64 = 4;
    const MEMORY_MAP: u64 = 9;
    const MACHPHYS_MAPPING: u64 = 12;
    let pages = events::from_vmm(unsafe { &raw const (*shared()).ram_pages });
    match cmd {
        CURRENT_RESERVATION | MAXIMUM_RESERVATION => pages as i64,
        MEMORY_MAP => {
            // One e820 entry: address u64, size u64, type u32 (RAM).
            let buffer = peek::<u64>(at + 8);
            if peek::<u32>(at) < 1 {
                return EINVAL;
            }
            poke(buffer, 0_u64);
            poke(buffer + 8, pages << 12);
            poke(buffer + 16, 1_u32);
            poke(at, 1_u32);
            0
        }
        MACHPHYS_MAPPING => {
            poke(at, M2P);
            poke(at + 8, M2P + pages * 8);
            poke(at + 16, pages - 1);
            0
        }
        _ => ENOSYS,
    }
}

/// `xen.h`, `multicall_entry`: op u64, result i64, six arguments.
fn multicall(at: u64, count: u64) -> i64 {
    for call in (0..count).map(|i| at + i * 64) {
        let args = peek::<[u64; 4]>(call + 16);
        let result = dispatch(peek::<u64>(call) as u32, args);
        poke(call + 8, result);
    }
    0
}

/// The hypercall `xen_version` (`version.h`).
fn xen_version(cmd: u64, at: u64) -> i64 {
    const VERSION: u64 = 0;
    const EXTRAVERSION: u64 = 1;
    const GET_FEATURES: u64 = 6;
    match cmd {
        VERSION => 4 << 16 | 17,
        EXTRAVERSION => {
            poke(at, u64::from_le_bytes(*b".cube\0\0\0"));
            poke(at + 8, 0_u64);
            0
        }
        GET_FEATURES => {
            // writable_page_tables, pae_pgdir_above_4gb, mmu_pt_update_preserve_ad, gnttab_map_avail_bits
            let features = if peek::<u32>(at) == 0 { 0xb1_u32 } else { 0 };
            poke(at + 4, features);
            0
        }
        _ => ENOSYS,
    }
}

fn console_io(cmd: u64, count: u64, at: u64) -> i64 {
    const WRITE: u64 = 0;
    if cmd != WRITE {
        return 0;
    }
    for i in 0..count.min(4096) {
        log::write(&[peek::<u8>(at + i)]);
    }
    count as i64
}

/// The hypercall `vcpu_op` (`vcpu.h`).
fn vcpu_op(cmd: u64, vcpu: u64, at: u64) -> i64 {
    const IS_UP: u64 = 3;
    const REGISTER_RUNSTATE: u64 = 5;
    const STOP_PERIODIC: u64 = 7;
    const SET_SINGLESHOT: u64 = 8;
    const STOP_SINGLESHOT: u64 = 9;
    const REGISTER_INFO: u64 = 10;
    const REGISTER_TIME: u64 = 13;
    if vcpu != 0 {
        return ENOENT;
    }
    match cmd {
        IS_UP => 1,
        REGISTER_RUNSTATE | STOP_PERIODIC => 0,
        SET_SINGLESHOT => {
            timer::set(peek(at));
            0
        }
        STOP_SINGLESHOT => {
            timer::stop();
            0
        }
        REGISTER_INFO => register_vcpu_info(peek::<u64>(at), peek::<u32>(at + 8)),
        REGISTER_TIME => {
            rest().time_area = peek(at);
            timer::publish_all();
            0
        }
        _ => ENOSYS,
    }
}

/// Copies vcpu_info (64 bytes), with its pending events, to the address that the guest registers, and uses it from now
/// on.
fn register_vcpu_info(mfn: u64, at: u32) -> i64 {
    let new = direct((mfn << 12) + u64::from(at));
    poke(new, peek::<[u64; 8]>(entry().vcpu_info));
    entry().vcpu_info = new;
    // An event may have been raised in the old copy in the meantime. This makes the guest check all pending words.
    poke(new + 8, u64::MAX);
    poke(new, 1_u8);
    0
}

fn set_segment_base(which: u64, base: u64) -> i64 {
    match which {
        0 => emulate::write_fs_base(base),
        1 => entry().user_gs = base,
        2 => emulate::write_gs_base(base),
        3 => {
            // A null selector clears the base. Other selectors are ignored, because the guest uses none for GS.
            if base & 0xfffc == 0 {
                entry().user_gs = 0;
            }
        }
        _ => return EINVAL,
    }
    0
}

/// The hypercall `sched_op` (`sched.h`).
fn sched_op(cmd: u64, at: u64) -> i64 {
    const YIELD: u64 = 0;
    const BLOCK: u64 = 1;
    const SHUTDOWN: u64 = 2;
    match cmd {
        YIELD => 0,
        BLOCK => {
            events::block();
            0
        }
        SHUTDOWN => emulate::shutdown(peek(at)),
        _ => ENOSYS,
    }
}
