//! The devices from a driver's point of view: initialization, requests, invalid queues, snapshots.

mod block;
mod hostile;
mod net;
mod restore;
mod turns;

use super::testing::{DATA, Guest, LAYER, NET, Piece, RNG, ROOT, VSOCK};

#[test]
fn every_device_can_be_initialized_and_shows_its_identity() {
    let mut guest = Guest::new();
    let ids = [
        (ROOT, 2, 1),
        (LAYER, 2, 1),
        (NET, 1, 2),
        (VSOCK, 19, 3),
        (RNG, 4, 1),
    ];
    for (slot, id, queues) in ids {
        assert_eq!(guest.read(slot, 8), id);
        assert_eq!(guest.init(slot, 0).len(), queues, "slot {slot}");
        assert_eq!(guest.read(slot, 0x60), 1, "InterruptStatus");
        assert_eq!(guest.read(slot, 0xfc), 0, "ConfigGeneration");
        assert_eq!(guest.read(slot, 0xb0), u32::MAX, "SHMLenLow");
    }
    assert_eq!(guest.read(5, 0), 0, "an unused slot has no magic");
    assert_eq!(guest.read(VSOCK, 0x100), 3, "guest CID");
    assert_eq!(guest.read(NET, 0x100), u32::from_le_bytes([2, 0xcb, 0, 0]));
}

#[test]
fn features_that_are_not_offered_are_refused() {
    let mut guest = Guest::new();
    guest.write(RNG, 0x70, 3);
    guest.write(RNG, 0x24, 0);
    guest.write(RNG, 0x20, 1 << 5);
    guest.write(RNG, 0x24, 1);
    guest.write(RNG, 0x20, 1);
    guest.write(RNG, 0x70, 0xb);
    assert_eq!(guest.status(RNG), 3);
    guest.write(RNG, 0x70, 0xf);
    assert_eq!(guest.status(RNG), 3, "no DRIVER_OK without features");
}

#[test]
fn a_reset_clears_the_drivers_state() {
    let mut guest = Guest::new();
    for _ in 0..3 {
        let mut queues = guest.init(RNG, 0);
        queues[0].add(&guest.ram, &[Piece::Write(DATA, 64)]);
        guest.notify(&queues[0]);
        assert_eq!(queues[0].take(&guest.ram), Some((0, 64)));
        guest.write(RNG, 0x70, 0);
        assert_eq!(guest.status(RNG), 0);
        let rings = vec![0; 0x8000];
        guest.put(queues[0].desc(), &rings);
    }
}

#[test]
fn entropy_fills_requests_with_different_bytes() {
    let mut guest = Guest::new();
    let mut queues = guest.init(RNG, 0);
    let queue = &mut queues[0];
    queue.add(&guest.ram, &[Piece::Write(DATA, 64)]);
    queue.add(
        &guest.ram,
        &[
            Piece::Write(DATA + 64, 64),
            Piece::Write(DATA + 128, 1 << 20),
        ],
    );
    guest.notify(queue);
    assert!(guest.raised.contains(RNG));
    assert_eq!(queue.take(&guest.ram).unwrap().1, 64);
    assert_eq!(
        queue.take(&guest.ram).unwrap().1,
        4096,
        "a request is bounded"
    );
    assert_ne!(guest.get(DATA, 64), guest.get(DATA + 64, 64));
}

#[test]
fn an_interrupt_is_raised_only_when_the_driver_asks_for_it() {
    let mut guest = Guest::new();
    let mut queues = guest.init(RNG, 0);
    let queue = &mut queues[0];
    // The driver wants an interrupt after the third entry.
    guest.put(
        queue.avail() + 4 + u64::from(queue.size) * 2,
        &2_u16.to_le_bytes(),
    );
    for expected in [false, false, true] {
        guest.raised = super::Interrupts::NONE;
        queue.add(&guest.ram, &[Piece::Write(DATA, 8)]);
        guest.notify(queue);
        assert_eq!(guest.raised.contains(RNG), expected);
    }
}

#[test]
fn without_event_indices_the_flag_of_the_ring_suppresses_interrupts() {
    let mut guest = Guest::new();
    let mut queues = guest.init(RNG, 1 << 29);
    let queue = &mut queues[0];
    for (flag, expected) in [(1_u16, false), (0, true)] {
        guest.raised = super::Interrupts::NONE;
        guest.put(queue.avail(), &flag.to_le_bytes());
        queue.add(&guest.ram, &[Piece::Write(DATA, 8)]);
        guest.notify(queue);
        assert_eq!(guest.raised.contains(RNG), expected);
    }
}

#[test]
fn changes_of_the_register_page_are_reported() {
    let mut guest = Guest::new();
    assert!(guest.bus.take_page_changed());
    let mut queues = guest.init(RNG, 0);
    assert!(guest.bus.take_page_changed());
    queues[0].add(&guest.ram, &[Piece::Write(DATA, 8)]);
    guest.notify(&queues[0]);
    assert!(
        !guest.bus.take_page_changed(),
        "a notification changes nothing"
    );
}
