//! Calls into CPL 0: `int $4` with the address of a micro-routine in r10. About 6 µs each, since KVM
//! emulates every instruction there.

use core::arch::asm;

unsafe extern "C" {
    static monitor_gate_read_cr2: u8;
    static monitor_gate_write_cr3: u8;
    static monitor_gate_invlpg: u8;
    static monitor_gate_wrmsr: u8;
    static monitor_gate_out: u8;
    static monitor_gate_read_dr6: u8;
    static monitor_gate_write_dr0: u8;
    static monitor_gate_write_dr1: u8;
    static monitor_gate_write_dr2: u8;
    static monitor_gate_write_dr3: u8;
    static monitor_gate_write_dr6: u8;
    static monitor_gate_write_dr7: u8;
}

fn call(routine: *const u8, rax: u64, rcx: u64, rdx: u64) -> u64 {
    let result;
    unsafe {
        asm!("int 4", in("r10") routine, inout("rax") rax => result, in("rcx") rcx, in("rdx") rdx);
    }
    result
}

/// The address of the last page fault.
pub fn read_cr2() -> u64 {
    call(&raw const monitor_gate_read_cr2, 0, 0, 0)
}

/// Switches the address space and flushes.
pub fn write_cr3(cr3: u64) {
    call(&raw const monitor_gate_write_cr3, cr3, 0, 0);
}

/// Forgets one translation.
pub fn invlpg(address: u64) {
    call(&raw const monitor_gate_invlpg, address, 0, 0);
}

/// Writes a model-specific register.
pub fn wrmsr(index: u32, value: u64) {
    let (low, high) = (value & 0xffff_ffff, value >> 32);
    call(&raw const monitor_gate_wrmsr, low, index.into(), high);
}

/// Leaves for the VMM; returns when it lets the guest run again.
pub fn out(port: u16) {
    call(&raw const monitor_gate_out, 0, 0, port.into());
}

/// Debug status.
pub fn read_dr6() -> u64 {
    call(&raw const monitor_gate_read_dr6, 0, 0, 0)
}

/// Writes a debug register; 4 and 5 do not exist and are ignored.
pub fn write_dr(index: usize, value: u64) {
    let routine = match index {
        0 => &raw const monitor_gate_write_dr0,
        1 => &raw const monitor_gate_write_dr1,
        2 => &raw const monitor_gate_write_dr2,
        3 => &raw const monitor_gate_write_dr3,
        6 => &raw const monitor_gate_write_dr6,
        7 => &raw const monitor_gate_write_dr7,
        _ => return,
    };
    call(routine, value, 0, 0);
}
