//! Offload requests of a compromised VMM, which writes frames to the TAP with any header. The host stores a checksum
//! where the header says, after the program has evaluated the frame.

use std::net::IpAddr;

use nix::libc;

use super::{
    frame::{ACK, Packet, SYN, TCP, UDP, checksum, fix_header4, pseudo, sum_at, tcp, udp},
    sys::{set_big_endian, set_header_len, set_offloads},
    world::{Guest, PEER4, PEER6, World, in_namespace, ip, read, try_write},
};
use crate::{Policy, Reason};

/// `linux/virtio_net.h`
const NEEDS_CSUM: u8 = 1;
const GSO_TCP4: u8 = 1;
const GSO_TCP6: u8 = 4;
/// TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 (`linux/if_tun.h`): the reader of the TAP completes packets, as a network card
/// does.
const CARD: u32 = 1 | 2 | 4;
/// All offload flags of `linux/if_tun.h`, and bits for future flags.
const EVERYTHING: u32 = 0xffff;

/// Byte order of the numbers in a header.
type Order = fn(u16) -> [u8; 2];

/// `struct virtio_net_hdr`.
#[derive(Clone, Copy, Debug, Default)]
struct Header {
    flags: u8,
    gso_type: u8,
    hdr_len: u16,
    gso_size: u16,
    csum_start: u16,
    csum_offset: u16,
}

impl Header {
    fn sum_at(csum_start: u16, csum_offset: u16) -> Self {
        Self {
            flags: NEEDS_CSUM,
            csum_start,
            csum_offset,
            ..Self::default()
        }
    }

    fn bytes(self, order: Order) -> Vec<u8> {
        let words = [
            self.hdr_len,
            self.gso_size,
            self.csum_start,
            self.csum_offset,
        ];
        [vec![self.flags, self.gso_type], words.map(order).concat()].concat()
    }
}

fn network_len(peer: IpAddr) -> u16 {
    if peer.is_ipv4() { 20 } else { 40 }
}

/// A frame whose checksum is left to the device: the field contains the sum of the pseudo header.
fn with_partial_checksum(packet: &Packet) -> (Vec<u8>, Header) {
    let mut frame = packet.bytes();
    let start = 14 + network_len(packet.destination);
    let offset = sum_at(packet.protocol);
    let at = usize::from(start) + offset;
    let partial = !checksum(&[&pseudo(packet, packet.body.len())]);
    frame[at..at + 2].copy_from_slice(&partial.to_be_bytes());
    if packet.destination.is_ipv4() {
        fix_header4(&mut frame);
    }
    let offset = u16::try_from(offset).unwrap();
    (frame, Header::sum_at(start, offset))
}

fn packets(payload: &[u8]) -> Vec<Packet> {
    let both = |peer| {
        let datagram = Packet::from_guest(peer, UDP, udp(4000, 7, payload));
        let flags = if payload.len() > 1000 { ACK } else { SYN };
        let segment = Packet::from_guest(peer, TCP, tcp(4000, 7, flags, payload));
        [datagram, segment]
    };
    [PEER4, PEER6].map(|peer| both(ip(peer))).concat()
}

/// Runs a test with an uplink that completes packets itself, and with an uplink whose packets the kernel completes.
fn with_both_uplinks(test: fn(&World, &Guest, bool)) {
    in_namespace(move || {
        let world = World::new();
        let guest = world.guest(&Policy::internet());
        for is_card in [false, true] {
            set_offloads(&world.wan.fd, if is_card { CARD } else { 0 });
            test(&world, &guest, is_card);
        }
    });
}

fn send(guest: &Guest, header: Header, frame: &[u8]) -> bool {
    try_write(&guest.fd, &header.bytes(u16::to_le_bytes), frame)
}

#[test]
fn net_an_offloaded_checksum_outside_its_own_field_is_refused() {
    with_both_uplinks(|world, guest, _| {
        for packet in packets(&[0x5a; 16]) {
            let (frame, own) = with_partial_checksum(&packet);
            let before = world.counters(guest);
            let mut sent = 0;
            let len = u16::try_from(frame.len()).unwrap();
            for start in 0..len + 2 {
                for offset in 0..len + 2 {
                    if (start, offset) != (own.csum_start, own.csum_offset) {
                        sent += u64::from(send(guest, Header::sum_at(start, offset), &frame));
                    }
                }
            }
            assert!(sent > 500, "{sent}");
            let after = world.counters(guest);
            assert_eq!(after.packets_out, before.packets_out, "{packet:?}");
            let refused = |c: &crate::Counters| c.refused.get(&Reason::Offload).copied();
            let expected = refused(&before).unwrap_or(0) + sent;
            assert_eq!(refused(&after), Some(expected), "{packet:?}");
            world.nothing_on_wire();
        }
    });
}

#[test]
fn net_an_offloaded_checksum_in_its_own_field_is_correct_on_the_wire() {
    with_both_uplinks(|world, guest, is_card| {
        for packet in packets(b"payload") {
            let (frame, own) = with_partial_checksum(&packet);
            assert!(send(guest, own, &frame));
            let (header, frame) = loop {
                let next = read(&world.wan.fd).expect("a packet");
                let destination = Packet::read_headers(&next.1).map(|p| p.destination);
                if destination == Some(packet.destination) {
                    break next;
                }
            };
            assert_eq!(header[0] & NEEDS_CSUM != 0, is_card);
            if is_card {
                assert_eq!(header[6..], own.bytes(u16::to_le_bytes)[6..])
            } else {
                // `read` checks the checksum.
                drop(Packet::read(&frame).unwrap())
            }
        }
    });
}

#[test]
fn net_segmentation_is_offloaded_only_for_the_packets_own_protocol_and_size() {
    with_both_uplinks(|world, guest, is_card| {
        for packet in packets(&[0x5a; 3000]) {
            let (frame, own) = with_partial_checksum(&packet);
            let kind = match (packet.protocol, packet.destination.is_ipv4()) {
                (TCP, true) => Some(GSO_TCP4),
                (TCP, false) => Some(GSO_TCP6),
                _ => None,
            };
            // Segments must belong to an open connection.
            if kind.is_some() {
                let syn = Packet {
                    body: tcp(4000, 7, SYN, b""),
                    ..packet.clone()
                };
                world.pass(guest, &syn);
            }
            for gso_type in 0..=u8::MAX {
                for gso_size in [0, 1, 8, 47, 48, 1400, 1461, 2999, u16::MAX] {
                    for hdr_len in [0, own.csum_start, own.csum_start + 20, u16::MAX] {
                        for flags in [0, NEEDS_CSUM, 2, 4, 8, u8::MAX] {
                            let header = Header {
                                flags,
                                gso_type,
                                hdr_len,
                                gso_size,
                                ..own
                            };
                            let is_valid = kind == Some(gso_type)
                                && flags & NEEDS_CSUM != 0
                                && (48..=1400).contains(&gso_size);
                            if !is_valid {
                                send(guest, header, &frame);
                            }
                        }
                    }
                }
            }
            world.nothing_on_wire();
            for gso_size in [48, 1400].into_iter().filter(|_| kind.is_some()) {
                let header = Header {
                    gso_type: kind.unwrap(),
                    hdr_len: own.csum_start + 20,
                    gso_size,
                    ..own
                };
                assert!(send(guest, header, &frame));
                check_segments(world, &packet, usize::from(gso_size), is_card);
            }
        }
    });
}

/// Checks that the packet's whole payload is on the wire, as one unsegmented packet for a card or as segments.
fn check_segments(world: &World, packet: &Packet, gso_size: usize, is_card: bool) {
    let mut left = packet.body.len() - 20;
    while left > 0 {
        let (header, frame) = read(&world.wan.fd).expect("a segment");
        let segment = Packet::read_headers(&frame).unwrap();
        assert_eq!(segment.destination, packet.destination);
        assert_eq!(header[1] != 0, is_card, "{header:?}");
        assert!(is_card || segment.body.len() <= 20 + gso_size);
        left -= segment.body.len() - 20;
    }
}

#[test]
fn net_no_ioctl_on_the_tap_bypasses_the_offload_check() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::internet());
        let packet = &packets(&[0x5a; 64])[0];
        let (frame, own) = with_partial_checksum(packet);
        // The checksum field would be inside the destination address.
        let wrong = Header::sum_at(20, 10);
        let orders: [(bool, Order); 2] = [(false, u16::to_le_bytes), (true, u16::to_be_bytes)];
        let mut passed = 0;
        for offloads in [0, CARD, EVERYTHING] {
            let _unsupported = super::sys::try_offloads(&guest.fd, offloads);
            for (is_big, order) in orders {
                if set_big_endian(&guest.fd, is_big).is_err() && is_big {
                    continue;
                }
                for header_len in [10_u8, 12, 20, 24, 64] {
                    set_header_len(&guest.fd, libc::c_int::from(header_len));
                    let padded = |header: Header, more: u8| {
                        let mut bytes = header.bytes(order);
                        bytes.resize(usize::from(header_len), more);
                        bytes
                    };
                    for gso_type in [0, GSO_TCP4, 3, 5, 0x20, 0x40, 0x60, 0x80] {
                        for more in [0, 14, 34, 0xff] {
                            let header = Header {
                                gso_type,
                                gso_size: 100,
                                ..wrong
                            };
                            let _refused_by_kernel_or_program =
                                try_write(&guest.fd, &padded(header, more), &frame);
                        }
                    }
                    world.nothing_on_wire();
                    assert!(try_write(&guest.fd, &padded(own, 0), &frame));
                    let next = Packet::read(&read(&world.wan.fd).unwrap().1).unwrap();
                    assert_eq!(next.destination, packet.destination);
                    passed += 1;
                }
            }
        }
        assert_eq!(world.counters(&guest).packets_out, passed);
        assert!(super::sys::try_attach(&guest.fd).is_err());
    });
}
