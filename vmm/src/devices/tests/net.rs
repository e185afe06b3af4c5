//! The network device without a TAP here; with a real one in the `net_…` tests.

use crate::devices::NET;
use crate::devices::testing::{DATA, Guest, Piece};

#[test]
fn without_a_tap_frames_are_dropped_and_given_back() {
    let mut guest = Guest::new();
    let mut queues = guest.init(NET, 0);
    queues[0].add(&guest.ram, &[Piece::Write(DATA, 2048)]);
    guest.notify(&queues[0]);
    assert_eq!(queues[0].take(&guest.ram), None);
    queues[1].add(
        &guest.ram,
        &[Piece::Read(DATA, 12), Piece::Read(DATA + 12, 60)],
    );
    guest.notify(&queues[1]);
    assert_eq!(queues[1].take(&guest.ram), Some((0, 0)));
}
