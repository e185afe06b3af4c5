//! The guest's page tables. Xen's machine frames are guest-physical frames here. The monitor writes entries through its
//! own map of all RAM ([`direct`]), and KVM's shadow paging detects the stores. Every present entry gets the U bit,
//! because the guest kernel also runs at CPL 3.

use crate::{
    gate,
    layout::{L4_SLOT, offset},
    pagefault::{FETCH, PRESENT, WRITE},
    state::{cr3, direct, peek, poke, rest, shared},
};

pub const P: u64 = 1;
pub const RW: u64 = 1 << 1;
pub const U: u64 = 1 << 2;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const NX: u64 = 1 << 63;
const FRAME: u64 = 0x000f_ffff_ffff_f000;
/// The guest kernel's map of all RAM (Documentation/arch/x86/x86_64/mm.rst).
const DIRECT_MAP: core::ops::Range<u64> = 0xffff_8880_0000_0000..0xffff_c880_0000_0000;
/// First L4 entry of the kernel's half.
const KERNEL_HALF: u64 = 256;

fn with_user(value: u64) -> u64 {
    if value & P != 0 { value | U } else { value }
}

fn entry_at(table: u64, index: u64) -> u64 {
    direct((table & FRAME) + index * 8)
}

/// Whether an address is in guest RAM. The monitor's region does not count.
fn is_ram(gpa: u64) -> bool {
    let pages = crate::events::from_vmm(unsafe { &raw const (*shared()).ram_pages });
    gpa >> 12 < pages
}

/// `mmu_update` with MMU_NORMAL_PT_UPDATE or MMU_PT_UPDATE_PRESERVE_AD. `at` is the machine address of the entry.
/// Returns false if `at` is not in guest RAM.
pub fn update(at: u64, value: u64, preserve_ad: bool) -> bool {
    if !is_ram(at) {
        return false;
    }
    let at = direct(at & !7);
    let kept = if preserve_ad {
        peek::<u64>(at) & (ACCESSED | DIRTY)
    } else {
        0
    };
    poke(at, with_user(value) | kept);
    true
}

/// Address, in the monitor's map of RAM, of the L1 entry for a virtual address in the current tables. `None` if there
/// is no L1 table for the address.
pub fn leaf(va: u64) -> Option<u64> {
    let mut table = cr3();
    for level in [39, 30, 21] {
        let at = entry_at(table, va >> level & 511);
        let value = peek::<u64>(at);
        if value & P == 0 || value & LARGE != 0 || !is_ram(value & FRAME) {
            return None;
        }
        table = value;
    }
    Some(entry_at(table, va >> 12 & 511))
}

/// The access that the current tables allow at an address: P, RW and U if all levels have them, NX if one has it. 0 if
/// no page is mapped. `None` if a table is not in guest RAM.
fn rights(va: u64) -> Option<u64> {
    let (mut table, mut all, mut nx) = (cr3(), P | RW | U, 0);
    for level in [39, 30, 21, 12] {
        let value = peek::<u64>(entry_at(table, va >> level & 511));
        if value & P == 0 {
            return Some(0);
        }
        all &= value;
        nx |= value & NX;
        if level == 12 || value & LARGE != 0 {
            break;
        }
        if !is_ram(value & FRAME) {
            return None;
        }
        table = value;
    }
    Some(all | nx)
}

/// Whether a page is mapped at an address.
pub fn is_mapped(va: u64) -> bool {
    rights(va).is_some_and(|rights| rights != 0)
}

/// Whether the tables refuse an access at an address with this error code.
pub fn refuses(va: u64, error: u64) -> bool {
    let Some(rights) = rights(va) else {
        return false;
    };
    if error & PRESENT == 0 || rights == 0 {
        return error & PRESENT == 0 && rights == 0;
    }
    let write = error & WRITE != 0 && rights & RW == 0;
    rights & U == 0 || write || error & FETCH != 0 && rights & NX != 0
}

/// The hypercall `update_va_mapping`. Returns false if the address has no L1 entry. When a page becomes a page table,
/// the kernel requests a read-only mapping of that page in its direct map. The mapping stays writable nevertheless,
/// because the kernel updates entries atomically through it.
pub fn update_va(va: u64, value: u64) -> bool {
    let Some(at) = leaf(va) else { return false };
    let was = peek::<u64>(at);
    let in_direct_map = DIRECT_MAP.contains(&va);
    let keep_writable = in_direct_map && was & RW != 0;
    let value = with_user(value) | if keep_writable { RW } else { 0 };
    if value != was {
        poke(at, value);
    }
    if in_direct_map {
        forget_shadow(value & FRAME);
    }
    true
}

/// Ends KVM's write protection of a page that was a page table and is now ordinary RAM. KVM ends it when it sees a
/// store whose size is unusual for page table entries; this function stores two bytes.
pub fn forget_shadow(gpa: u64) {
    if is_ram(gpa) {
        let at = direct(gpa);
        poke(at, peek::<u16>(at));
    }
}

/// The entry of the monitor's slot, the same in every L4 table.
fn own_entry() -> u64 {
    let region = crate::events::from_vmm(unsafe { &raw const (*shared()).region });
    (region + offset::PAGE_TABLES) | P | RW | U
}

/// The hypercall `MMUEXT_PIN_L4_TABLE`: sets the monitor's slot, and the U bits in the tables of the kernel's half. In
/// the user's half, the kernel sets U itself. Returns false if the table is not in guest RAM.
///
/// Skips tables that the current address space also has: they were walked when that one was pinned. Entries that the
/// kernel has added to them since are repaired when the kernel uses them ([`repair`]).
pub fn pin_l4(gpa: u64) -> bool {
    if !is_ram(gpa) {
        return false;
    }
    let present = cr3();
    for index in KERNEL_HALF..512 {
        let [new, known] = [gpa, present].map(|l4| peek::<u64>(entry_at(l4, index)));
        if (new ^ known) & !ACCESSED != 0 {
            fix(gpa, index, 3);
        }
    }
    own_slot(gpa);
    true
}

fn own_slot(l4: u64) {
    let at = entry_at(l4, L4_SLOT as u64);
    if peek::<u64>(at) != own_entry() {
        poke(at, own_entry());
    }
}

/// Sets U in one present entry and in the entries below it. `level` is 3 for an entry of an L4 table and 0 for an entry
/// of an L1 table. An L1 table is walked only if the entry that refers to it lacked U, so that the L1 tables shared by
/// all address spaces are walked only once.
fn fix(table: u64, index: u64, level: u32) {
    let at = entry_at(table, index);
    let value = peek::<u64>(at);
    if value & P == 0 || index == L4_SLOT as u64 && level == 3 {
        return;
    }
    if value & U == 0 {
        poke(at, value | U);
    }
    let below = value & FRAME;
    if level > 0 && value & LARGE == 0 && is_ram(below) && (value & U == 0 || level > 1) {
        for index in 0..512 {
            fix(below, index, level - 1);
        }
    }
}

/// The hypercall `MMUEXT_NEW_BASEPTR`: switches to another L4 table. Returns false if the table is not in guest RAM.
pub fn switch(gpa: u64) -> bool {
    if !is_ram(gpa) {
        return false;
    }
    own_slot(gpa);
    rest().cr3 = gpa;
    gate::write_cr3(gpa);
    true
}

/// Flushes all translations of the current address space.
pub fn flush() {
    gate::write_cr3(cr3());
}

/// The result of [`repair`].
pub enum Repair {
    /// An entry lacked U or was read-only and was repaired: the guest must retry the access.
    Retry,
    /// Nothing to repair: the fault belongs to the guest.
    Guest,
}

/// Repairs a protection fault of the guest kernel: sets missing U bits in entries that the kernel wrote itself and, for
/// a write to the kernel's direct map, makes a read-only entry writable (see [`update_va`]).
pub fn repair(va: u64, write: bool) -> Repair {
    let mut table = cr3();
    let mut repaired = Repair::Guest;
    for level in [39, 30, 21, 12] {
        let at = entry_at(table, va >> level & 511);
        let mut value = peek::<u64>(at);
        if value & P == 0 {
            return Repair::Guest;
        }
        let mut wanted = value | U;
        if write && level == 12 && DIRECT_MAP.contains(&va) {
            wanted |= RW;
        }
        if wanted != value {
            poke(at, wanted);
            value = wanted;
            repaired = Repair::Retry;
        }
        if value & LARGE != 0 && level > 12 || !is_ram(value & FRAME) {
            break;
        }
        table = value;
    }
    if matches!(repaired, Repair::Retry) {
        gate::invlpg(va);
    }
    repaired
}
