//! The state of the one vCPU, in plain statics that the entry code addresses by name. Interrupt handlers also access
//! the statics; [`crate::entry`] describes how interrupted monitor code stays correct.

use core::ptr::{addr_of_mut, read_volatile, write_volatile};

use crate::layout::{self, Shared, offset};

/// Saved registers, in the order in which the entry code pushes them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    pub r15: u64,
    pub r14: u64,
    pub r13: u64,
    pub r12: u64,
    pub rbp: u64,
    pub rbx: u64,
    pub r11: u64,
    pub r10: u64,
    pub r9: u64,
    pub r8: u64,
    pub rax: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
    pub vector: u64,
    pub error: u64,
    pub rip: u64,
    pub cs: u64,
    pub rflags: u64,
    pub rsp: u64,
    pub ss: u64,
}

/// RFLAGS bits.
pub mod flag {
    /// Single step.
    pub const TF: u64 = 1 << 8;
    /// Interrupts enabled.
    pub const IF: u64 = 1 << 9;
    /// Nested task.
    pub const NT: u64 = 1 << 14;
    /// Resume.
    pub const RF: u64 = 1 << 16;
    /// Alignment check.
    pub const AC: u64 = 1 << 18;
}

/// State that the entry code reads and writes by symbol.
#[repr(C)]
pub struct Entry {
    /// 1 while the guest is in user mode.
    pub user_mode: u64,
    /// The guest's RSP at a `syscall`. Scratch space for the entry code.
    pub saved_rsp: u64,
    /// RSP of the guest at a hypercall.
    pub hypercall_rsp: u64,
    /// Stack of the guest kernel for entries from user mode.
    pub kernel_sp: u64,
    /// GS base of user mode while kernel mode runs.
    pub user_gs: u64,
    /// GS base of kernel mode while user mode runs.
    pub kernel_gs: u64,
    /// Virtual address of the vcpu_info in use.
    pub vcpu_info: u64,
    /// The guest kernel's entry point for system calls.
    pub syscall_target: u64,
    /// Page number of the user-mode write fault that the guest kernel is handling; 0 if none. Cleared by the first
    /// flush of a page, on the return to user mode, and when the kernel switches to another thread (see
    /// `hypercall::invlpg`).
    pub last_write_fault: u64,
}

/// The only [`Entry`].
#[unsafe(no_mangle)]
pub static mut MONITOR_ENTRY: Entry = Entry {
    user_mode: 0,
    saved_rsp: 0,
    hypercall_rsp: 0,
    kernel_sp: 0,
    user_gs: 0,
    kernel_gs: 0,
    vcpu_info: layout::BASE + offset::SHARED_INFO,
    syscall_target: 0,
    last_write_fault: 0,
};

/// An exception vector in the guest's trap table.
#[derive(Clone, Copy, Default)]
pub struct Trap {
    /// Address of the handler; 0 if none.
    pub address: u64,
    /// Bits 0–1: lowest privilege (highest CPL) from which `int n` may raise the vector. Bit 2: events are masked on
    /// delivery.
    pub flags: u8,
}

/// State that only Rust code uses.
pub struct Rest {
    /// The guest's trap table.
    pub traps: [Trap; 256],
    /// The guest kernel's entry point for events.
    pub event_target: u64,
    /// Guest-physical address of the current L4 table; 0 until the guest first switches tables.
    pub cr3: u64,
    /// Virtual address of the registered time area; 0 if none.
    pub time_area: u64,
    /// The last applied [`Shared::clock_epoch`].
    pub clock_epoch: u64,
    /// Event channel of VIRQ_TIMER; 0 if none.
    pub timer_port: u32,
    /// Next event channel to allocate.
    pub next_port: u32,
    /// TSC deadline in the LAPIC; 0 if none.
    pub armed_tsc: u64,
    /// The guest's debug registers.
    pub debug: [u64; 8],
}

static mut REST: Rest = Rest {
    traps: [Trap {
        address: 0,
        flags: 0,
    }; 256],
    event_target: 0,
    cr3: 0,
    time_area: 0,
    clock_epoch: 0,
    timer_port: 0,
    next_port: layout::FIRST_DYNAMIC_PORT,
    armed_tsc: 0,
    debug: [0; 8],
};

/// The state of the entry code.
pub fn entry() -> &'static mut Entry {
    unsafe { &mut *addr_of_mut!(MONITOR_ENTRY) }
}

/// The state of the Rust code.
pub fn rest() -> &'static mut Rest {
    unsafe { &mut *addr_of_mut!(REST) }
}

/// Guest-physical address of the current L4 table.
pub fn cr3() -> u64 {
    match rest().cr3 {
        0 => unsafe { read_volatile(&raw const (*shared()).first_cr3) },
        cr3 => cr3,
    }
}

/// The page shared with the VMM. Its fields must be accessed with volatile reads and writes.
pub fn shared() -> *mut Shared {
    (layout::BASE + offset::SHARED) as *mut Shared
}

/// Reads a value at an address that the guest or the VMM may also write.
pub fn peek<T: Copy>(at: u64) -> T {
    unsafe { read_volatile(at as *const T) }
}

/// Writes a value at an address that the guest or the VMM may also read.
pub fn poke<T: Copy>(at: u64, value: T) {
    unsafe { write_volatile(at as *mut T, value) }
}

/// The virtual address at which the monitor has mapped the guest-physical address `gpa`.
pub fn direct(gpa: u64) -> u64 {
    layout::DIRECT + gpa
}

impl Frame {
    /// Whether the interrupted code belongs to the monitor.
    pub fn in_monitor(&self) -> bool {
        self.rip >> 39 == layout::BASE >> 39
    }
}
