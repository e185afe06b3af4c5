//! Every offload header, with frames whose transport header is at a known position.

use super::*;

const V4_OPTIONS: u8 = 0x46;
const TCP4: u8 = 1;
const TCP6: u8 = 4;

/// A frame, and the offset of its transport header.
fn frame(ethertype: [u8; 2], ip: &[u8], protocol: u8) -> (Vec<u8>, u16) {
    let mut frame = vec![2; 12];
    frame.extend(ethertype);
    frame.extend(ip);
    let start = u16::try_from(frame.len()).unwrap();
    let mut transport = [0; 20];
    transport[12] = if protocol == TCP { 0x50 } else { 0 };
    frame.extend(transport);
    frame.extend([0x5a; 40]);
    (frame, start)
}

fn ip4(first: u8, fragment: u8, protocol: u8) -> Vec<u8> {
    let mut ip = vec![0; usize::from(first & 0xf) * 4];
    (ip[0], ip[6], ip[9]) = (first, fragment, protocol);
    ip
}

fn ip6(extensions: &[u8], protocol: u8) -> Vec<u8> {
    let mut ip = vec![0; 40];
    (ip[0], ip[6]) = (0x60, extensions.first().copied().unwrap_or(protocol));
    let after = extensions.iter().skip(1).chain([&protocol]);
    for next in after.take(extensions.len()) {
        ip.extend([*next, 1]);
        ip.extend([0; 14]);
    }
    ip
}

/// Each frame with the offset of its transport header, the checksum's offset in that header, and its segmentation type.
fn known() -> Vec<(Vec<u8>, u16, u16, Option<u8>)> {
    let mut all = Vec::new();
    for (protocol, sum, gso4, gso6) in [(TCP, 16, Some(TCP4), Some(TCP6)), (UDP, 6, None, None)] {
        for ip in [ip4(0x45, 0, protocol), ip4(V4_OPTIONS, 0x40, protocol)] {
            let (frame, start) = frame([8, 0], &ip, protocol);
            all.push((frame, start, sum, gso4));
        }
        for ip in [ip6(&[], protocol), ip6(&[0, 43, 60], protocol)] {
            let (frame, start) = frame([0x86, 0xdd], &ip, protocol);
            all.push((frame, start, sum, gso6));
        }
    }
    all
}

/// A driver's header: flags, segmentation type, then header length, segment size, checksum start and checksum offset.
fn driver(flags: u8, gso_type: u8, words: [u16; 4]) -> [u8; HEADER] {
    let mut header = [0xff; HEADER];
    (header[0], header[1]) = (flags, gso_type);
    for (to, word) in header[2..10].chunks_mut(2).zip(words) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    header
}

#[test]
fn a_checksum_request_must_name_the_transport_headers_own_field() {
    for (frame, start, sum, _) in known() {
        for at in 0..300 {
            for offset in 0..300 {
                let asked = driver(1, 0, [9, 9, at, offset]);
                let mut own = driver(1, 0, [0, 0, start, sum]);
                own[10..].fill(0);
                let expected = (at, offset) == (start, sum);
                assert_eq!(
                    header(asked, &frame, frame.len()),
                    expected.then_some(own),
                    "{at} {offset} {frame:02x?}"
                );
            }
        }
    }
}

#[test]
fn a_segmentation_request_must_match_the_packets_protocol() {
    for (frame, start, sum, kind) in known() {
        for flags in [0, 1, 2, 3, 0xfe, u8::MAX] {
            for gso_type in 0..=u8::MAX {
                for size in [0, 1, 47, 48, 1448, u16::MAX] {
                    let asked = driver(flags, gso_type, [0xffff, size, start, sum]);
                    let mut own = [0; HEADER];
                    let expected = match (flags & 1, gso_type) {
                        (0, 0) => Some(own),
                        (1, 0) => {
                            own[..10].copy_from_slice(&driver(1, 0, [0, 0, start, sum])[..10]);
                            Some(own)
                        }
                        (1, other) if Some(other) == kind && size >= 48 => {
                            let words = [start + 20, size, start, sum];
                            own[..10].copy_from_slice(&driver(1, other, words)[..10]);
                            Some(own)
                        }
                        _ => None,
                    };
                    let made = header(asked, &frame, frame.len());
                    assert_eq!(made, expected, "{flags} {gso_type} {size} {frame:02x?}");
                }
            }
        }
    }
}

#[test]
fn frames_without_a_transport_header_may_request_no_offload() {
    let v4 = [8, 0];
    let others = [
        frame(v4, &ip4(0x45, 0, 1), 1),
        frame(v4, &ip4(0x45, 0x20, UDP), UDP),
        frame(v4, &ip4(0x45, 0x01, UDP), UDP),
        frame(v4, &ip4(0x65, 0, UDP), UDP),
        frame([8, 6], &ip4(0x45, 0, UDP), UDP),
        frame([0x81, 0], &ip4(0x45, 0, UDP), UDP),
        frame([0x86, 0xdd], &ip6(&[44], UDP), UDP),
        frame([0x86, 0xdd], &ip6(&[], 58), 58),
    ];
    for (frame, start) in others {
        for offset in [2, 6, 16] {
            let asked = driver(1, 0, [0, 0, start, offset]);
            assert_eq!(header(asked, &frame, frame.len()), None, "{frame:02x?}");
        }
        assert!(header([0; HEADER], &frame, frame.len()).is_some());
    }
    for (frame, start, sum, _) in known() {
        let asked = driver(1, 0, [0, 0, start, sum]);
        let needed = usize::from(start) + if sum == 16 { 20 } else { 8 };
        for len in 0..frame.len() {
            let expected = len >= needed;
            assert_eq!(header(asked, &frame[..len], len).is_some(), expected);
        }
    }
}
