//! Event channels of the 2-level ABI (Xen public headers, `event_channel.h`, `xen.h`), and exits to the VMM.

use core::{
    ptr::{addr_of, addr_of_mut, read_volatile, write_volatile},
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{
    gate,
    layout::{BASE, CONSOLE_PORT, FIRST_DYNAMIC_PORT, offset, port},
    log,
    state::{direct, entry, peek, poke, rest, shared},
    timer,
};

/// `shared_info.evtchn_pending`, behind 32 vcpu_info of 64 bytes.
const PENDING: u64 = BASE + offset::SHARED_INFO + 2048;
/// `shared_info.evtchn_mask`.
const MASK: u64 = PENDING + 512;
/// Number of channels in the 2-level ABI: 64 words of 64 bits.
const CHANNELS: u32 = 4096;
const VIRQ_TIMER: u32 = 0;

const EINVAL: i64 = -22;
const ENOSPC: i64 = -28;
const ENOSYS: i64 = -38;

fn word(base: u64, port: u32) -> &'static AtomicU64 {
    unsafe { &*((base + u64::from(port / 64) * 8) as *const AtomicU64) }
}

/// Whether an event is pending and events are not masked, so that an upcall must be made now.
pub fn due() -> bool {
    let [pending, mask] = peek::<[u8; 2]>(entry().vcpu_info);
    pending != 0 && mask == 0
}

/// Raises an event channel.
pub fn raise(port: u32) {
    let bit = 1 << (port % 64);
    word(PENDING, port).fetch_or(bit, Ordering::Relaxed);
    if word(MASK, port).load(Ordering::Relaxed) & bit == 0 {
        announce(port);
    }
}

fn announce(port: u32) {
    let info = entry().vcpu_info;
    let selector = unsafe { &*((info + 8) as *const AtomicU64) };
    selector.fetch_or(1 << (port / 64), Ordering::Relaxed);
    poke(info, 1_u8);
}

/// Raises the event channels whose bits the VMM set in [`crate::layout::Shared::pending`], and clears the bits.
pub fn fold() {
    let pending = unsafe { &*(addr_of!((*shared()).pending).cast::<AtomicU64>()) };
    if pending.load(Ordering::Relaxed) == 0 {
        return;
    }
    let mut bits = pending.swap(0, Ordering::Relaxed);
    while bits != 0 {
        raise(bits.trailing_zeros());
        bits &= bits - 1;
    }
}

/// Records that an interrupt arrived during monitor code. If that code is about to exit as idle, the VMM then does not
/// sleep.
pub fn mark_woken() {
    unsafe { write_volatile(addr_of_mut!((*shared()).woken), 1) };
}

/// The hypercall `SCHEDOP_block`: unmasks events and exits to the VMM until one is due.
pub fn block() {
    poke(entry().vcpu_info + 1, 0_u8);
    loop {
        unsafe { write_volatile(addr_of_mut!((*shared()).woken), 0) };
        timer::check();
        fold();
        if due() {
            timer::resume();
            return;
        }
        gate::out(port::IDLE);
        timer::apply_clock();
    }
}

/// After #UD at `rip`, makes the VMM register memory with KVM that the instruction may need, so that the guest can
/// execute the instruction again. Returns false, and does nothing, if KVM already has all memory.
pub fn registered_memory(rip: u64) -> bool {
    if from_vmm(unsafe { addr_of!((*shared()).deferred) }) == 0 {
        return false;
    }
    unsafe { write_volatile(addr_of_mut!((*shared()).undefined_at), rip) };
    gate::out(port::MEMORY);
    true
}

/// Ends the VM.
pub fn end(reason: u64) -> ! {
    unsafe { write_volatile(addr_of_mut!((*shared()).end_reason), reason) };
    loop {
        gate::out(port::END);
    }
}

fn allocate() -> Option<u32> {
    let next = &mut rest().next_port;
    if *next >= CHANNELS {
        return None;
    }
    *next += 1;
    Some(*next - 1)
}

/// The hypercall `event_channel_op`. `arg` points to the operation's structure.
pub fn operation(cmd: u64, arg: u64) -> i64 {
    const BIND_VIRQ: u64 = 1;
    const CLOSE: u64 = 3;
    const SEND: u64 = 4;
    const ALLOC_UNBOUND: u64 = 6;
    const BIND_IPI: u64 = 7;
    const BIND_VCPU: u64 = 8;
    const UNMASK: u64 = 9;
    match cmd {
        BIND_VIRQ => bind(arg + 8, peek::<u32>(arg) == VIRQ_TIMER),
        BIND_IPI | ALLOC_UNBOUND => bind(arg + 4, false),
        CLOSE | BIND_VCPU => 0,
        SEND => with_port(arg, send),
        UNMASK => with_port(arg, unmask),
        _ => ENOSYS,
    }
}

fn bind(port_at: u64, timer: bool) -> i64 {
    let Some(port) = allocate() else {
        return ENOSPC;
    };
    poke(port_at, port);
    if timer {
        rest().timer_port = port;
    }
    0
}

fn with_port(arg: u64, act: fn(u32)) -> i64 {
    let port = peek::<u32>(arg);
    if port >= CHANNELS {
        return EINVAL;
    }
    act(port);
    0
}

fn send(port: u32) {
    match port {
        CONSOLE_PORT => drain_console(),
        FIRST_DYNAMIC_PORT.. => raise(port),
        _ => {}
    }
}

fn unmask(port: u32) {
    let bit = 1 << (port % 64);
    word(MASK, port).fetch_and(!bit, Ordering::Relaxed);
    if word(PENDING, port).load(Ordering::Relaxed) & bit != 0 {
        announce(port);
    }
}

/// Moves the guest's console output (`io/console.h`: out ring at 1024, 2048 bytes; out_cons at 3080, out_prod at 3084)
/// to the log ring.
fn drain_console() {
    let ring = direct(from_vmm(unsafe { addr_of!((*shared()).console_ring) }));
    let (mut cons, prod) = (peek::<u32>(ring + 3080), peek::<u32>(ring + 3084));
    let mut left = 2048;
    while cons != prod && left > 0 {
        log::write(&[peek::<u8>(ring + 1024 + u64::from(cons % 2048))]);
        cons = cons.wrapping_add(1);
        left -= 1;
    }
    poke(ring + 3080, cons);
}

/// Reads a field of the shared page.
pub fn from_vmm<T: Copy>(field: *const T) -> T {
    unsafe { read_volatile(field) }
}
