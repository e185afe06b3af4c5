//! Rings that are refilled while they are served. A notification is served in turns of bounded work; between two turns
//! the machine's thread does other work.

use std::time::Duration;

use crate::devices::testing::{DATA, Guest, LAYER, Piece};

const HEADER: u64 = DATA;
const STATUS: u64 = DATA + 16;
const REST: u64 = DATA + 32;
/// Number of requests in the self-refilling ring.
const REQUESTS: u16 = 20_000;

/// A layer on which sector n contains the number of the next sector to read and the new index of the ring, so that each
/// completed request creates the next one.
fn feeding_layer() -> Vec<u8> {
    let mut layer = Vec::new();
    for sector in 0..REQUESTS {
        layer.extend((u64::from(sector) + 1).to_le_bytes());
        layer.extend((sector + 2).min(REQUESTS).to_le_bytes());
        layer.resize((usize::from(sector) + 1) * 512, 0);
    }
    layer
}

#[test]
fn requests_that_refill_their_ring_are_served_in_turns() {
    let mut guest = Guest::with_disks(&[0; 4096], &feeding_layer());
    let mut queue = guest.init(LAYER, 0).remove(0);
    guest.put(HEADER, &[0; 16]);
    let chain = [
        Piece::Read(HEADER, 16),
        Piece::Write(HEADER + 8, 8),
        Piece::Write(queue.avail() + 2, 2),
        Piece::Write(REST, 502),
        Piece::Write(STATUS, 1),
    ];
    assert_eq!(
        queue.add(&guest.ram, &chain),
        0,
        "as every entry of the ring"
    );
    guest.notify(&queue);
    let served = queue.given_back(&guest.ram);
    assert!(
        (1..=2 * queue.size).contains(&served),
        "one notification had {served} requests served"
    );
    let mut turns = 0;
    guest.until(|guest| {
        turns += 1;
        queue.given_back(&guest.ram) == REQUESTS
    });
    assert!(turns > REQUESTS / (2 * queue.size), "{turns} turns");
    assert_eq!(guest.poll(Duration::ZERO), 0, "nothing is left to do");
}
