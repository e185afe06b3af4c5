//! Drivers that break every rule: the devices must not panic, hang or use unbounded memory.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use crate::devices::SLOTS;
use crate::devices::testing::{DATA, Guest, LAYER, Piece, RAM_BYTES, RNG, ROOT, VSOCK};

const NEEDS_RESET: u32 = 0x40;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Offers one chain with the given descriptors, starting at descriptor 0. Returns the written length that the device
/// reports when it returns the chain.
fn offer(slot: usize, descriptors: &[(u64, u32, u16, u16)]) -> Option<u32> {
    let mut guest = Guest::new();
    let mut queue = guest.init(slot, 0).remove(0);
    for (id, (addr, len, flags, next)) in (0..).zip(descriptors) {
        queue.put_desc(&guest.ram, id, *addr, *len, *flags, *next);
    }
    queue.offer(&guest.ram, 0);
    guest.notify(&queue);
    queue.take(&guest.ram).map(|(_, len)| len)
}

#[test]
fn invalid_chains_come_back_empty() {
    let end = u64::try_from(RAM_BYTES).unwrap();
    let looped = [(DATA, 16, WRITE | NEXT, 0)];
    assert_eq!(offer(RNG, &looped), Some(0));
    let outside = [(end - 8, 16, WRITE, 0)];
    assert_eq!(offer(RNG, &outside), Some(0));
    let wrapping = [(u64::MAX - 7, 16, WRITE, 0)];
    assert_eq!(offer(RNG, &wrapping), Some(0));
    let next_outside = [(DATA, 16, WRITE | NEXT, 9999)];
    assert_eq!(offer(RNG, &next_outside), Some(0));
    let read_after_write = [(DATA, 16, WRITE | NEXT, 1), (DATA, 16, 0, 0)];
    assert_eq!(offer(RNG, &read_after_write), Some(0));
    let huge = [
        (DATA, u32::MAX, WRITE | NEXT, 1),
        (DATA, u32::MAX, WRITE, 0),
    ];
    assert_eq!(offer(RNG, &huge), Some(0));
    let nested = [(DATA, 16, INDIRECT, 0)];
    assert_eq!(offer(RNG, &nested), Some(0));
    let empty = [(DATA, 0, WRITE, 0)];
    assert_eq!(offer(RNG, &empty), Some(0));
}

#[test]
fn an_invalid_ring_disables_the_device_until_its_reset() {
    let mut guest = Guest::new();
    let mut queue = guest.init(RNG, 0).remove(0);
    let index = queue.avail() + 2;
    guest.put(index, &1000_u16.to_le_bytes());
    guest.notify(&queue);
    assert_eq!(guest.status(RNG), 0xf | NEEDS_RESET);
    assert!(guest.bus.take_page_changed());
    guest.put(index, &0_u16.to_le_bytes());
    queue.add(&guest.ram, &[Piece::Write(DATA, 8)]);
    guest.notify(&queue);
    assert_eq!(queue.take(&guest.ram), None, "it stays off");

    guest.put(queue.desc(), &vec![0; 0x8000]);
    let mut queue = guest.init(RNG, 0).remove(0);
    queue.add(&guest.ram, &[Piece::Write(DATA, 8)]);
    guest.notify(&queue);
    assert_eq!(queue.take(&guest.ram), Some((0, 8)));
}

#[test]
fn a_head_outside_the_table_disables_the_device() {
    let mut guest = Guest::new();
    let mut queue = guest.init(ROOT, 0).remove(0);
    queue.offer(&guest.ram, 4000);
    guest.notify(&queue);
    assert_ne!(guest.status(ROOT) & NEEDS_RESET, 0);
}

#[test]
fn a_guest_that_reads_nothing_cannot_grow_the_vmm() {
    let mut guest = Guest::new();
    let mut queues = guest.init(VSOCK, 0);
    let start = Instant::now();
    // Requests to ports without a listener. Each requires a reset in response, but there is never a buffer for one.
    for port in 0..20_000_u32 {
        let mut header = vec![0; 44];
        header[0] = 3;
        header[8] = 2;
        header[16..20].copy_from_slice(&port.to_le_bytes());
        header[28] = 1;
        header[30] = 1;
        guest.put(DATA, &header);
        queues[1].add(&guest.ram, &[Piece::Read(DATA, 44)]);
        guest.notify(&queues[1]);
        queues[1].take(&guest.ram).unwrap();
    }
    assert!(guest.bus.state().vsock.open.len() <= 1024);
    assert!(start.elapsed() < Duration::from_secs(20));
}

/// A register write, mostly to existing registers.
fn any_write() -> impl Strategy<Value = (u64, u32)> {
    let known = prop::sample::select(vec![
        0x14_u64, 0x20, 0x24, 0x30, 0x38, 0x44, 0x50, 0x64, 0x70, 0x80, 0x84, 0x90, 0x94, 0xa0,
        0xa4, 0x100,
    ]);
    let slot = 0..u64::try_from(SLOTS).unwrap() + 1;
    let offset = (slot, known).prop_map(|(slot, register)| slot * 0x200 + register);
    let offset = prop_oneof![9 => offset, 1 => 0..0x2000_u64];
    let value = prop_oneof![
        4 => 0..16_u32,
        2 => prop::sample::select(vec![0x1000_u32, 0x2000, 0x10000, 128, 256, 0x40, 0x80]),
        1 => any::<u32>(),
    ];
    (offset, value)
}

/// Words that resemble rings and descriptors more often than random bytes.
fn any_memory() -> impl Strategy<Value = Vec<u64>> {
    let word = prop_oneof![
        3 => (0..4_u64, 0..256_u64).prop_map(|(high, low)| high << 32 | low << 12),
        2 => (0..8_u64, 0..8_u64, 0..0x3000_u64).prop_map(|(next, flags, len)| {
            next << 48 | flags << 32 | len
        }),
        1 => any::<u64>(),
    ];
    prop::collection::vec(word, 0..2048)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn random_register_writes_do_no_harm(
        writes in prop::collection::vec((any_write(), 1..6_usize), 1..200)
    ) {
        let mut guest = Guest::new();
        for ((offset, value), len) in writes {
            let bytes = value.to_le_bytes();
            let data = if len < 4 { &bytes[..len] } else { &bytes[..] };
            let _ = guest.bus.write(offset, data, &guest.ram, &mut guest.watch);
        }
        let state = guest.bus.state();
        prop_assert!(guest.restore(&state).is_ok(), "what can be reached can be restored");
    }

    #[test]
    fn random_rings_do_no_harm(
        slot in 0..SLOTS,
        memory in any_memory(),
        seed in any::<u16>(),
        kicks in 1..6_usize,
    ) {
        let mut guest = Guest::new();
        let queues = guest.init(slot, 0);
        let bytes: Vec<u8> = memory.iter().flat_map(|word| word.to_le_bytes()).collect();
        for queue in &queues {
            guest.put(queue.desc(), &bytes);
        }
        for _ in 0..kicks {
            for queue in &queues {
                let index = seed % (queue.size + 2);
                guest.put(queue.avail() + 2, &index.to_le_bytes());
                guest.notify(queue);
            }
        }
        guest.poll(Duration::ZERO);
    }

    #[test]
    fn random_block_headers_do_no_harm(
        kind in 0..16_u32,
        sector in prop_oneof![0..32_u64, any::<u64>()],
        lens in prop::collection::vec((0..9000_u32, any::<bool>()), 0..8),
    ) {
        let mut guest = Guest::new();
        let mut queue = guest.init(LAYER, 0).remove(0);
        let mut header = kind.to_le_bytes().to_vec();
        header.extend([0; 4]);
        header.extend(sector.to_le_bytes());
        guest.put(DATA, &header);
        let (reads, writes): (Vec<_>, Vec<_>) = lens.iter().partition(|(_, write)| !write);
        let mut pieces = vec![Piece::Read(DATA, 16)];
        pieces.extend(reads.iter().map(|(len, _)| Piece::Read(DATA, *len)));
        pieces.extend(writes.iter().map(|(len, _)| Piece::Write(DATA + 65_536, *len)));
        queue.add(&guest.ram, &pieces);
        guest.notify(&queue);
        prop_assert!(queue.take(&guest.ram).is_some());
        prop_assert_eq!(guest.status(LAYER), 0xf);
    }
}
