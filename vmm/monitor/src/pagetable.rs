//! The guest's page tables. Machine frames are guest-physical frames; the monitor writes entries through
//! its own map of all RAM, KVM's shadow paging sees the stores. Every present entry gets the U bit, since
//! the guest kernel runs at CPL 3 too.

use crate::{
    gate,
    layout::{L4_SLOT, offset},
    state::{cr3, direct, peek, poke, rest, shared},
};

/// Present.
pub const P: u64 = 1;
/// Writable.
pub const RW: u64 = 1 << 1;
/// User.
pub const U: u64 = 1 << 2;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
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

/// Guest-physical memory that the direct map covers: RAM and the monitor's region.
fn is_ram(gpa: u64) -> bool {
    let pages = crate::events::from_vmm(unsafe { &raw const (*shared()).ram_pages });
    gpa >> 12 < pages
}

/// `mmu_update` with MMU_NORMAL_PT_UPDATE or MMU_PT_UPDATE_PRESERVE_AD: `at` is a machine address.
/// False if it is not RAM.
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

/// Address (in the direct map) of the L1 entry of a virtual address in the current tables.
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

/// `update_va_mapping`. A read-only mapping of the kernel's direct map is asked for where a page becomes a
/// page table; it stays writable here, since the kernel's own atomic updates of entries go through it.
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

/// A page that was a page table is plain RAM again. KVM goes on write-protecting it until it sees a store
/// that no page table gets: one of two bytes.
pub fn forget_shadow(gpa: u64) {
    if is_ram(gpa) {
        let at = direct(gpa);
        poke(at, peek::<u16>(at));
    }
}

/// The monitor's own entry of an L4 table.
fn own_entry() -> u64 {
    let region = crate::events::from_vmm(unsafe { &raw const (*shared()).region });
    (region + offset::PAGE_TABLES) | P | RW | U
}

/// `MMUEXT_PIN_L4_TABLE`: the monitor's slot, and U bits in the tables of the kernel's half. Entries of the
/// user half are made with U by the kernel itself.
pub fn pin_l4(gpa: u64) -> bool {
    if !is_ram(gpa) {
        return false;
    }
    for index in KERNEL_HALF..512 {
        fix(gpa, index, 3);
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

/// Sets U in one entry; goes on below only where it was missing, so that tables shared by all address
/// spaces are walked once.
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

/// `MMUEXT_NEW_BASEPTR`.
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

/// What the walk of a kernel address met that a fault can be blamed on, repaired.
pub enum Repair {
    /// An entry lacked U, or a page table's page was read-only: try the access again.
    Retry,
    /// Nothing of ours: the fault is the guest's.
    Guest,
}

/// Repairs a protection fault of the guest kernel: U bits that were never set because the kernel wrote the
/// entry itself, and read-only entries of its map of page tables (see [`update_va`]).
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
