//! Builds and parses frames, with their checksums.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use model::guest;

pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;
pub(crate) const ICMP: u8 = 1;
/// Type of an ICMP error.
pub(crate) const UNREACHABLE: u8 = 3;
pub(crate) const ICMP6: u8 = 58;

pub(crate) const FIN: u8 = 1;
pub(crate) const SYN: u8 = 2;
pub(crate) const RST: u8 = 4;
pub(crate) const ACK: u8 = 16;

/// A packet in an Ethernet frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Packet {
    pub(crate) to_mac: [u8; 6],
    pub(crate) from_mac: [u8; 6],
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    pub(crate) ttl: u8,
    pub(crate) protocol: u8,
    /// Transport header and payload.
    pub(crate) body: Vec<u8>,
}

pub(crate) fn guest4() -> IpAddr {
    guest::IPV4.into()
}

pub(crate) fn guest6() -> IpAddr {
    guest::IPV6.into()
}

/// The guest's address of the family of `peer`.
pub(crate) fn guest_for(peer: IpAddr) -> IpAddr {
    match peer {
        IpAddr::V4(_) => guest4(),
        IpAddr::V6(_) => guest6(),
    }
}

impl Packet {
    /// A packet with the guest's addresses as its source.
    pub(crate) fn from_guest(destination: IpAddr, protocol: u8, body: Vec<u8>) -> Self {
        Self {
            to_mac: guest::GATEWAY_MAC,
            from_mac: guest::MAC,
            source: guest_for(destination),
            destination,
            ttl: 64,
            protocol,
            body,
        }
    }

    /// A reply from this packet's receiver, with swapped addresses.
    pub(crate) fn answer(&self, body: Vec<u8>) -> Self {
        Self {
            to_mac: self.from_mac,
            from_mac: self.to_mac,
            source: self.destination,
            destination: self.source,
            ttl: 64,
            protocol: self.protocol,
            body,
        }
    }

    pub(crate) fn source_port(&self) -> u16 {
        u16::from_be_bytes([self.body[0], self.body[1]])
    }

    pub(crate) fn destination_port(&self) -> u16 {
        u16::from_be_bytes([self.body[2], self.body[3]])
    }

    pub(crate) fn tcp_flags(&self) -> u8 {
        self.body[13]
    }

    /// Identifier of an ICMP echo.
    pub(crate) fn identifier(&self) -> u16 {
        u16::from_be_bytes([self.body[4], self.body[5]])
    }

    /// The frame, with checksums.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut body = self.body.clone();
        let at = sum_at(self.protocol);
        if body.len() >= at + 2 {
            body[at..at + 2].fill(0);
            let sum = transport_sum(self, &body);
            body[at..at + 2].copy_from_slice(&sum.to_be_bytes());
        }
        let mut frame = [self.to_mac, self.from_mac].concat();
        match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                frame.extend([8, 0]);
                frame.extend(header4(
                    source,
                    destination,
                    self.ttl,
                    self.protocol,
                    body.len(),
                ));
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
                frame.extend(u16::try_from(body.len()).unwrap().to_be_bytes());
                frame.extend([self.protocol, self.ttl]);
                frame.extend(source.octets());
                frame.extend(destination.octets());
            }
            other => panic!("{other:?}"),
        }
        frame.extend(body);
        frame
    }

    /// Parses an IP frame and checks its checksums. `None` if the frame is not IP.
    pub(crate) fn read(frame: &[u8]) -> Option<Self> {
        let packet = Self::read_headers(frame)?;
        let at = sum_at(packet.protocol);
        let given = u16::from_be_bytes([packet.body[at], packet.body[at + 1]]);
        let mut body = packet.body.clone();
        body[at..at + 2].fill(0);
        assert_eq!(
            given,
            transport_sum(&packet, &body),
            "checksum of {packet:?}"
        );
        Some(packet)
    }

    /// Like [`Self::read`], but does not check the transport checksum, which may be left to a device.
    pub(crate) fn read_headers(frame: &[u8]) -> Option<Self> {
        let (to_mac, from_mac) = (
            frame[..6].try_into().unwrap(),
            frame[6..12].try_into().unwrap(),
        );
        let ip = &frame[14..];
        match frame[12..14] {
            [8, 0] => {
                assert_eq!(checksum(&[&ip[..20]]), 0, "checksum of the header {ip:?}");
                let octets = |at: usize| -> [u8; 4] { ip[at..at + 4].try_into().unwrap() };
                let len = usize::from(u16::from_be_bytes([ip[2], ip[3]]));
                Some(Self {
                    to_mac,
                    from_mac,
                    source: Ipv4Addr::from(octets(12)).into(),
                    destination: Ipv4Addr::from(octets(16)).into(),
                    ttl: ip[8],
                    protocol: ip[9],
                    body: ip[20..len].to_vec(),
                })
            }
            [0x86, 0xdd] => {
                let octets = |at: usize| -> [u8; 16] { ip[at..at + 16].try_into().unwrap() };
                Some(Self {
                    to_mac,
                    from_mac,
                    source: Ipv6Addr::from(octets(8)).into(),
                    destination: Ipv6Addr::from(octets(24)).into(),
                    ttl: ip[7],
                    protocol: ip[6],
                    body: ip[40..].to_vec(),
                })
            }
            _ => None,
        }
    }
}

pub(crate) fn udp(source: u16, destination: u16, payload: &[u8]) -> Vec<u8> {
    let len = u16::try_from(8 + payload.len()).unwrap();
    let head = [source, destination, len, 0];
    [head.map(u16::to_be_bytes).concat(), payload.to_vec()].concat()
}

pub(crate) fn tcp(source: u16, destination: u16, flags: u8, payload: &[u8]) -> Vec<u8> {
    let mut head = [source.to_be_bytes(), destination.to_be_bytes()].concat();
    head.extend([
        0,
        0,
        0,
        1,
        0,
        0,
        0,
        1,
        5 << 4,
        flags,
        0xff,
        0xff,
        0,
        0,
        0,
        0,
    ]);
    head.extend(payload);
    head
}

/// An ICMP echo request (`is_request`) or reply, in the family of `peer`.
pub(crate) fn echo(peer: IpAddr, is_request: bool, identifier: u16) -> Vec<u8> {
    let kind = match (peer, is_request) {
        (IpAddr::V4(_), true) => 8,
        (IpAddr::V4(_), false) => 0,
        (IpAddr::V6(_), true) => 128,
        (IpAddr::V6(_), false) => 129,
    };
    let [high, low] = identifier.to_be_bytes();
    vec![kind, 0, 0, 0, high, low, 0, 1, b'p', b'i', b'n', b'g']
}

/// The IP protocol number of ICMP in the family of `peer`.
pub(crate) fn icmp(peer: IpAddr) -> u8 {
    match peer {
        IpAddr::V4(_) => ICMP,
        IpAddr::V6(_) => ICMP6,
    }
}

pub(crate) fn header4(
    source: Ipv4Addr,
    destination: Ipv4Addr,
    ttl: u8,
    protocol: u8,
    len: usize,
) -> Vec<u8> {
    let total = u16::try_from(20 + len).unwrap().to_be_bytes();
    let mut ip = vec![0x45, 0, total[0], total[1], 0, 1, 0, 0, ttl, protocol, 0, 0];
    ip.extend(source.octets());
    ip.extend(destination.octets());
    let sum = checksum(&[&ip]).to_be_bytes();
    ip[10..12].copy_from_slice(&sum);
    ip
}

/// Recomputes the checksum of an IPv4 header.
pub(crate) fn fix_header4(frame: &mut [u8]) {
    let len = usize::from(frame[14] & 15) * 4;
    frame[24..26].fill(0);
    let sum = checksum(&[&frame[14..14 + len]]).to_be_bytes();
    frame[24..26].copy_from_slice(&sum);
}

pub(crate) fn sum_at(protocol: u8) -> usize {
    match protocol {
        TCP => 16,
        UDP => 6,
        _ => 2,
    }
}

fn transport_sum(packet: &Packet, body: &[u8]) -> u16 {
    if packet.protocol == ICMP {
        return checksum(&[body]);
    }
    let pseudo = pseudo(packet, body.len());
    match checksum(&[&pseudo, body]) {
        0 if packet.protocol == UDP => 0xffff,
        sum => sum,
    }
}

/// The pseudo header, which the transport checksum also covers.
pub(crate) fn pseudo(packet: &Packet, len: usize) -> Vec<u8> {
    let mut pseudo = match (packet.source, packet.destination) {
        (IpAddr::V4(a), IpAddr::V4(b)) => [a.octets(), b.octets()].concat(),
        (IpAddr::V6(a), IpAddr::V6(b)) => [a.octets(), b.octets()].concat(),
        other => panic!("{other:?}"),
    };
    pseudo.extend(u32::try_from(len).unwrap().to_be_bytes());
    pseudo.extend([0, 0, 0, packet.protocol]);
    pseudo
}

/// The Internet checksum (RFC 1071).
pub(crate) fn checksum(parts: &[&[u8]]) -> u16 {
    let bytes = parts.concat();
    let words = bytes.chunks(2).map(|pair| match *pair {
        [a, b] => u32::from(u16::from_be_bytes([a, b])),
        [a] => u32::from(a) << 8,
        _ => 0,
    });
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap()
}
