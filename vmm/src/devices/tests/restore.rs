//! Snapshots of the devices: valid state is restored, invalid state is refused.

use crate::devices::testing::{DATA, Guest, Piece, RNG, ROOT};
use crate::devices::{BusState, DeviceError, DeviceStateError, SLOTS};

fn running() -> (Guest, BusState) {
    let mut guest = Guest::new();
    (0..SLOTS).for_each(|slot| {
        guest.init(slot, 0);
    });
    let state = guest.bus.state();
    (guest, state)
}

#[test]
fn a_restored_device_continues_with_pending_requests() {
    let mut guest = Guest::new();
    let mut queue = guest.init(RNG, 0).remove(0);
    queue.add(&guest.ram, &[Piece::Write(DATA, 8)]);
    guest.notify(&queue);
    queue.take(&guest.ram).unwrap();
    // At the time of the snapshot this chain is in the ring, and its notification is lost.
    queue.add(&guest.ram, &[Piece::Write(DATA, 16)]);
    let state = guest.bus.state();
    let page = *guest.bus.registers();

    let mut guest = guest.restore(&state).unwrap();
    assert!(*guest.bus.registers() == page);
    assert!(guest.raised.contains(RNG));
    assert_eq!(queue.take(&guest.ram).unwrap().1, 16);
    queue.add(&guest.ram, &[Piece::Write(DATA, 24)]);
    guest.notify(&queue);
    assert_eq!(queue.take(&guest.ram).unwrap().1, 24);
    assert_eq!(guest.bus.state().slots.len(), SLOTS);
}

#[test]
fn state_survives_its_codec_and_stays_small() {
    let (guest, state) = running();
    let bytes = postcard::to_stdvec(&state).unwrap();
    assert!(bytes.len() < 1000, "{} bytes", bytes.len());
    let decoded: BusState = postcard::from_bytes(&bytes).unwrap();
    assert_eq!(decoded, state);
    let guest = guest.restore(&decoded).unwrap();
    assert_eq!(guest.bus.state(), state);
}

fn refusal(change: impl FnOnce(&mut BusState)) -> DeviceStateError {
    let (guest, mut state) = running();
    change(&mut state);
    match guest.restore(&state) {
        Err(DeviceError::State(error)) => error,
        Err(other) => panic!("refused for {other}"),
        Ok(_) => panic!("accepted"),
    }
}

#[test]
fn impossible_queues_are_refused() {
    let changes: [fn(&mut crate::devices::state::QueueState); 9] = [
        |queue| queue.size = 0,
        |queue| queue.size = 3,
        |queue| queue.size = 256,
        |queue| queue.desc_table = u64::MAX - 15,
        |queue| queue.desc_table += 1,
        |queue| queue.avail_ring = 16 << 20,
        |queue| queue.avail_ring += 1,
        |queue| queue.used_ring = (16 << 20) - 8,
        |queue| queue.used_ring += 2,
    ];
    for change in changes {
        let error = refusal(|state| change(&mut state.slots[ROOT].queues[0]));
        assert!(matches!(error, DeviceStateError::Queue { .. }), "{error}");
    }
}

#[test]
fn other_impossible_state_is_refused() {
    let error = refusal(|state| state.slots.truncate(3));
    assert!(matches!(
        error,
        DeviceStateError::SlotCount { found: 3, .. }
    ));
    let error = refusal(|state| state.slots[ROOT].queues.clear());
    assert!(matches!(
        error,
        DeviceStateError::QueueCount { found: 0, .. }
    ));
    let error = refusal(|state| state.slots[ROOT].features |= 1 << 60);
    assert!(matches!(error, DeviceStateError::Features { slot: 0, .. }));
    let error = refusal(|state| state.slots[RNG].status = 0x1f);
    assert!(matches!(error, DeviceStateError::Status { slot: 4, .. }));
    let error = refusal(|state| state.slots[RNG].status = 4);
    assert!(matches!(error, DeviceStateError::Status { .. }));
    let error = refusal(|state| state.vsock.open = vec![(1, 1); 5000]);
    assert!(matches!(
        error,
        DeviceStateError::StreamCount { found: 5000, .. }
    ));
}

#[test]
fn a_disk_of_another_size_is_refused() {
    let (guest, state) = running();
    let mut watch = crate::watch::tests::test_watch();
    let dir = tempfile::tempdir().unwrap();
    let spec = crate::devices::testing::spec(&dir, &[0; 4096], &[0; 8192], None);
    let error = crate::devices::DeviceBus::restore(spec, &state, &guest.ram, &mut watch);
    let error = error.map(|_| ()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "root disk has 8 sectors, but the snapshot was made with 16"
    );
}
