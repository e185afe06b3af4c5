//! Emulation of the privileged instructions that the guest kernel still executes. Xen emulates the same ones.

use core::arch::asm;

use crate::{
    events,
    layout::{BASE, CPUID_ENTRIES, CpuidEntry, end, offset},
    log::log,
    state::{Frame, cr3, entry, peek, poke},
};

const MSR_EFER: u64 = 0xc000_0080;
const MSR_FS_BASE: u64 = 0xc000_0100;
const MSR_GS_BASE: u64 = 0xc000_0101;
const MSR_KERNEL_GS_BASE: u64 = 0xc000_0102;
const MSR_APIC_BASE: u64 = 0x1b;
const MSR_MISC_ENABLE: u64 = 0x1a0;
/// SCE, LME, LMA, NXE.
const EFER: u64 = 0xd01;
/// Enabled, bootstrap processor.
const APIC_BASE: u64 = 0xfee0_0900;

/// The active GS base (`rdgsbase`). While the guest kernel runs, user mode's is in `entry().user_gs`.
pub fn read_gs_base() -> u64 {
    let base;
    unsafe { asm!("rdgsbase {}", out(reg) base, options(nomem, nostack, preserves_flags)) };
    base
}

/// Sets the active GS base (`wrgsbase`).
pub fn write_gs_base(base: u64) {
    unsafe { asm!("wrgsbase {}", in(reg) base, options(nomem, nostack, preserves_flags)) };
}

pub fn read_fs_base() -> u64 {
    let base;
    unsafe { asm!("rdfsbase {}", out(reg) base, options(nomem, nostack, preserves_flags)) };
    base
}

pub fn write_fs_base(base: u64) {
    unsafe { asm!("wrfsbase {}", in(reg) base, options(nomem, nostack, preserves_flags)) };
}

/// Looks up a leaf in the VMM's table. An unlisted leaf reads as zeros. (A native `cpuid` at CPL 3 would return the
/// host's values.)
fn cpuid(function: u32, index: u32) -> [u32; 4] {
    let table = BASE + offset::CPUID;
    (0..CPUID_ENTRIES as u64)
        .map(|i| peek::<CpuidEntry>(table + i * size_of::<CpuidEntry>() as u64))
        .take_while(|e| e.used != 0)
        .find(|e| e.function == function && (e.indexed == 0 || e.index == index))
        .map_or([0; 4], |e| e.registers)
}

/// Emulates Xen's prefixed cpuid, `ud2a; .ascii "xen"; cpuid`. Returns false in user mode, or if RIP points at anything
/// else.
pub fn xen_cpuid(frame: &mut Frame) -> bool {
    const CODE: u64 = u64::from_le_bytes([0x0f, 0x0b, b'x', b'e', b'n', 0x0f, 0xa2, 0]);
    if entry().user_mode == 1 || peek::<u64>(frame.rip) & (u64::MAX >> 8) != CODE {
        return false;
    }
    let [eax, ebx, ecx, edx] = cpuid(frame.rax as u32, frame.rcx as u32);
    frame.rax = eax.into();
    frame.rbx = ebx.into();
    frame.rcx = ecx.into();
    frame.rdx = edx.into();
    frame.rip += 7;
    true
}

/// Emulates a guest kernel instruction that raised #GP. Returns false if the instruction is unsupported or must raise
/// #GP.
pub fn privileged(frame: &mut Frame) -> bool {
    let mut code = peek::<u64>(frame.rip);
    let mut length = 0;
    // Skips up to four operand-size, REP and REX prefixes. They are ignored, except that REX.B selects the register of
    // `mov reg, crN`.
    while matches!(code & 0xff, 0x66 | 0xf2 | 0xf3 | 0x40..=0x4f) && length < 4 {
        code >>= 8;
        length += 1;
    }
    let [a, b, c, ..] = code.to_le_bytes();
    let done = match (a, b, c) {
        (0xfa, ..) => set_mask(frame, 1, 1),
        (0xfb, ..) => set_mask(frame, 0, 1),
        (0xf4, ..) => {
            events::block();
            Some(1)
        }
        (0xec..=0xed, ..) => input(frame, frame.rdx as u16, 1),
        (0xe4..=0xe5, port, _) => input(frame, port.into(), 2),
        (0xee..=0xef, ..) => Some(1),
        (0xe6..=0xe7, ..) => Some(2),
        (0x0f, 0x30, _) => write_msr(frame),
        (0x0f, 0x32, _) => read_msr(frame),
        (0x0f, 0x33, _) => {
            frame.rax = 0;
            frame.rdx = 0;
            Some(2)
        }
        // wbinvd, invd, clts
        (0x0f, 0x06 | 0x08 | 0x09, _) => Some(2),
        // xsetbv: the VMM has already set XCR0.
        (0x0f, 0x01, 0xd1) => Some(3),
        (0x0f, 0x20, modrm) => read_control(frame, modrm, length),
        (0x0f, 0x22, _) => Some(3),
        _ => None,
    };
    match done {
        Some(n) => {
            frame.rip += length + n;
            true
        }
        // The kernel probes for MSRs and expects #GP on an unknown one, so that is not logged.
        None => {
            if (a, b) != (0x0f, 0x32) {
                log!("monitor: #GP at {:#x}: {code:#x}", frame.rip + length);
            }
            false
        }
    }
}

#[expect(clippy::unnecessary_wraps, reason = "one shape for all instructions")]
fn set_mask(_frame: &mut Frame, mask: u8, length: u64) -> Option<u64> {
    poke(entry().vcpu_info + 1, mask);
    Some(length)
}

/// Every port reads as all-ones, as if there were no device, except for the PIT (0x40–0x43), which reads as zero: with
/// all-ones, the guest's TSC calibration takes two seconds.
#[expect(clippy::unnecessary_wraps, reason = "one shape for all instructions")]
fn input(frame: &mut Frame, port: u16, length: u64) -> Option<u64> {
    frame.rax = if (0x40..=0x43).contains(&port) {
        0
    } else {
        0xffff_ffff
    };
    Some(length)
}

#[expect(clippy::unnecessary_wraps, reason = "one shape for all instructions")]
fn write_msr(frame: &Frame) -> Option<u64> {
    let value = frame.rdx << 32 | frame.rax & 0xffff_ffff;
    match frame.rcx & 0xffff_ffff {
        MSR_FS_BASE => write_fs_base(value),
        MSR_GS_BASE => write_gs_base(value),
        MSR_KERNEL_GS_BASE => entry().user_gs = value,
        _ => {}
    }
    Some(2)
}

fn read_msr(frame: &mut Frame) -> Option<u64> {
    let value = match frame.rcx & 0xffff_ffff {
        MSR_FS_BASE => read_fs_base(),
        MSR_GS_BASE => read_gs_base(),
        MSR_KERNEL_GS_BASE => entry().user_gs,
        MSR_EFER => EFER,
        MSR_APIC_BASE => APIC_BASE,
        MSR_MISC_ENABLE => 1,
        // Unknown MSR: the kernel's safe readers expect a fault and have a fixup.
        _ => return None,
    };
    frame.rax = value & 0xffff_ffff;
    frame.rdx = value >> 32;
    Some(2)
}

/// `mov reg, crN`. The high bit of the register number, REX.B, is in the last prefix, because REX must come last.
fn read_control(frame: &mut Frame, modrm: u8, prefixes: u64) -> Option<u64> {
    const CR0: u64 = 0x8005_0033;
    const CR4: u64 = 0x0004_06a0;
    let value = match modrm >> 3 & 7 {
        0 => CR0,
        2 => peek::<u64>(entry().vcpu_info + 16),
        3 => cr3(),
        4 => CR4,
        _ => return None,
    };
    let extended = prefixes > 0 && peek::<u8>(frame.rip + prefixes - 1) & 0xf1 == 0x41;
    let slot = match (modrm & 7, extended) {
        (0, false) => &mut frame.rax,
        (1, false) => &mut frame.rcx,
        (2, false) => &mut frame.rdx,
        (3, false) => &mut frame.rbx,
        (5, false) => &mut frame.rbp,
        (6, false) => &mut frame.rsi,
        (7, false) => &mut frame.rdi,
        (0, true) => &mut frame.r8,
        (1, true) => &mut frame.r9,
        (2, true) => &mut frame.r10,
        (3, true) => &mut frame.r11,
        (4, true) => &mut frame.r12,
        (5, true) => &mut frame.r13,
        (6, true) => &mut frame.r14,
        (7, true) => &mut frame.r15,
        _ => return None,
    };
    *slot = value;
    Some(3)
}

/// The hypercall `SCHEDOP_shutdown`. Reports any reason except power-off and reboot as a crash, or as its own number if
/// that is greater than [`end::CRASH`].
pub fn shutdown(reason: u32) -> ! {
    events::end(match reason {
        0 => end::POWEROFF,
        1 => end::REBOOT,
        other => u64::from(other).max(end::CRASH),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_reads_its_port_after_prefixes() {
        // `in eax, 0x40`, `in ax, 0x40`, `in ax, 0x60`, `in eax, dx`, `in ax, dx`
        for (code, dx, rax, length) in [
            ([0xe5, 0x40, 0x90], 0, 0, 2),
            ([0x66, 0xe5, 0x40], 0, 0, 3),
            ([0x66, 0xe5, 0x60], 0x40, 0xffff_ffff, 3),
            ([0xed, 0x90, 0x90], 0x43, 0, 1),
            ([0x66, 0xed, 0x40], 0x60, 0xffff_ffff, 2),
        ] {
            let mut bytes = [0_u8; 8];
            bytes[..3].copy_from_slice(&code);
            let rip = bytes.as_ptr() as u64;
            // SAFETY: all fields are integers.
            let mut frame: Frame = unsafe { core::mem::zeroed() };
            (frame.rip, frame.rdx, frame.rax) = (rip, dx, 7);
            assert!(privileged(&mut frame));
            assert_eq!((frame.rax, frame.rip - rip), (rax, length), "{code:x?}");
        }
    }
}
