//! Guest memory through save, restore, diffs and working sets.

use std::{fs::File, io, os::unix::fs::FileExt};

use vm_memory::{Bytes, GuestAddress, GuestMemoryRegion};

use super::diff::{LONGEST_READ, MAX_READ, put_words, shortest_mapped};
use super::working_set::BLOCK;
use super::*;
use crate::extents::Extents;

#[test]
fn a_private_copy_has_the_content_that_was_saved() {
    let memory = Memory::anonymous(4 << 20, None).unwrap();
    memory
        .ram
        .write_obj(7_u64, GuestAddress(0x20_1000))
        .unwrap();
    let file = tempfile::tempfile().unwrap();
    memory.save(&file).unwrap();
    let copy = Memory::private_copy(file.try_clone().unwrap(), 4 << 20, None).unwrap();
    assert_eq!(
        copy.ram.read_obj::<u64>(GuestAddress(0x20_1000)).unwrap(),
        7
    );
    copy.ram.write_obj(8_u64, GuestAddress(0x20_1000)).unwrap();
    let other = Memory::private_copy(file, 4 << 20, None).unwrap();
    assert_eq!(
        other.ram.read_obj::<u64>(GuestAddress(0x20_1000)).unwrap(),
        7
    );
    let ranges = copy.private_ranges().unwrap();
    assert!(ranges.contains(&(0x20_1000, PAGE)), "{ranges:?}");
}

/// A hole in the middle of the memory of these tests.
const HOLE: Option<Hole> = Some(Hole {
    start: 300 * PAGE,
    end: 2000 * PAGE,
});

#[test]
fn memory_above_a_hole_is_saved_and_restored_in_place() {
    let hole = HOLE.unwrap();
    let memory = Memory::anonymous(4 << 20, HOLE).unwrap();
    let places = [0, hole.start - 8, hole.end, hole.end + 700 * PAGE];
    for at in places {
        memory.ram.write_obj(at + 1, GuestAddress(at)).unwrap();
    }
    for at in [hole.start, hole.end - 1, hole.end + (4 << 20) - hole.start] {
        assert!(memory.ram.read_obj::<u8>(GuestAddress(at)).is_err());
    }
    let regions: Vec<_> = memory
        .regions()
        .map(|r| (r.start_addr().0, r.len()))
        .collect();
    let above = (4 << 20) - hole.start;
    assert_eq!(regions, [(0, hole.start), (hole.end, above)]);
    let file = tempfile::tempfile().unwrap();
    memory.save(&file).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 4 << 20);
    let copy = Memory::private_copy(file.try_clone().unwrap(), 4 << 20, HOLE).unwrap();
    for at in places {
        assert_eq!(copy.ram.read_obj::<u64>(GuestAddress(at)).unwrap(), at + 1);
    }
    copy.prefault(&[(hole.start - PAGE, 2 * PAGE)]);
    assert_eq!(
        copy.private_ranges().unwrap(),
        [(hole.start - PAGE, 2 * PAGE)]
    );
    // Memory that ends at the start of the hole has one part.
    let small = Memory::anonymous(hole.start, HOLE).unwrap();
    assert_eq!(small.regions().count(), 1);
}

/// A base file whose pages differ from each other, and a private copy of it.
fn base_and_copy() -> (File, Memory) {
    const BYTES: u64 = 4 << 20;
    let file = tempfile::tempfile().unwrap();
    file.set_len(BYTES).unwrap();
    for page in (0..BYTES / PAGE).filter(|page| page % 3 == 0) {
        file.write_all_at(&[page.to_le_bytes()[0] | 1; 64], page * PAGE)
            .unwrap();
    }
    let copy = Memory::private_copy(file.try_clone().unwrap(), BYTES, HOLE).unwrap();
    (file, copy)
}

fn all(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(memory.bytes()).unwrap()];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(32))]

    #[test]
    fn a_diff_over_its_base_restores_the_memory(
        writes in proptest::collection::vec((0..1024_u64, 1..9_u64, 0..4_u8), 0..40),
        words in proptest::collection::btree_map(0..512_u64, 0_u64.., 0..4),
    ) {
        let (base, memory) = base_and_copy();
        for (page, pages, fill) in writes {
            let n = usize::try_from(pages.min(1024 - page) * PAGE).unwrap();
            memory.write(page * PAGE, &vec![fill; n]).unwrap();
        }
        let words: Vec<_> = words.into_iter().map(|(i, word)| (i * 8192 + 8, word)).collect();
        let mut file = tempfile::tempfile().unwrap();
        let extents = memory.save_diff(&base, &words, &mut file).unwrap();
        proptest::prop_assert_eq!(file.metadata().unwrap().len(), extents.bytes());
        // The second pass checks that the diff of a clone of a diff equals that diff.
        for _ in 0..2 {
            let mut clone =
                Memory::private_copy(base.try_clone().unwrap(), memory.bytes(), HOLE).unwrap();
            clone.lay_over(&file, extents.clone()).unwrap();
            let mut expected = all(&memory);
            put_words(&mut expected, 0, &words);
            proptest::prop_assert!(all(&clone) == expected);
            file = tempfile::tempfile().unwrap();
            let again = clone.save_diff(&base, &[], &mut file).unwrap();
            proptest::prop_assert_eq!(&again, &extents);
        }
    }
}

#[test]
fn a_clone_writes_neither_to_the_base_nor_to_the_diff() {
    let (base, memory) = base_and_copy();
    memory.ram.write_obj(1_u64, GuestAddress(3 * PAGE)).unwrap();
    let mut file = tempfile::tempfile().unwrap();
    let extents = memory.save_diff(&base, &[], &mut file).unwrap();
    let clone = || {
        let mut clone =
            Memory::private_copy(base.try_clone().unwrap(), memory.bytes(), HOLE).unwrap();
        clone.lay_over(&file, extents.clone()).unwrap();
        clone
    };
    let (one, other) = (clone(), clone());
    for page in 0..8 {
        one.ram.write_obj(9_u64, GuestAddress(page * PAGE)).unwrap();
    }
    assert!(all(&other) == all(&memory) && all(&clone()) == all(&memory));
    let extents = one.save_diff(&base, &[], &mut io::sink()).unwrap();
    assert_eq!(extents.bytes(), 8 * PAGE);
}

#[test]
fn few_short_runs_of_a_diff_are_copied_and_long_ones_are_mapped() {
    let bytes = 1 << 30;
    let extents = |runs: &[(u64, u64)]| Extents::new(runs.iter().copied(), bytes).unwrap();
    let long = LONGEST_READ + PAGE;
    let both = extents(&[(0, PAGE), (4 * PAGE, LONGEST_READ), (64 * PAGE, long)]);
    assert_eq!(shortest_mapped(&both), long);
    let many: Vec<_> = (0..=MAX_READ / PAGE)
        .map(|i| (i * 2 * PAGE, PAGE))
        .collect();
    assert_eq!(shortest_mapped(&extents(&many[1..])), long);
    assert_eq!(shortest_mapped(&extents(&many)), PAGE);

    let (base, memory) = base_and_copy();
    for page in [5, 6, 100] {
        let n = if page == 100 { long } else { PAGE };
        let n = usize::try_from(n).unwrap();
        memory.write(page * PAGE, &vec![7; n]).unwrap();
    }
    let mut file = tempfile::tempfile().unwrap();
    let extents = memory.save_diff(&base, &[], &mut file).unwrap();
    let mut clone = Memory::private_copy(base, memory.bytes(), HOLE).unwrap();
    clone.lay_over(&file, extents).unwrap();
    assert_eq!(clone.private_ranges().unwrap(), [(5 * PAGE, 2 * PAGE)]);
    assert!(all(&clone) == all(&memory));
}

/// Every other page of 256 MiB has more runs than the limit on mappings.
#[test]
fn a_diff_with_more_runs_than_mappings_is_copied() {
    const PAGES: u64 = 65_536;
    let base = tempfile::tempfile().unwrap();
    base.set_len(PAGES * PAGE).unwrap();
    let runs = (0..PAGES / 2).map(|i| (i * 2 * PAGE, PAGE));
    let extents = Extents::new(runs, PAGES * PAGE).unwrap();
    assert_eq!(shortest_mapped(&extents), 2 * PAGE);
    let file = tempfile::tempfile().unwrap();
    file.set_len(extents.bytes()).unwrap();
    file.write_all_at(&[5; 8], extents.bytes() - PAGE).unwrap();
    let mut memory = Memory::private_copy(base, PAGES * PAGE, None).unwrap();
    memory.lay_over(&file, extents).unwrap();
    let last = memory.ram.read_obj::<u8>(GuestAddress((PAGES - 2) * PAGE));
    assert_eq!(last.unwrap(), 5);
}

#[test]
fn a_diff_leaves_out_private_pages_that_equal_the_base() {
    let (base, memory) = base_and_copy();
    memory.prefault(&[(0, 64 * PAGE)]);
    assert_eq!(memory.private_ranges().unwrap(), [(0, 64 * PAGE)]);
    let extents = memory.save_diff(&base, &[], &mut io::sink()).unwrap();
    assert!(extents.is_empty(), "{extents:?}");
}

#[test]
fn a_diff_file_shorter_than_its_extents_is_an_error() {
    let (_, mut memory) = base_and_copy();
    let extents = Extents::new([(0, 2 * PAGE)], memory.bytes()).unwrap();
    let file = tempfile::tempfile().unwrap();
    file.set_len(PAGE).unwrap();
    assert!(memory.lay_over(&file, extents).is_err());
}

#[test]
fn an_invalid_working_set_is_cut_at_its_first_invalid_pair() {
    let good = [(0, 4096), (8192, 8192)];
    let bad = [(u64::MAX - 4095, 8192), (0, 4096)];
    let mixed = [&good[..], &bad[..]].concat();
    for (own, touched) in [(good.to_vec(), mixed.clone()), (mixed, good.to_vec())] {
        let file = tempfile::tempfile().unwrap();
        write_working_set(&file, &WorkingSet { own, touched }).unwrap();
        let read = read_working_set(Some(&file), 1 << 20);
        assert_eq!(read.own, good);
        assert!(read.touched.is_empty() || read.touched == good);
    }
}

#[test]
fn a_working_set_separates_private_pages_from_blocks_only_read() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(16 << 20).unwrap();
    file.write_all_at(&[1; 8], 9 << 20).unwrap();
    let copy = Memory::private_copy(file, 16 << 20, None).unwrap();
    copy.write(5 << 20, &[1]).unwrap();
    copy.read(9 << 20, &mut [0]).unwrap();
    let set = copy.working_set().unwrap();
    assert_eq!(set.own, [(5 << 20, PAGE)]);
    assert_eq!(set.touched, [(4 << 20, BLOCK), (8 << 20, BLOCK)]);
    let file = tempfile::tempfile().unwrap();
    write_working_set(&file, &set).unwrap();
    assert_eq!(read_working_set(Some(&file), copy.bytes()), set);
}
