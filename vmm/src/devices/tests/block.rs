//! Disks: requests, errors, copy-on-write against a model.

use std::io::Read;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use proptest::prelude::*;

use crate::devices::LayerDiff;
use crate::devices::testing::{DATA, DriverQueue, Guest, LAYER, Piece, ROOT, file_with};

const IN: u32 = 0;
const OUT: u32 = 1;
const DISCARD: u32 = 11;
const STATUS: u64 = DATA - 1;
const HEADER: u64 = DATA - 32;

/// Sends one request with its data at `DATA`. Returns the status byte and the written length.
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

/// Sends a discard of sectors with these flags. Returns the status byte.
fn discard(guest: &mut Guest, queue: &mut DriverQueue, at: u64, count: u32, flags: u32) -> u8 {
    let mut range = at.to_le_bytes().to_vec();
    range.extend(count.to_le_bytes());
    range.extend(flags.to_le_bytes());
    guest.put(DATA, &range);
    request(guest, queue, DISCARD, 0, &[Piece::Read(DATA, 16)]).0
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from(at % 251).unwrap()).collect()
}

#[test]
fn the_root_disk_is_read_only() {
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
    // A failed request ends the turn. The rest is served without another notification.
    assert_eq!(queue.take(&guest.ram), None);
    assert_eq!(guest.poll(Duration::from_secs(20)), 1);
    assert_eq!(queue.take(&guest.ram).unwrap().1, 1, "no header: failed");
    assert_eq!(guest.get(DATA, 1), [1]);
}

#[test]
fn a_full_disk_is_an_error_in_the_guest() {
    let full = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/full");
    let mut guest = Guest::with_scratch(&[7; 8192], full.unwrap());
    let mut queue = guest.init(LAYER, 0).remove(0);
    let pieces = [Piece::Read(DATA, 512)];
    assert_eq!(request(&mut guest, &mut queue, OUT, 0, &pieces).0, 1);
    let pieces = [Piece::Write(DATA, 512)];
    assert_eq!(request(&mut guest, &mut queue, IN, 0, &pieces).0, 0);
    assert_eq!(guest.get(DATA, 512), [7; 512]);
}

#[test]
fn a_discard_frees_space_and_keeps_adjacent_data() {
    let base = pattern(1 << 20);
    let mut guest = Guest::with_disks(&[0; 4096], &base);
    let mut queue = guest.init(LAYER, 0).remove(0);
    guest.put(DATA, &vec![7; 1 << 20]);
    let all = [Piece::Read(DATA, 1 << 20)];
    assert_eq!(request(&mut guest, &mut queue, OUT, 0, &all).0, 0);
    let written = guest.bus.layer.disk().private_bytes();
    assert!(written >= 1 << 20, "{written}");

    // From the middle of block 1 to the middle of block 255: only the blocks between them are freed.
    assert_eq!(discard(&mut guest, &mut queue, 12, 2032, 0), 0);
    let left = guest.bus.layer.disk().private_bytes();
    assert!(left <= 64 << 10, "{left} of {written} bytes are left");
    let all = [Piece::Write(DATA, 1 << 20)];
    assert_eq!(request(&mut guest, &mut queue, IN, 0, &all).0, 0);
    let mut expected = vec![7; 1 << 20];
    expected[8192..255 * 4096].copy_from_slice(&base[8192..255 * 4096]);
    assert!(guest.get(DATA, 1 << 20) == expected);
    let mut saved = tempfile::tempfile().unwrap();
    let extents = guest.bus.save_layer_diff(&mut saved).unwrap();
    assert_eq!(
        extents.bytes(),
        3 * 4096,
        "a snapshot keeps no discarded block"
    );
}

#[test]
fn discards_are_offered_for_the_layer_and_checked() {
    let mut guest = Guest::with_disks(&[1; 8192], &[0; 8192]);
    let mut queue = guest.init(LAYER, 0).remove(0);
    assert_ne!(guest.read(LAYER, 0x10) & 1 << 13, 0, "DISCARD offered");
    let limits = [36, 40, 44].map(|at| guest.read(LAYER, 0x100 + at));
    assert_eq!(limits, [131_072, 1, 8]);
    for (at, count) in [
        (15, 2),
        (16, 1),
        (u64::MAX, 1),
        (u64::MAX / 512, 8),
        (0, 131_073),
    ] {
        assert_eq!(discard(&mut guest, &mut queue, at, count, 0), 1);
    }
    assert_eq!(discard(&mut guest, &mut queue, 0, 16, 1), 2, "UNMAP");
    assert_eq!(discard(&mut guest, &mut queue, 0, 16, 0), 0);
    for len in [0, 15, 32] {
        let pieces = [Piece::Read(DATA, len)];
        assert_eq!(request(&mut guest, &mut queue, DISCARD, 0, &pieces).0, 1);
    }
    let mut queue = guest.init(ROOT, 0).remove(0);
    assert_eq!(guest.read(ROOT, 0x10) & 1 << 13, 0, "not of the root");
    assert_eq!(discard(&mut guest, &mut queue, 0, 8, 0), 1);
}

#[test]
fn a_layer_takes_no_more_than_its_limit() {
    let mut guest = Guest::with_limit(&pattern(64 << 10), 16 << 10);
    let mut queue = guest.init(LAYER, 0).remove(0);
    guest.put(DATA, &[7; 16 << 10]);
    let four = [Piece::Read(DATA, 16 << 10)];
    let one = [Piece::Read(DATA, 512)];
    assert_eq!(request(&mut guest, &mut queue, OUT, 0, &four).0, 0);
    assert_eq!(request(&mut guest, &mut queue, OUT, 32, &one).0, 1);
    // Blocks in the private file can be overwritten, and freed blocks can be written again.
    assert_eq!(request(&mut guest, &mut queue, OUT, 1, &one).0, 0);
    assert_eq!(discard(&mut guest, &mut queue, 0, 8, 0), 0);
    assert_eq!(request(&mut guest, &mut queue, OUT, 32, &one).0, 0);
    assert_eq!(request(&mut guest, &mut queue, OUT, 64, &one).0, 1);
    let pieces = [Piece::Write(DATA, 512)];
    assert_eq!(request(&mut guest, &mut queue, IN, 64, &pieces).0, 0);
    assert_eq!(guest.get(DATA, 512), pattern(64 << 10)[64 * 512..65 * 512]);
}

#[test]
fn a_copy_of_the_layer_keeps_its_holes() {
    let base = tempfile::tempfile().unwrap();
    base.set_len(64 << 20).unwrap();
    base.write_all_at(&[5; 4096], 32 << 20).unwrap();
    let disk = crate::devices::layer::Disk::new(base, tempfile::tempfile().ok());
    let target = tempfile::tempfile().unwrap();
    let copied = disk.unwrap().copy_to(&target).unwrap();
    assert!((4096..=1 << 20).contains(&copied), "{copied} bytes");
    let mut block = [0; 4096];
    target.read_exact_at(&mut block, 32 << 20).unwrap();
    assert_eq!(block, [5; 4096]);
    assert_eq!(target.metadata().unwrap().len(), 64 << 20);
}

/// The content of the layer, read from a file that `copy_layer_to` wrote.
fn copied_layer(guest: &Guest) -> Vec<u8> {
    let mut copy = file_with(b"something longer that was there before");
    guest.bus.copy_layer_to(&copy).unwrap();
    let mut bytes = Vec::new();
    std::io::Seek::rewind(&mut copy).unwrap();
    copy.read_to_end(&mut bytes).unwrap();
    bytes
}

/// Size of the disk in the model test. It is not a multiple of the block size.
const MODEL_SECTORS: u64 = 8 * 24 + 3;

/// Sector, number of sectors, and the byte to fill them with; `None`: they are discarded.
fn any_change() -> impl Strategy<Value = (u64, u64, Option<u8>)> {
    (
        0..MODEL_SECTORS,
        1..40_u64,
        prop::option::weighted(0.7, any::<u8>()),
    )
}

/// The blocks that lie wholly in a range of bytes. The last block of the disk is shorter than the others.
fn whole_blocks(start: usize, len: usize) -> std::ops::Range<usize> {
    let disk = usize::try_from(MODEL_SECTORS * 512).unwrap();
    let first = start.next_multiple_of(4096);
    let end = if start + len == disk {
        disk
    } else {
        (start + len) / 4096 * 4096
    };
    first.min(end)..end
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn random_writes_read_back_like_the_model(
        writes in prop::collection::vec(any_change(), 1..40)
    ) {
        let mut model = pattern(usize::try_from(MODEL_SECTORS * 512).unwrap());
        let base = model.clone();
        let mut guest = Guest::with_disks(&[0; 4096], &base);
        let mut queue = guest.init(LAYER, 0).remove(0);
        for (sector, count, fill) in writes {
            let count = count.min(MODEL_SECTORS - sector);
            let len = usize::try_from(count * 512).unwrap();
            let start = usize::try_from(sector * 512).unwrap();
            let Some(fill) = fill else {
                let count = u32::try_from(count).unwrap();
                prop_assert_eq!(discard(&mut guest, &mut queue, sector, count, 0), 0);
                let gone = whole_blocks(start, len);
                model[gone.clone()].copy_from_slice(&base[gone]);
                continue;
            };
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

    /// Each generation is a clone of a diff of the previous one. All have the same base.
    #[test]
    fn a_diff_over_its_base_restores_the_disk(
        generations in prop::collection::vec(
            prop::collection::vec(any_change(), 0..12), 1..4)
    ) {
        let base = pattern(usize::try_from(MODEL_SECTORS * 512).unwrap());
        let mut model = base.clone();
        let mut diff = None;
        for writes in generations {
            let below = model.clone();
            let mut guest = Guest::with_diff(&base, diff);
            let mut queue = guest.init(LAYER, 0).remove(0);
            for (sector, count, fill) in writes {
                let count = count.min(MODEL_SECTORS - sector);
                let len = usize::try_from(count * 512).unwrap();
                let start = usize::try_from(sector * 512).unwrap();
                let Some(fill) = fill else {
                    let count = u32::try_from(count).unwrap();
                    prop_assert_eq!(discard(&mut guest, &mut queue, sector, count, 0), 0);
                    let gone = whole_blocks(start, len);
                    model[gone.clone()].copy_from_slice(&below[gone]);
                    continue;
                };
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
