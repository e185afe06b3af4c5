//! Exceptions and interrupts, and their delivery to the guest kernel in Xen's bounce frame.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::{
    debugreg, emulate, events,
    layout::{TIMER_VECTOR, USER_CS, USER_SS, end},
    log::log,
    pagefault,
    state::{Frame, Trap, cr3, entry, flag, peek, poke, rest},
    timer,
};

unsafe extern "C" {
    static monitor_hypercall_window: u8;
    static monitor_hypercall_window_end: u8;
    static monitor_exit_window: u8;
    static monitor_exit_window_end: u8;
}

/// Code selector in frames of the guest kernel's own mode (RPL 0).
const GUEST_KERNEL_CS: u64 = 0x10;
/// Vectors with an error code.
const WITH_ERROR: u32 =
    1 << 8 | 1 << 10 | 1 << 11 | 1 << 12 | 1 << 13 | 1 << 14 | 1 << 17 | 1 << 21;

const DEBUG: u64 = 1;
const INVALID_OPCODE: u64 = 6;
const GENERAL_PROTECTION: u64 = 13;
const PAGE_FAULT: u64 = 14;

#[unsafe(no_mangle)]
extern "C" fn monitor_exception_dispatch(frame: &mut Frame) {
    if frame.in_monitor() {
        fatal(frame);
    }
    match frame.vector {
        PAGE_FAULT => pagefault::handle(frame),
        GENERAL_PROTECTION => general_protection(frame),
        INVALID_OPCODE => {
            if !emulate::xen_cpuid(frame) && !events::registered_memory(frame.rip) {
                bounce_vector(frame, INVALID_OPCODE);
            }
        }
        DEBUG => {
            debugreg::hit(frame);
            bounce_vector(frame, DEBUG);
        }
        vector => bounce_vector(frame, vector),
    }
}

fn general_protection(frame: &mut Frame) {
    // Error code of a refused `int n`: the IDT bit and the vector.
    let software = (frame.error & 7 == 2).then_some(frame.error >> 3 & 0xff);
    match software {
        Some(vector) if entry().user_mode == 1 && rest().traps[vector as usize].flags & 3 == 3 => {
            frame.rip += 2;
            bounce_vector(frame, vector);
        }
        None if entry().user_mode == 0 => {
            if !emulate::privileged(frame) {
                bounce_vector(frame, GENERAL_PROTECTION);
            }
        }
        _ => bounce_vector(frame, GENERAL_PROTECTION),
    }
}

#[unsafe(no_mangle)]
extern "C" fn monitor_interrupt_dispatch(frame: &mut Frame) {
    timer::apply_clock();
    timer::fired(frame.vector == u64::from(TIMER_VECTOR));
    events::fold();
    if frame.in_monitor() {
        events::mark_woken();
        let window =
            |start: *const u8, end: *const u8| (start as u64..end as u64).contains(&frame.rip);
        if window(
            &raw const monitor_exit_window,
            &raw const monitor_exit_window_end,
        ) {
            frame.rip = &raw const monitor_exit_window as u64;
        } else if window(
            &raw const monitor_hypercall_window,
            &raw const monitor_hypercall_window_end,
        ) {
            frame.rip = &raw const monitor_hypercall_window as u64;
        }
    } else if events::due() {
        monitor_deliver_event(frame);
    }
}

/// Turns the frame into the guest kernel's event upcall and masks events.
#[unsafe(no_mangle)]
extern "C" fn monitor_deliver_event(frame: &mut Frame) {
    let target = rest().event_target;
    bounce(frame, target, None, true);
}

/// Delivers an exception to the guest's handler.
pub fn bounce_vector(frame: &mut Frame, vector: u64) {
    let Trap { address, flags } = rest().traps[vector as usize & 0xff];
    if address == 0 {
        log!("monitor: guest has no handler for vector {vector}");
        fatal(frame);
    }
    let error = (vector < 32 && WITH_ERROR >> vector & 1 == 1).then_some(frame.error);
    bounce(frame, address, error, flags & 4 != 0);
}

/// Xen's `create_bounce_frame`: pushes the interrupted context on the guest kernel's stack and transfers control to
/// `target`.
fn bounce(frame: &mut Frame, target: u64, error: Option<u64>, mask_events: bool) {
    let state = entry();
    let mask_at = state.vcpu_info + 1;
    let masked = peek::<u8>(mask_at) != 0;
    let from_user = state.user_mode == 1;
    let (mut sp, cs) = if from_user {
        state.user_mode = 0;
        state.user_gs = emulate::read_gs_base();
        emulate::write_gs_base(state.kernel_gs);
        (state.kernel_sp, u64::from(USER_CS))
    } else {
        (frame.rsp & !0xf, GUEST_KERNEL_CS)
    };
    let rflags = frame.rflags & !flag::IF | if masked { 0 } else { flag::IF };
    let mut push = |value: u64| {
        sp -= 8;
        poke(sp, value);
    };
    push(USER_SS.into());
    push(frame.rsp);
    push(rflags);
    push(cs);
    push(frame.rip);
    if let Some(error) = error {
        push(error);
    }
    push(frame.r11);
    push(frame.rcx);
    frame.rip = target;
    frame.rsp = sp;
    frame.rflags &= !(flag::TF | flag::NT | flag::RF | flag::AC);
    if mask_events {
        poke(mask_at, 1_u8);
    }
}

/// Ends the VM after writing the state to the log.
pub fn fatal(frame: &Frame) -> ! {
    static NESTED: AtomicU64 = AtomicU64::new(0);
    if NESTED.fetch_add(1, Ordering::Relaxed) == 0 {
        log!(
            "monitor: vector {} error {:#x} user {} cr3 {:#x} cr2 {:#x}",
            frame.vector,
            frame.error,
            entry().user_mode,
            cr3(),
            crate::gate::read_cr2()
        );
        log!("monitor: {frame:#x?}");
    }
    events::end(end::MONITOR)
}
