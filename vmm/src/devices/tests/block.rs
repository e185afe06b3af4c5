//! Disks: requests, errors, copy-on-write against a model.

use std::io::Read;
use std::os::unix::fs::FileExt;

use proptest::prelude::*;

use crate::devices::testing::{DATA, DriverQueue, Guest, Piece, file_with};
use crate::devices::{LAYER, LayerDiff, ROOT};

const IN: u32 = 0;
const OUT: u32 = 1;
const STATUS: u64 = DATA - 1;
const HEADER: u64 = DATA - 32;

/// Sends one request with its data at `DATA`; the status byte and the written length.
fn request(
    guest: &mut Guest,
    queue: &mut DriverQueue,
    kind: u32,
    sector: u64,
    pieces: &[Piece],
) -> (u8, u32) {
    let mut header = kind.to_le_bytes().to_vec();
    header.extend([0; 4]);
    header.extend(sector.to_le_bytes());
    guest.put(HEADER, &header);
    guest.put(STATUS, &[0xff]);
    let mut chain = vec![Piece::Read(HEADER, 16)];
    chain.extend(pieces);
    chain.push(Piece::Write(STATUS, 1));
    let head = queue.add(&guest.ram, &chain);
    guest.notify(queue);
    let (used, len) = queue.take(&guest.ram).unwrap();
    assert_eq!(used, head);
    (guest.get(STATUS, 1)[0], len)
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from(at % 251).unwrap()).collect()
}

#[test]
fn the_root_is_read_and_never_written() {
    let image = pattern(1 << 20);
    let mut guest = Guest::with_disks(&image, &[0; 4096]);
    let mut queue = guest.init(ROOT, 0).remove(0);
    assert_eq!(guest.read(ROOT, 0x100), (1 << 20) / 512);
    assert_ne!(guest.read(ROOT, 0x10) & 1 << 5, 0, "RO offered");
    let pieces = [Piece::Write(DATA, 100), Piece::Write(DATA + 100, 8092)];
    assert_eq!(request(&mut guest, &mut queue, IN, 3, &pieces), (0, 8193));
    assert_eq!(guest.get(DATA, 8192), image[1536..1536 + 8192]);
    let pieces = [Piece::Read(DATA, 512)];
    assert_eq!(request(&mut guest, &mut queue, OUT, 0, &pieces).0, 1);
}

#[test]
fn requests_beyond_the_end_and_unknown_ones_fail() {
    let mut guest = Guest::with_disks(&[1; 8192], &[0; 8192]);
    let mut queue = guest.init(LAYER, 0).remove(0);
    for sector in [15, 16, u64::MAX, u64::MAX / 512, 1 << 55] {
        let pieces = [Piece::Write(DATA, 1024)];
        assert_eq!(request(&mut guest, &mut queue, IN, sector, &pieces).0, 1);
        let pieces = [Piece::Read(DATA, 1024)];
        assert_eq!(request(&mut guest, &mut queue, OUT, sector, &pieces).0, 1);
    }
    assert_eq!(request(&mut guest, &mut queue, 99, 0, &[]).0, 2);
    assert_eq!(request(&mut guest, &mut queue, 4, 0, &[]).0, 0, "flush");
    let pieces = [Piece::Write(DATA, 20)];
    assert_eq!(request(&mut guest, &mut queue, 8, 0, &pieces).0, 0);
    assert_eq!(guest.get(DATA, 6), b"layer\0");
}

#[test]
fn a_request_without_room_for_its_status_comes_back_empty() {
    let mut guest = Guest::new();
    let mut queue = guest.init(ROOT, 0).remove(0);
    queue.add(&guest.ram, &[Piece::Read(DATA, 16)]);
    queue.add(&guest.ram, &[Piece::Write(DATA, 1)]);
    guest.notify(&queue);
    assert_eq!(queue.take(&guest.ram).unwrap().1, 0);
    assert_eq!(queue.take(&guest.ram).unwrap().1, 1, "no header: failed");
    assert_eq!(guest.get(DATA, 1), [1]);
}

#[test]
fn a_full_scratch_directory_is_an_error_in_the_guest() {
    let mut guest = Guest::with_disks(&[0; 4096], &[7; 8192]);
    let mut queue = guest.init(LAYER, 0).remove(0);
    std::fs::remove_dir_all(guest.dir.path()).unwrap();
    let pieces = [Piece::Read(DATA, 512)];
    assert_eq!(request(&mut guest, &mut queue, OUT, 0, &pieces).0, 1);
    let pieces = [Piece::Write(DATA, 512)];
    assert_eq!(request(&mut guest, &mut queue, IN, 0, &pieces).0, 0);
    assert_eq!(guest.get(DATA, 512), [7; 512]);
}

#[test]
fn a_copy_of_the_layer_keeps_its_holes() {
    let base = tempfile::tempfile().unwrap();
    base.set_len(64 << 20).unwrap();
    base.write_all_at(&[5; 4096], 32 << 20).unwrap();
    let disk = crate::devices::layer::Disk::new(
        base,
        crate::devices::layer::Access::CopyOnWrite,
        std::path::Path::new("/nonexistent"),
    );
    let target = tempfile::tempfile().unwrap();
    let copied = disk.unwrap().copy_to(&target).unwrap();
    assert!((4096..=1 << 20).contains(&copied), "{copied} bytes");
    let mut block = [0; 4096];
    target.read_exact_at(&mut block, 32 << 20).unwrap();
    assert_eq!(block, [5; 4096]);
    assert_eq!(target.metadata().unwrap().len(), 64 << 20);
}

/// The layer as it is written into a file.
fn copied_layer(guest: &Guest) -> Vec<u8> {
    let mut copy = file_with(b"something longer that was there before");
    guest.bus.copy_layer_to(&copy).unwrap();
    let mut bytes = Vec::new();
    std::io::Seek::rewind(&mut copy).unwrap();
    copy.read_to_end(&mut bytes).unwrap();
    bytes
}

/// Sectors of the disk of the model test: not a multiple of a block.
const MODEL_SECTORS: u64 = 8 * 24 + 3;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn random_writes_read_back_as_the_model_says(
        writes in prop::collection::vec((0..MODEL_SECTORS, 1..40_u64, any::<u8>()), 1..40)
    ) {
        let mut model = pattern(usize::try_from(MODEL_SECTORS * 512).unwrap());
        let base = model.clone();
        let mut guest = Guest::with_disks(&[0; 4096], &base);
        let mut queue = guest.init(LAYER, 0).remove(0);
        for (sector, count, fill) in writes {
            let count = count.min(MODEL_SECTORS - sector);
            let len = usize::try_from(count * 512).unwrap();
            let start = usize::try_from(sector * 512).unwrap();
            guest.put(DATA, &vec![fill; len]);
            let cut = u32::try_from(len / 3).unwrap();
            let rest = u32::try_from(len).unwrap() - cut;
            let pieces = [Piece::Read(DATA, cut), Piece::Read(DATA + u64::from(cut), rest)];
            prop_assert_eq!(request(&mut guest, &mut queue, OUT, sector, &pieces), (0, 1));
            model[start..start + len].fill(fill);
        }
        let len = u32::try_from(model.len()).unwrap();
        let pieces = [Piece::Write(DATA, len)];
        prop_assert_eq!(request(&mut guest, &mut queue, IN, 0, &pieces), (0, len + 1));
        prop_assert!(guest.get(DATA, model.len()) == model);

        prop_assert!(copied_layer(&guest) == model);
    }

    /// Each generation is a clone of a diff of the last, and all have the same base.
    #[test]
    fn a_diff_over_its_base_is_the_disk(
        generations in prop::collection::vec(
            prop::collection::vec((0..MODEL_SECTORS, 1..40_u64, any::<u8>()), 0..12), 1..4)
    ) {
        let base = pattern(usize::try_from(MODEL_SECTORS * 512).unwrap());
        let mut model = base.clone();
        let mut diff = None;
        for writes in generations {
            let mut guest = Guest::with_diff(&base, diff);
            let mut queue = guest.init(LAYER, 0).remove(0);
            for (sector, count, fill) in writes {
                let count = count.min(MODEL_SECTORS - sector);
                let len = usize::try_from(count * 512).unwrap();
                let start = usize::try_from(sector * 512).unwrap();
                guest.put(DATA, &vec![fill; len]);
                let pieces = [Piece::Read(DATA, u32::try_from(len).unwrap())];
                prop_assert_eq!(request(&mut guest, &mut queue, OUT, sector, &pieces), (0, 1));
                model[start..start + len].fill(fill);
            }
            let len = u32::try_from(model.len()).unwrap();
            let pieces = [Piece::Write(DATA, len)];
            prop_assert_eq!(request(&mut guest, &mut queue, IN, 0, &pieces), (0, len + 1));
            prop_assert!(guest.get(DATA, model.len()) == model);
            prop_assert!(copied_layer(&guest) == model);
            let mut file = tempfile::tempfile().unwrap();
            let extents = guest.bus.save_layer_diff(&mut file).unwrap();
            prop_assert_eq!(file.metadata().unwrap().len(), extents.bytes());
            diff = Some(LayerDiff { file, extents });
        }
    }
}
