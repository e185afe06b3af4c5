//! Mapping of the guest kernel's text in 2 MiB pages.
//!
//! A PV kernel maps itself in 4 KiB pages, and a clone takes a shadow fault for each of these pages that it touches:
//! two in five of all faults in its first milliseconds are for kernel text and read-only data. In a template's memory,
//! the entries of a 2 MiB range that are all read-only, contiguous and alike are replaced by one large entry. This does
//! not affect the kernel: it changes its text through other mappings, and never removes these tables.

use vm_memory::{Bytes, GuestAddress};

use crate::devices::Ram;

const P: u64 = 1;
const RW: u64 = 1 << 1;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const NX: u64 = 1 << 63;
const FRAME: u64 = 0x000f_ffff_ffff_f000;
/// First address of the kernel's image mapping (`__START_KERNEL_map`).
const KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;
/// Length of that mapping in bytes.
const KERNEL_MAP_BYTES: u64 = 1 << 30;

fn entry(ram: &Ram, table: u64, index: u64) -> Option<u64> {
    ram.read_obj(GuestAddress((table & FRAME) + index * 8)).ok()
}

/// Changes to a copy of guest memory: guest-physical address and new value of each L2 entry that becomes a large page.
pub(super) fn large_pages(ram: &Ram, cr3: u64) -> Vec<(u64, u64)> {
    let l2 = (|| {
        let l3 = entry(ram, cr3, KERNEL_MAP >> 39 & 511).filter(|e| e & P != 0)?;
        entry(ram, l3, KERNEL_MAP >> 30 & 511).filter(|e| e & (P | LARGE) == P)
    })();
    let Some(l2) = l2 else { return Vec::new() };
    (0..KERNEL_MAP_BYTES >> 21)
        .filter_map(|index| {
            let l1 = entry(ram, l2, index).filter(|e| e & (P | LARGE) == P)?;
            let large = merge(ram, l1)?;
            Some(((l2 & FRAME) + index * 8, large))
        })
        .collect()
}

/// The large entry that is equivalent to all 512 entries of an L1 table, if there is one.
fn merge(ram: &Ram, l1: u64) -> Option<u64> {
    let mut table = [0; 4096];
    ram.read_slice(&mut table, GuestAddress(l1 & FRAME)).ok()?;
    let word = |i: usize| {
        table[i * 8..i * 8 + 8]
            .try_into()
            .map_or(0, u64::from_le_bytes)
    };
    let same = |e: u64| e & !(ACCESSED | DIRTY);
    let first = same(word(0));
    let aligned = (first & FRAME).is_multiple_of(2 << 20);
    let read_only = first & (P | RW) == P;
    let contiguous = (1..512).all(|i| same(word(i)) == first + ((i as u64) << 12));
    // The page-attribute bit of a small page is the page-size bit of a large one.
    let plain = first & LARGE == 0;
    let large = (first & (FRAME | NX | 0x17)) | ACCESSED | DIRTY | LARGE;
    (aligned && read_only && contiguous && plain).then_some(large)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(ram: &Ram, at: u64, value: u64) {
        ram.write_obj(value, GuestAddress(at)).unwrap();
    }

    /// L4 at 0x1000, L3 at 0x2000, L2 at 0x3000, L1 tables from 0x4000 on.
    fn tables() -> Ram {
        let ram = Ram::from_ranges(&[(GuestAddress(0), 4 << 20)]).unwrap();
        put(&ram, 0x1000 + 511 * 8, 0x2000 | 0x67);
        put(&ram, 0x2000 + 510 * 8, 0x3000 | 0x67);
        for i in 0..3_u64 {
            put(&ram, 0x3000 + i * 8, (0x4000 + i * 0x1000) | 0x67);
            for page in 0..512 {
                put(
                    &ram,
                    0x4000 + i * 0x1000 + page * 8,
                    (i << 21 | page << 12) | 0x25,
                );
            }
        }
        ram
    }

    #[test]
    fn only_uniform_read_only_ranges_are_merged() {
        let ram = tables();
        // A writable page in the second range, a hole in the third.
        put(&ram, 0x5000 + 7 * 8, (1 << 21 | 7 << 12) | 0x27);
        put(&ram, 0x6000 + 9 * 8, 0);
        assert_eq!(large_pages(&ram, 0x1000), [(0x3000, 0xe5)]);
    }

    #[test]
    fn walking_forged_tables_terminates() {
        let ram = tables();
        put(&ram, 0x3000, !LARGE);
        assert_eq!(large_pages(&ram, 0x1000).len(), 2);
        assert_eq!(large_pages(&ram, u64::MAX).len(), 0);
    }
}
