//! Calls to CPL 0: `int $4` with the address of a short routine in r10. Each call takes about 6 µs, because KVM
//! emulates every instruction at CPL 0.

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

/// Returns the address of the last page fault.
pub fn read_cr2() -> u64 {
    call(&raw const monitor_gate_read_cr2, 0, 0, 0)
}

/// Switches the address space and flushes its translations.
pub fn write_cr3(cr3: u64) {
    call(&raw const monitor_gate_write_cr3, cr3, 0, 0);
}

/// Flushes the translation of one page.
pub fn invlpg(address: u64) {
    call(&raw const monitor_gate_invlpg, address, 0, 0);
}

pub fn wrmsr(index: u32, value: u64) {
    let (low, high) = (value & 0xffff_ffff, value >> 32);
    call(&raw const monitor_gate_wrmsr, low, index.into(), high);
}

/// Exits to the VMM. Returns when the VMM runs the guest again.
pub fn out(port: u16) {
    call(&raw const monitor_gate_out, 0, 0, port.into());
}

pub fn read_dr6() -> u64 {
    call(&raw const monitor_gate_read_dr6, 0, 0, 0)
}

/// Writes a debug register. Writes to 4 and 5, which do not exist, are ignored.
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
