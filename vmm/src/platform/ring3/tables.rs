//! Finds the guest's page tables. KVM walks them itself, and a walk through memory without a slot is a page fault in
//! the guest. Therefore chunks with page tables have slots from the start.
//!
//! Every L4 table that was ever loaded or pinned has the monitor's entry in the monitor's slot (`pagetable::own_slot`).
//! Another page can have the same value there only by accident or intent; then more chunks than needed are registered.
//! For an address space that is not pinned yet, only the kernel's half is certain to be found, through other L4 tables.
//! For the user's half Linux walks the tables itself before it accepts a fault.

use std::{collections::BTreeSet, io};

use monitor::layout::{CHUNK_BYTES, L4_SLOT, offset};
use vm_memory::{Bytes, GuestAddress};

use super::slots::{self, WORDS};
use crate::{devices::Ram, memory::Memory};

const P: u64 = 1;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const FRAME: u64 = 0x000f_ffff_ffff_f000;
/// P, RW, U: the flags of the monitor's entry.
const OWN: u64 = 7;

/// The chunks without page tables. `memory` has `ram` bytes of RAM, and this process must be the one that made all
/// writes to it, as in a VM that was booted.
///
/// # Errors
/// Returns an error if /proc/self/pagemap cannot be read.
pub(super) fn deferred(memory: &Memory, ram: u64) -> io::Result<[u64; WORDS]> {
    let mut found = BTreeSet::new();
    for (start, bytes) in memory.private_ranges()? {
        for page in (start..(start + bytes).min(ram)).step_by(4096) {
            if is_l4(&memory.ram, ram, page) {
                collect(&memory.ram, ram, page, 3, &mut found);
            }
        }
    }
    let chunks: BTreeSet<u64> = found.iter().map(|table| table / CHUNK_BYTES).collect();
    // A chunk that contains a part of the monitor's region does not count as RAM.
    Ok(slots::list(
        (0..ram / CHUNK_BYTES).map(|chunk| !chunks.contains(&chunk)),
    ))
}

/// Translates a virtual address to a guest-physical one, if it is mapped.
pub(super) fn translate(ram: &Ram, cr3: u64, va: u64) -> Option<u64> {
    let mut table = cr3;
    for shift in [39, 30, 21, 12] {
        let entry = word(ram, (table & FRAME) + (va >> shift & 511) * 8);
        let leaf = shift == 12 || entry & LARGE != 0;
        if entry & P == 0 {
            return None;
        } else if leaf {
            let inside = (1 << shift) - 1;
            return Some(entry & FRAME & !inside | va & inside);
        }
        table = entry;
    }
    None
}

fn word(ram: &Ram, at: u64) -> u64 {
    ram.read_obj(GuestAddress(at)).unwrap_or(0)
}

fn is_l4(memory: &Ram, ram: u64, page: u64) -> bool {
    let entry = word(memory, page + L4_SLOT as u64 * 8);
    entry & !(ACCESSED | DIRTY) == (ram + offset::PAGE_TABLES) | OWN
}

/// Collects a table and the tables below it. Each table is visited once, so this terminates for any content.
fn collect(memory: &Ram, ram: u64, table: u64, level: u32, found: &mut BTreeSet<u64>) {
    if table >= ram || !found.insert(table) || level == 0 {
        return;
    }
    let mut bytes = [0; 4096];
    if memory.read_slice(&mut bytes, GuestAddress(table)).is_err() {
        return;
    }
    for entry in bytes.chunks_exact(8) {
        let entry = u64::from_le_bytes(entry.try_into().unwrap_or_default());
        if entry & (P | LARGE) == P {
            collect(memory, ram, entry & FRAME, level - 1, found);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAM: u64 = 8 * CHUNK_BYTES;

    /// Writes an L4 table to chunk `n`, and an L3, an L2 and an L1 table to the chunks after it.
    fn put_tables(memory: &Memory, n: u64) {
        let put = |at: u64, value: u64| memory.ram.write_obj(value, GuestAddress(at)).unwrap();
        let at = |i: u64| (n + i) * CHUNK_BYTES + 0x3000;
        put(
            at(0) + 257 * 8,
            (RAM + offset::PAGE_TABLES) | OWN | ACCESSED | DIRTY,
        );
        for i in 0..3 {
            put(at(i) + 5 * 8, at(i + 1) | 0x67);
        }
    }

    fn without_tables(memory: &Memory) -> Vec<u64> {
        let list = deferred(memory, RAM).unwrap();
        assert_eq!(list[1..], [0; WORDS - 1]);
        (0..64).filter(|i| list[0] >> i & 1 == 1).collect()
    }

    #[test]
    fn chunks_with_tables_of_any_level_are_not_deferred() {
        let memory = Memory::anonymous(RAM + (4 << 20), None).unwrap();
        assert_eq!(without_tables(&memory), (0..8).collect::<Vec<_>>());
        put_tables(&memory, 2);
        assert_eq!(without_tables(&memory), [0, 1, 6, 7]);
    }

    #[test]
    fn addresses_are_translated_through_pages_of_both_sizes() {
        let memory = Memory::anonymous(RAM, None).unwrap();
        let put = |at: u64, value: u64| memory.ram.write_obj(value, GuestAddress(at)).unwrap();
        put(0x1000 + 511 * 8, 0x2067);
        put(0x2000 + 2 * 8, 0x3067);
        put(0x3000 + 8, (6 << 20) | LARGE | 0x67);
        put(0x3000 + 2 * 8, 0x4067);
        put(0x4000 + 3 * 8, 0x9067 | 1 << 63);
        let va = 0xffff_ff80_8000_0000_u64;
        let translate = |va| translate(&memory.ram, 0x1000, va);
        assert_eq!(
            translate(va + (2 << 20) + 0x12345),
            Some((6 << 20) + 0x12345)
        );
        assert_eq!(translate(va + (4 << 20) + 0x3fff), Some(0x9fff));
        assert_eq!(translate(va + (4 << 20) + 0x4000), None);
        assert_eq!(translate(0), None);
        // A table outside of memory has no entries.
        put(0x2000 + 3 * 8, FRAME | 7);
        assert_eq!(translate(va + (1 << 30)), None);
    }

    #[test]
    fn walking_forged_tables_terminates() {
        let memory = Memory::anonymous(RAM, None).unwrap();
        put_tables(&memory, 0);
        let put = |at: u64, value: u64| memory.ram.write_obj(value, GuestAddress(at)).unwrap();
        // Entries that point to their own table, outside of RAM, and, in the L1 table, to pages as if they were tables.
        put(0x3000, 0x3067);
        put(0x3008, FRAME | 7);
        for i in 0..512 {
            put(3 * CHUNK_BYTES + 0x3000 + i * 8, (5 * CHUNK_BYTES) | 7);
        }
        assert_eq!(without_tables(&memory), [4, 5, 6, 7]);
    }
}
