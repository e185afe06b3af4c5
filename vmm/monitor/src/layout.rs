//! The interface between the VMM and the monitor: addresses, the shared page, ports, vectors.
//!
//! Guest-physical memory: guest RAM from 0, then the monitor's region.
//!
//! ```text
//! ram + 0          image (text, data, stacks)          at most 1 MiB
//!     + 0x100000   shared page (VMM ↔ monitor); its second half lists the chunks that a clone starts without
//!     + 0x101000   Xen shared_info
//!     + 0x102000   GDT, TSS (one page), IDT (next page)
//!     + 0x104000   CPUID table
//!     + 0x108000   log ring                            32 KiB
//!     + 0x110000   page tables of slot 257
//!     + 2 MiB      machine-to-phys table, 8 bytes per page of RAM, rounded up to 2 MiB
//! ```
//! The region is mapped at [`BASE`]. The machine-to-phys table is mapped a second time at [`M2P`], and all guest RAM is
//! mapped at [`DIRECT`]. All of these addresses are in L4 slot 257, which Xen's ABI reserves for the hypervisor. Code
//! at CPL 3 runs there at native speed.

/// Virtual address of the monitor's region.
pub const BASE: u64 = 0xffff_8080_0000_0000;
/// Virtual address of the machine-to-phys table.
pub const M2P: u64 = BASE + (64 << 30);
/// Virtual address at which guest-physical memory is mapped, writable, in 2 MiB pages.
pub const DIRECT: u64 = BASE + (128 << 30);
/// Index of the L4 entry for all of these addresses.
pub const L4_SLOT: usize = 257;

/// Offsets in the region.
pub mod offset {
    /// [`super::Shared`].
    pub const SHARED: u64 = 0x10_0000;
    /// The list of deferred chunks, [`super::DEFERRED_BYTES`] long.
    pub const DEFERRED: u64 = 0x10_0800;
    /// Xen's `shared_info`.
    pub const SHARED_INFO: u64 = 0x10_1000;
    /// Global descriptor table.
    pub const GDT: u64 = 0x10_2000;
    /// Task state segment, in the GDT's page.
    pub const TSS: u64 = 0x10_2800;
    /// Interrupt descriptor table.
    pub const IDT: u64 = 0x10_3000;
    /// CPUID table, [`super::CPUID_ENTRIES`] of [`super::CpuidEntry`].
    pub const CPUID: u64 = 0x10_4000;
    /// Log ring, [`super::LOG_BYTES`] long.
    pub const LOG: u64 = 0x10_8000;
    /// Page tables of L4 slot 257.
    pub const PAGE_TABLES: u64 = 0x11_0000;
    /// Machine-to-phys table.
    pub const M2P: u64 = 0x20_0000;
}

/// Length in bytes of the list of deferred chunks: chunks of [`CHUNK_BYTES`] that contain no page tables, one bit per
/// chunk. A clone may start before these chunks are registered with KVM. The list exists only in a saved copy of
/// memory.
pub const DEFERRED_BYTES: usize = 256;
/// Size of a chunk in bytes.
pub const CHUNK_BYTES: u64 = 4 << 20;
/// Length of the log ring in bytes, a power of two.
pub const LOG_BYTES: u64 = 0x8000;
/// Code selector of all code at CPL 3.
pub const USER_CS: u16 = 0x33;
/// Data selector of all code at CPL 3.
pub const USER_SS: u16 = 0x2b;
/// Code selector of the gate's routines at CPL 0.
pub const GATE_CS: u16 = 0x10;
/// Selector of the TSS.
pub const TSS_SELECTOR: u16 = 0x40;
/// GDT index of the descriptor whose limit Linux reads to implement getcpu.
pub const CPU_NODE_INDEX: usize = 15;

/// Interrupt vector by which the VMM announces bits in [`Shared::pending`].
pub const EVENT_VECTOR: u8 = 0x40;
/// Interrupt vector of the LAPIC's TSC-deadline timer.
pub const TIMER_VECTOR: u8 = 0x41;

/// Event channel of the console.
pub const CONSOLE_PORT: u32 = 2;
/// Event channel of device 0; device i has `DEVICE_PORT + i`.
pub const DEVICE_PORT: u32 = 16;
/// First event channel that the guest can allocate.
pub const FIRST_DYNAMIC_PORT: u32 = 32;

/// I/O ports by which the monitor exits to the VMM. The written value is ignored.
pub mod port {
    /// The guest is idle until an event or [`super::Shared::deadline_tsc`].
    pub const IDLE: u16 = 0x10;
    /// The log ring is half full.
    pub const LOG: u16 = 0x11;
    /// The guest has ended; [`super::Shared::end_reason`] has the reason.
    pub const END: u16 = 0x12;
    /// An instruction raised #UD, see [`super::Shared::deferred`].
    pub const MEMORY: u16 = 0x13;
}

/// Values of [`Shared::end_reason`]: Xen's `SHUTDOWN_*`, and [`end::MONITOR`].
pub mod end {
    /// Orderly power-off.
    pub const POWEROFF: u64 = 0;
    /// Reboot.
    pub const REBOOT: u64 = 1;
    /// The guest kernel crashed.
    pub const CRASH: u64 = 3;
    /// The monitor cannot continue; the log has the reason.
    pub const MONITOR: u64 = 256;
}

/// Number of entries in the CPUID table. The last one is always empty.
pub const CPUID_ENTRIES: usize = 512;

/// The guest kernel's CPUID values for one leaf.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuidEntry {
    /// Leaf (EAX).
    pub function: u32,
    /// Subleaf (ECX).
    pub index: u32,
    /// 1 if the leaf has subleaves.
    pub indexed: u32,
    /// 1 in a used entry, 0 in the entries after the last used one.
    pub used: u32,
    /// EAX, EBX, ECX, EDX.
    pub registers: [u32; 4],
}

/// Parameters of the guest's clock: `ns = ns_base + scale(tsc - tsc_base)` with pvclock's scaling (`(delta << shift) *
/// mul >> 32`; a negative shift shifts right).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Clock {
    /// Host TSC at `ns_base`.
    pub tsc_base: u64,
    /// System time in nanoseconds at `tsc_base`.
    pub ns_base: u64,
    /// TSC ticks per millisecond.
    pub tsc_khz: u64,
    /// Wall clock at system time zero, in nanoseconds since 1970.
    pub wall_base_ns: u64,
    /// pvclock multiplier.
    pub mul: u32,
    /// pvclock shift.
    pub shift: i32,
}

impl Clock {
    /// System time in nanoseconds at a TSC value.
    #[must_use]
    pub fn ns_at(&self, tsc: u64) -> u64 {
        let delta = tsc.wrapping_sub(self.tsc_base);
        let delta = if self.shift < 0 {
            delta >> self.shift.unsigned_abs()
        } else {
            delta << self.shift.unsigned_abs()
        };
        let scaled = (u128::from(delta) * u128::from(self.mul)) >> 32;
        self.ns_base.wrapping_add(scaled as u64)
    }

    /// TSC value at which a system time has been reached. For a time before `ns_base`, just after `tsc_base`.
    #[must_use]
    pub fn tsc_at(&self, ns: u64) -> u64 {
        let delta = u128::from(ns.saturating_sub(self.ns_base));
        let ticks = delta * u128::from(self.tsc_khz) / 1_000_000;
        // One tick more, so that `ns_at` of the result has reached `ns`.
        self.tsc_base
            .saturating_add(u64::try_from(ticks).unwrap_or(u64::MAX >> 1))
            .saturating_add(1)
    }
}

/// The page shared by VMM and monitor. The comment of each field names the side that writes it. There are two
/// exceptions: the monitor clears the bits of `pending`, and the VMM adjusts `deadline_tsc` when it restores a clone.
/// The VMM accesses the page only while the vCPU is out of the guest.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Shared {
    /// VMM: event channels 0–63 to raise. The monitor clears the bits.
    pub pending: u64,
    /// VMM: incremented when `clock` has new values (after a restore).
    pub clock_epoch: u64,
    /// VMM: the guest's clock.
    pub clock: Clock,
    /// VMM: number of pages of guest RAM.
    pub ram_pages: u64,
    /// VMM: guest-physical address of the region.
    pub region: u64,
    /// VMM: guest-physical address of the guest's console ring (`io/console.h`).
    pub console_ring: u64,
    /// VMM: CR3 at the guest's start.
    pub first_cr3: u64,
    /// Monitor: TSC value of the guest's next timer interrupt; 0 if none is set.
    pub deadline_tsc: u64,
    /// Monitor: 1 if an interrupt was taken since the idle check began. The VMM must then not sleep.
    pub woken: u64,
    /// Monitor: one of [`end`].
    pub end_reason: u64,
    /// Monitor: number of bytes ever written to the log ring.
    pub log_head: u64,
    /// VMM: number of bytes ever read from the log ring.
    pub log_tail: u64,
    /// VMM: 1 while some guest memory is not registered with KVM. KVM emulates instructions that access this memory. It
    /// raises #UD for instructions that it cannot emulate, and for instructions that lie in this memory.
    pub deferred: u64,
    /// Monitor: address of the instruction that raised #UD.
    pub undefined_at: u64,
}

/// Header of the image: the virtual addresses of its entry points and stacks.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Header {
    /// Always [`HEADER_MAGIC`].
    pub magic: u64,
    /// Target of `syscall` (MSR LSTAR).
    pub syscall: u64,
    /// Target of the rewritten hypercall site.
    pub hypercall: u64,
    /// Target of the rewritten iret site.
    pub iret: u64,
    /// 32 exception stubs, [`STUB_BYTES`] apart.
    pub exceptions: u64,
    /// Stub for the vectors from 32 up. The stub for [`TIMER_VECTOR`] follows at a distance of [`STUB_BYTES`].
    pub interrupt: u64,
    /// Target of `int $4`, at CPL 0.
    pub gate: u64,
    /// Top of the exception stack (IST 1).
    pub exception_stack: u64,
    /// Top of the interrupt stack (IST 2).
    pub interrupt_stack: u64,
    /// Top of the gate's stack (RSP0).
    pub gate_stack: u64,
}

/// "MONITOR3" in memory order.
pub const HEADER_MAGIC: u64 = u64::from_le_bytes(*b"MONITOR3");
/// Distance between stubs in bytes.
pub const STUB_BYTES: u64 = 16;

/// pvclock multiplier and shift for a TSC frequency in kHz, as KVM and Xen choose them: the shift brings the frequency
/// into the range of 1 to 2 GHz, so that the multiplier uses all of its 32 bits.
#[must_use]
pub fn scale_of(tsc_khz: u64) -> (u32, i32) {
    let mut hz = tsc_khz.max(1) * 1000;
    let mut shift = 0;
    while hz > 2_000_000_000 {
        hz >>= 1;
        shift -= 1;
    }
    while hz <= 1_000_000_000 {
        hz <<= 1;
        shift += 1;
    }
    // Computed from the exact frequency, because the shifts above round `hz`.
    let exact = u128::from(tsc_khz.max(1)) * 1000;
    let ns = 1_000_000_000_u128 << 32;
    let mul = if shift < 0 {
        (ns << (-shift)) / exact
    } else {
        (ns >> shift) / exact
    };
    (mul as u32, shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_has_passed_when_its_tsc_is_reached() {
        for khz in [800_000_u64, 2_596_144, 4_999_999] {
            let (mul, shift) = scale_of(khz);
            let clock = Clock {
                tsc_base: 12_345_678_901,
                ns_base: 77,
                tsc_khz: khz,
                wall_base_ns: 0,
                mul,
                shift,
            };
            for ns in [78, 1_000_000, 3_600_000_000_000, 86_400_000_000_000] {
                let at = clock.ns_at(clock.tsc_at(ns));
                // pvclock's multiplier is rounded by up to one part in 2^31.
                assert!(at + (ns >> 30) + 2 >= ns, "{khz} {ns} {at}");
            }
        }
    }
}
