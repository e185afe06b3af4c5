//! The monitor's region: its image, descriptor tables and page tables.

use kvm_bindings::kvm_cpuid_entry2;
use monitor::layout::{
    BASE, CPU_NODE_INDEX, CPUID_ENTRIES, Clock, CpuidEntry, DIRECT, GATE_CS, HEADER_MAGIC, M2P,
    STUB_BYTES, Shared, TIMER_VECTOR, TSS_SELECTOR, USER_CS, USER_SS, offset,
};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::devices::Ram;

/// The linked image, made by build.rs.
const IMAGE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/monitor.bin"));

/// Flags of a page-table entry: present, writable, user, accessed, dirty.
pub(crate) const TABLE: u64 = 0x67;
/// Like [`TABLE`], for a 2 MiB page.
const LARGE: u64 = 0xe7;
const MIB2: u64 = 2 << 20;

/// Addresses in the image, from its header.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entries {
    /// Value of MSR LSTAR.
    pub syscall: u64,
    /// Target of the rewritten hypercall site.
    pub hypercall: u64,
    /// Target of the rewritten iret site.
    pub iret: u64,
    /// Guest-physical address of the L3 table for the monitor's L4 slot.
    pub l3: u64,
}

fn word(index: usize) -> u64 {
    IMAGE
        .get(index * 8..index * 8 + 8)
        .and_then(|b| b.try_into().ok())
        .map_or(0, u64::from_le_bytes)
}

/// Writes the region at guest-physical address `ram`.
///
/// # Errors
/// Returns an error if the region does not lie within guest memory.
pub(crate) fn build(
    memory: &Ram,
    ram: u64,
    cpuid: &[kvm_cpuid_entry2],
) -> Result<Entries, GuestMemoryError> {
    debug_assert_eq!(word(0), HEADER_MAGIC);
    memory.write_slice(IMAGE, GuestAddress(ram))?;
    let put = |at: u64, value: u64| memory.write_obj(value, GuestAddress(ram + at));
    for (index, value) in gdt() {
        put(offset::GDT + index as u64 * 8, value)?;
    }
    tss(&put)?;
    idt(&put)?;
    page_tables(&put, ram)?;
    // vcpu_info[0].evtchn_upcall_mask: the kernel starts with events masked.
    put(offset::SHARED_INFO, 0x100)?;
    cpuid_table(&put, cpuid)?;
    identity_frames(memory, ram + offset::M2P, ram)?;
    Ok(Entries {
        syscall: word(1),
        hypercall: word(2),
        iret: word(3),
        l3: ram + offset::PAGE_TABLES,
    })
}

/// Writes all frame numbers of RAM in order: the content of the machine-to-phys table and of the p2m list.
pub(super) fn identity_frames(memory: &Ram, at: u64, ram: u64) -> Result<(), GuestMemoryError> {
    const FRAMES: u64 = 1 << 12;
    let mut bytes = Vec::with_capacity(8 << 12);
    for first in (0..ram >> 12).step_by(1 << 12) {
        bytes.clear();
        for frame in first..(first + FRAMES).min(ram >> 12) {
            bytes.extend_from_slice(&frame.to_le_bytes());
        }
        memory.write_slice(&bytes, GuestAddress(at + first * 8))?;
    }
    Ok(())
}

/// Descriptors by index: flat 64-bit code and data segments, and the TSS.
fn gdt() -> Vec<(usize, u64)> {
    const CODE: u64 = 0x00af_9b00_0000_ffff;
    const DATA: u64 = 0x00cf_9300_0000_ffff;
    const DPL3: u64 = 3 << 45;
    let tss = BASE + offset::TSS;
    let low = 0x0000_8900_0000_0067 | (tss & 0xff_ffff) << 16 | (tss >> 24 & 0xff) << 56;
    vec![
        (usize::from(GATE_CS >> 3), CODE),
        (usize::from(GATE_CS >> 3) + 1, DATA),
        (usize::from(USER_SS >> 3), DATA | DPL3),
        (usize::from(USER_CS >> 3), CODE | DPL3),
        (usize::from(TSS_SELECTOR >> 3), low),
        (usize::from(TSS_SELECTOR >> 3) + 1, tss >> 32),
        // Limit 0: CPU 0, node 0.
        (CPU_NODE_INDEX, 0x00c0_f300_0000_0000 & !(1 << 55)),
    ]
}

fn tss(put: &impl Fn(u64, u64) -> Result<(), GuestMemoryError>) -> Result<(), GuestMemoryError> {
    // Intel SDM 3A, 8.7: RSP0 at offset 4, IST1 at 36. The fields are not aligned to 8 bytes; the TSS is written in
    // words.
    let mut bytes = [0_u8; 104];
    bytes[4..12].copy_from_slice(&word(9).to_le_bytes());
    bytes[36..44].copy_from_slice(&word(7).to_le_bytes());
    // No I/O permission map: its base lies beyond the end of the segment.
    bytes[102..104].copy_from_slice(&104_u16.to_le_bytes());
    bytes[44..52].copy_from_slice(&word(8).to_le_bytes());
    for (i, chunk) in bytes.chunks_exact(8).enumerate() {
        let value = u64::from_le_bytes(chunk.try_into().unwrap_or_default());
        put(offset::TSS + i as u64 * 8, value)?;
    }
    Ok(())
}

fn idt(put: &impl Fn(u64, u64) -> Result<(), GuestMemoryError>) -> Result<(), GuestMemoryError> {
    const INTERRUPT: u64 = 0xe;
    const TRAP: u64 = 0xf;
    const GATE_VECTOR: u64 = 4;
    const TIMER: u64 = TIMER_VECTOR as u64;
    for vector in 0..256_u64 {
        // Exceptions use IST 1 and keep IF; interrupts use IST 2 and clear it. Vector 4 is the gate to CPL 0.
        let (target, selector, ist, kind) = match vector {
            GATE_VECTOR => (word(6), GATE_CS, 0, INTERRUPT),
            TIMER => (word(5) + STUB_BYTES, USER_CS, 2, INTERRUPT),
            0..32 => (word(4) + vector * STUB_BYTES, USER_CS, 1, TRAP),
            _ => (word(5), USER_CS, 2, INTERRUPT),
        };
        let low = target & 0xffff
            | u64::from(selector) << 16
            | ist << 32
            | kind << 40
            | 3 << 45
            | 1 << 47
            | (target >> 16 & 0xffff) << 48;
        put(offset::IDT + vector * 16, low)?;
        put(offset::IDT + vector * 16 + 8, target >> 32)?;
    }
    Ok(())
}

/// Writes the list from which the monitor serves the kernel's CPUID: consecutive `CpuidEntry`s, terminated by an empty
/// one. Entries with all registers zero, and entries beyond the list's capacity, are left out.
fn cpuid_table(
    put: &impl Fn(u64, u64) -> Result<(), GuestMemoryError>,
    entries: &[kvm_cpuid_entry2],
) -> Result<(), GuestMemoryError> {
    let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    let kept = entries
        .iter()
        .filter(|e| e.eax | e.ebx | e.ecx | e.edx != 0);
    for (i, e) in kept.take(CPUID_ENTRIES - 1).enumerate() {
        let at = offset::CPUID + (i * size_of::<CpuidEntry>()) as u64;
        put(at, pair(e.function, e.index))?;
        put(at + 8, pair(e.flags & 1, 1))?;
        put(at + 16, pair(e.eax, e.ebx))?;
        put(at + 24, pair(e.ecx, e.edx))?;
    }
    Ok(())
}

/// Maps L4 slot 257: the region, the machine-to-phys table and all of guest memory, in 2 MiB pages.
fn page_tables(
    put: &impl Fn(u64, u64) -> Result<(), GuestMemoryError>,
    ram: u64,
) -> Result<(), GuestMemoryError> {
    let total = ram + super::region::region_bytes(ram);
    let l3 = offset::PAGE_TABLES;
    let mut next = l3 + 0x1000;
    let mut map = |va: u64, gpa: u64, bytes: u64| {
        for gib in 0..bytes.div_ceil(1 << 30) {
            let l2 = next;
            next += 0x1000;
            put(l3 + (((va - BASE) >> 30) + gib) * 8, (ram + l2) | TABLE)?;
            let left = bytes - (gib << 30);
            for i in 0..left.div_ceil(MIB2).min(512) {
                put(l2 + i * 8, (gpa + (gib << 30) + i * MIB2) | LARGE)?;
            }
        }
        Ok(())
    };
    map(BASE, ram, super::region::region_bytes(ram))?;
    map(
        M2P,
        ram + offset::M2P,
        super::region::region_bytes(ram) - offset::M2P,
    )?;
    map(DIRECT, 0, total)
}

/// Encodes the shared page: its fields in memory order, little-endian, without padding.
pub(crate) fn encode_shared(s: &Shared) -> [u8; size_of::<Shared>()] {
    let c = &s.clock;
    let words = [
        s.pending,
        s.clock_epoch,
        c.tsc_base,
        c.ns_base,
        c.tsc_khz,
        c.wall_base_ns,
        u64::from(c.mul) | u64::from(c.shift.cast_unsigned()) << 32,
        s.ram_pages,
        s.region,
        s.console_ring,
        s.first_cr3,
        s.deadline_tsc,
        s.woken,
        s.end_reason,
        s.log_head,
        s.log_tail,
        s.deferred,
        s.undefined_at,
    ];
    let mut bytes = [0; size_of::<Shared>()];
    for (to, value) in bytes.chunks_exact_mut(8).zip(words) {
        to.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// Decodes the shared page.
pub(crate) fn decode_shared(bytes: &[u8; size_of::<Shared>()]) -> Shared {
    let w = |i: usize| u64::from_le_bytes(bytes[i * 8..i * 8 + 8].try_into().unwrap_or_default());
    let half = |v: u64| u32::try_from(v & 0xffff_ffff).unwrap_or(0);
    Shared {
        pending: w(0),
        clock_epoch: w(1),
        clock: Clock {
            tsc_base: w(2),
            ns_base: w(3),
            tsc_khz: w(4),
            wall_base_ns: w(5),
            mul: half(w(6)),
            shift: half(w(6) >> 32).cast_signed(),
        },
        ram_pages: w(7),
        region: w(8),
        console_ring: w(9),
        first_cr3: w(10),
        deadline_tsc: w(11),
        woken: w(12),
        end_reason: w(13),
        log_head: w(14),
        log_tail: w(15),
        deferred: w(16),
        undefined_at: w(17),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_has_its_header_and_fits() {
        assert_eq!(word(0), HEADER_MAGIC);
        assert!(IMAGE.len() < 0x10_0000);
        for i in 1..10 {
            assert_eq!(word(i) >> 20, BASE >> 20, "entry {i}");
        }
    }

    #[test]
    fn the_shared_page_decodes_unchanged() {
        let shared = Shared {
            pending: 1,
            clock_epoch: 2,
            clock: Clock {
                tsc_base: 3,
                ns_base: 4,
                tsc_khz: 5,
                wall_base_ns: 6,
                mul: 7,
                shift: -1,
            },
            ram_pages: 8,
            region: 9,
            console_ring: 10,
            first_cr3: 16,
            deadline_tsc: 11,
            woken: 12,
            end_reason: 13,
            log_head: 14,
            log_tail: 15,
            deferred: 17,
            undefined_at: 18,
        };
        let bytes = encode_shared(&shared);
        assert_eq!(
            format!("{:?}", decode_shared(&bytes)),
            format!("{shared:?}")
        );
        // The monitor reads the same bytes as a `repr(C)` structure.
        assert_eq!(size_of::<Shared>(), 18 * 8);
    }
}
