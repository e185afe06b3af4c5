//! Builds frames byte by byte: valid ones, and ones that no network stack sends.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use model::guest;

use crate::{Frame, Transport};

// EtherTypes.
pub const IPV4: u16 = 0x0800;
pub const IPV6: u16 = 0x86dd;
const ARP: u16 = 0x0806;
const VLAN: u16 = 0x8100;
const BROADCAST: [u8; 6] = [0xff; 6];

const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;
const FRAGMENT_HEADER: u8 = 44;
/// Default source port.
const SOURCE_PORT: u16 = 40_123;

/// Why a frame cannot be built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrameError(pub &'static str);

/// Builds a frame with a payload.
///
/// # Errors
/// Returns an error if the destination is missing, the addresses are of different families, the options or flags are
/// invalid, or the packet is too long.
pub fn build(frame: &Frame, payload: &[u8]) -> Result<Vec<u8>, FrameError> {
    let to = frame.to.ok_or(FrameError("the frame has no destination"))?;
    let packet = match (to, frame.source) {
        (IpAddr::V4(to), None) => ipv4(frame, guest::IPV4, to, payload)?,
        (IpAddr::V4(to), Some(IpAddr::V4(source))) => ipv4(frame, source, to, payload)?,
        (IpAddr::V6(to), None) => ipv6(frame, guest::IPV6, to, payload)?,
        (IpAddr::V6(to), Some(IpAddr::V6(source))) => ipv6(frame, source, to, payload)?,
        (IpAddr::V4(_), Some(IpAddr::V6(_))) | (IpAddr::V6(_), Some(IpAddr::V4(_))) => {
            return Err(FrameError("the addresses are of different families"));
        }
    };
    let family = if to.is_ipv4() { IPV4 } else { IPV6 };
    let mut out = Vec::new();
    out.extend(frame.to_mac.unwrap_or(guest::GATEWAY_MAC));
    out.extend(frame.mac.unwrap_or(guest::MAC));
    if let Some(tag) = frame.vlan {
        out.extend(VLAN.to_be_bytes());
        out.extend(tag.to_be_bytes());
    }
    out.extend(frame.ethertype.unwrap_or(family).to_be_bytes());
    out.extend(packet);
    Ok(out)
}

fn ipv4(
    frame: &Frame,
    source: Ipv4Addr,
    to: Ipv4Addr,
    payload: &[u8],
) -> Result<Vec<u8>, FrameError> {
    if !frame.options.len().is_multiple_of(4) || frame.options.len() > 40 {
        return Err(FrameError(
            "the IPv4 options are not a multiple of 4 bytes up to 40",
        ));
    }
    let pseudo = [source.octets(), to.octets()].concat();
    let protocol = number(frame.transport, false);
    let body = transport(frame, &pseudo, protocol, payload)?;
    let header = 20 + frame.options.len();
    let length = short(header + body.len())?;
    let words = u8::try_from(header / 4).map_err(|_| FrameError("the header is too long"))?;
    let more = if frame.more_fragments { 0x2000 } else { 0 };
    let mut out = vec![0x40 | words, 0];
    out.extend(frame.said_length.unwrap_or(length).to_be_bytes());
    out.extend([0x12, 0x34]);
    out.extend((more | (frame.fragment_offset / 8)).to_be_bytes());
    out.extend([frame.ttl.unwrap_or(64), protocol, 0, 0]);
    out.extend(&pseudo);
    out.extend(&frame.options);
    let sum = checksum(&[&out]);
    out[10..12].copy_from_slice(&sum.to_be_bytes());
    out.extend(body);
    Ok(out)
}

fn ipv6(
    frame: &Frame,
    source: Ipv6Addr,
    to: Ipv6Addr,
    payload: &[u8],
) -> Result<Vec<u8>, FrameError> {
    let pseudo = [source.octets(), to.octets()].concat();
    let protocol = number(frame.transport, true);
    let body = transport(frame, &pseudo, protocol, payload)?;
    let is_fragment = frame.more_fragments || frame.fragment_offset > 0;
    let (next, extension) = match frame.extension {
        _ if is_fragment => {
            let place = (frame.fragment_offset & 0xfff8) | u16::from(frame.more_fragments);
            let [high, low] = place.to_be_bytes();
            (
                FRAGMENT_HEADER,
                vec![protocol, 0, high, low, 0, 0, 0x12, 0x34],
            )
        }
        // Eight bytes, with PadN for headers that contain options.
        Some(number) => (number, vec![protocol, 0, 1, 4, 0, 0, 0, 0]),
        None => (protocol, Vec::new()),
    };
    let length = short(extension.len() + body.len())?;
    let mut out = vec![0x60, 0, 0, 0];
    out.extend(frame.said_length.unwrap_or(length).to_be_bytes());
    out.extend([next, frame.ttl.unwrap_or(64)]);
    out.extend(&pseudo);
    out.extend(extension);
    out.extend(body);
    Ok(out)
}

fn number(transport: Transport, v6: bool) -> u8 {
    match transport {
        Transport::Udp => UDP,
        Transport::Tcp => TCP,
        Transport::Icmp if v6 => ICMPV6,
        Transport::Icmp => 1,
        Transport::Gre => 47,
        Transport::Sctp => 132,
        Transport::IpInIp => 4,
    }
}

fn transport(
    frame: &Frame,
    pseudo: &[u8],
    protocol: u8,
    payload: &[u8],
) -> Result<Vec<u8>, FrameError> {
    let port = frame.port.to_be_bytes();
    let source = frame.source_port.unwrap_or(SOURCE_PORT).to_be_bytes();
    let mut out = Vec::new();
    let sum_at = match frame.transport {
        Transport::Udp => {
            out.extend(source);
            out.extend(port);
            out.extend(
                frame
                    .said_inner_length
                    .unwrap_or(short(8 + payload.len())?)
                    .to_be_bytes(),
            );
            out.extend([0, 0]);
            Some(6)
        }
        Transport::Tcp => {
            out.extend(source);
            out.extend(port);
            out.extend([0, 0, 0, 1, 0, 0, 0, 0]);
            let words = frame.said_inner_length.map_or(5, |n| n.to_be_bytes()[1]) << 4;
            out.extend([words, flags(frame.flags.as_deref().unwrap_or("S"))?]);
            out.extend([0xff, 0xff, 0, 0, 0, 0]);
            Some(16)
        }
        Transport::Icmp => {
            let echo = if protocol == ICMPV6 { [128, 0] } else { [8, 0] };
            out.extend(frame.icmp.unwrap_or(echo));
            out.extend([0, 0, 0x43, 0x42, 0, 1]);
            Some(2)
        }
        Transport::Gre => {
            out.extend([0, 0, 8, 0]);
            None
        }
        Transport::Sctp => {
            out.extend(source);
            out.extend(port);
            out.extend([0; 8]);
            None
        }
        Transport::IpInIp => None,
    };
    out.extend(payload);
    if let Some(at) = sum_at {
        let length = u32::from(short(out.len())?).to_be_bytes();
        let rest = [0, 0, 0, protocol];
        let sum = match protocol {
            1 => checksum(&[&out]),
            _ => checksum(&[pseudo, &length, &rest, &out]),
        };
        out[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    }
    Ok(out)
}

fn flags(letters: &str) -> Result<u8, FrameError> {
    letters.chars().try_fold(0, |flags, letter| {
        let place = "FSRPAU"
            .find(letter)
            .ok_or(FrameError("the TCP flags are not letters of FSRPAU"))?;
        Ok(flags | 1 << place)
    })
}

fn short(length: usize) -> Result<u16, FrameError> {
    u16::try_from(length).map_err(|_| FrameError("the packet is too long"))
}

/// The Internet checksum (RFC 1071). All parts except the last must have an even length.
#[must_use]
pub fn checksum(parts: &[&[u8]]) -> u16 {
    let mut sum: u32 = 0;
    for pair in parts.iter().flat_map(|part| part.chunks(2)) {
        let low = pair.get(1).copied().unwrap_or(0);
        sum += u32::from(u16::from_be_bytes([pair[0], low]));
        sum = (sum & 0xffff) + (sum >> 16);
    }
    let [.., high, low] = (!sum).to_be_bytes();
    u16::from_be_bytes([high, low])
}

/// An ARP request for an address.
#[must_use]
pub fn arp_request(asked: Ipv4Addr) -> Vec<u8> {
    let mut out = [BROADCAST, guest::MAC].concat();
    out.extend(ARP.to_be_bytes());
    out.extend([0, 1, 8, 0, 6, 4, 0, 1]);
    out.extend(guest::MAC);
    out.extend(guest::IPV4.octets());
    out.extend([0; 6]);
    out.extend(asked.octets());
    out
}

/// A neighbour solicitation for an address (RFC 4861, 4.3).
///
/// # Errors
/// None in practice, because the size is fixed.
pub fn solicitation(asked: Ipv6Addr) -> Result<Vec<u8>, FrameError> {
    let [.., a, b, c] = asked.octets();
    let group = Ipv6Addr::new(
        0xff02,
        0,
        0,
        0,
        0,
        1,
        0xff00 | u16::from(a),
        u16::from_be_bytes([b, c]),
    );
    let pseudo = [guest::IPV6.octets(), group.octets()].concat();
    let mut body = vec![135, 0, 0, 0, 0, 0, 0, 0];
    body.extend(asked.octets());
    body.extend([1, 1]);
    body.extend(guest::MAC);
    let length = short(body.len())?;
    let sum = checksum(&[
        &pseudo,
        &u32::from(length).to_be_bytes(),
        &[0, 0, 0, ICMPV6],
        &body,
    ]);
    body[2..4].copy_from_slice(&sum.to_be_bytes());
    let mut out = vec![0x33, 0x33, 0xff, a, b, c];
    out.extend(guest::MAC);
    out.extend(IPV6.to_be_bytes());
    out.extend([0x60, 0, 0, 0]);
    out.extend(length.to_be_bytes());
    out.extend([ICMPV6, 255]);
    out.extend(pseudo);
    out.extend(body);
    Ok(out)
}

/// The IP address of a frame's sender. For ARP, only of replies.
#[must_use]
pub fn sender(frame: &[u8]) -> Option<IpAddr> {
    let array = |at: usize| {
        frame
            .get(at..at + 4)
            .and_then(|b| <[u8; 4]>::try_from(b).ok())
    };
    match u16::from_be_bytes([*frame.get(12)?, *frame.get(13)?]) {
        IPV4 => array(26).map(IpAddr::from),
        ARP if frame.get(21) == Some(&2) => array(28).map(IpAddr::from),
        IPV6 => {
            let bytes = <[u8; 16]>::try_from(frame.get(22..38)?).ok()?;
            Some(bytes.into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to(address: &str) -> Frame {
        Frame {
            to: address.parse().ok(),
            port: 5000,
            ..Frame::default()
        }
    }

    #[test]
    fn a_default_frame_is_a_valid_datagram() {
        let frame = build(&to("198.51.100.7"), b"hello").unwrap();
        assert_eq!(frame.len(), 14 + 20 + 8 + 5);
        assert_eq!(frame[14], 0x45);
        assert_eq!(frame[12..14], IPV4.to_be_bytes());
        assert_eq!(
            checksum(&[&frame[14..34]]),
            0,
            "checksum of the IPv4 header"
        );
        let pseudo = [&frame[26..34], &[0, 17, 0, 13][..]].concat();
        assert_eq!(
            checksum(&[&pseudo, &frame[34..]]),
            0,
            "checksum of the datagram"
        );
        assert_eq!(sender(&frame), Some(guest::IPV4.into()));
    }

    #[test]
    fn ipv6_segments_and_echo_requests_have_valid_checksums() {
        for transport in [Transport::Tcp, Transport::Icmp] {
            let frame = Frame {
                transport,
                ..to("2001:db8::7")
            };
            let frame = build(&frame, b"even").unwrap();
            let length = u32::try_from(frame.len() - 54).unwrap().to_be_bytes();
            let protocol = [0, 0, 0, frame[20]];
            assert_eq!(
                checksum(&[&frame[22..54], &length, &protocol, &frame[54..]]),
                0
            );
        }
    }

    #[test]
    fn unusual_properties_are_at_their_offsets() {
        let odd = Frame {
            fragment_offset: 16,
            more_fragments: true,
            options: vec![1, 1, 1, 0],
            vlan: Some(7),
            said_length: Some(9),
            ..to("198.51.100.7")
        };
        let frame = build(&odd, b"x").unwrap();
        assert_eq!(frame[12..18], [0x81, 0, 0, 7, 8, 0]);
        assert_eq!(frame[18], 0x46);
        assert_eq!(frame[20..22], [0, 9]);
        assert_eq!(frame[24..26], [0x20, 2]);
        let v6 = Frame {
            more_fragments: true,
            ..to("2001:db8::7")
        };
        let frame = build(&v6, b"x").unwrap();
        assert_eq!((frame[20], frame[54]), (FRAGMENT_HEADER, UDP));
        let xmas = Frame {
            transport: Transport::Tcp,
            flags: Some("FPU".into()),
            ..to("10.0.0.1")
        };
        assert_eq!(build(&xmas, b"").unwrap()[14 + 20 + 13], 0b10_1001);
    }

    #[test]
    fn invalid_frames_are_rejected() {
        let mixed = Frame {
            source: "::1".parse().ok(),
            ..to("10.0.0.1")
        };
        assert!(build(&mixed, b"").is_err());
        assert!(build(&Frame::default(), b"").is_err());
        let flags = Frame {
            transport: Transport::Tcp,
            flags: Some("X".into()),
            ..to("10.0.0.1")
        };
        assert!(build(&flags, b"").is_err());
    }

    #[test]
    fn the_sender_of_replies_is_found() {
        let mut answer = arp_request(guest::GATEWAY4);
        assert_eq!(sender(&answer), None, "a request has no sender");
        answer[21] = 2;
        answer[28..32].copy_from_slice(&guest::GATEWAY4.octets());
        assert_eq!(sender(&answer), Some(guest::GATEWAY4.into()));
        assert_eq!(sender(&answer[..20]), None);
        let asked = solicitation(guest::GATEWAY6).unwrap();
        assert_eq!(sender(&asked), Some(guest::IPV6.into()));
    }
}
