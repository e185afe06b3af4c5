//! The offload header of a frame from the guest, by which a driver asks the host to fill in a checksum or to split a
//! packet into segments.
//!
//! The host's kernel does both after its eBPF programs and firewall rules have checked the frame, and it writes the
//! checksum at an offset that the header chooses. Therefore this module builds a new header for the TAP, and only if
//! the driver's request refers to the frame's own TCP or UDP header. Frames with any other request are dropped.

use virtio_bindings::virtio_net as spec;

/// Size of `struct virtio_net_hdr_mrg_rxbuf` in bytes.
pub(super) const HEADER: usize = 12;
/// Bytes at the start of a frame that can be headers: Ethernet, IPv4 with options or IPv6 with extension headers, TCP
/// with options.
pub(super) const HEADERS_MAX: usize = 256;
/// Smallest accepted segment size in bytes. No network stack announces a smaller one.
const SEGMENT_MIN: u16 = 48;

const ETHERNET: usize = 14;
const TCP: u8 = 6;
const UDP: u8 = 17;

/// The transport header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Transport {
    /// The segmentation type for this protocol (`VIRTIO_NET_HDR_GSO_…`); `u32::MAX` for UDP, which has none.
    gso_type: u32,
    /// Offset in the frame and length in bytes.
    start: usize,
    len: usize,
    /// Offset of the checksum in the transport header.
    sum: u16,
}

/// The header to write to the TAP in place of the driver's header. `start` must be the first bytes of the frame, and
/// `len` the length of the whole frame. Returns `None` if the frame must be dropped.
pub(super) fn header(driver: [u8; HEADER], start: &[u8], len: usize) -> Option<[u8; HEADER]> {
    let [flags, gso_type, ..] = driver;
    let mut header = [0; HEADER];
    match (
        u32::from(flags) & spec::VIRTIO_NET_HDR_F_NEEDS_CSUM,
        u32::from(gso_type),
    ) {
        (0, spec::VIRTIO_NET_HDR_GSO_NONE) => return Some(header),
        // Segments need new checksums (virtio 1.2, 5.1.6.2.1).
        (0, _) => return None,
        _ => {}
    }
    let word = |at: usize| u16::from_le_bytes([driver[at], driver[at + 1]]);
    let transport = Transport::of(start).filter(|found| found.start + found.len <= len)?;
    if usize::from(word(6)) != transport.start || word(8) != transport.sum {
        return None;
    }
    header[0] = u8::try_from(spec::VIRTIO_NET_HDR_F_NEEDS_CSUM).ok()?;
    header[6..10].copy_from_slice(&driver[6..10]);
    if u32::from(gso_type) == spec::VIRTIO_NET_HDR_GSO_NONE {
        return Some(header);
    }
    if u32::from(gso_type) != transport.gso_type || word(4) < SEGMENT_MIN {
        return None;
    }
    let headers = u16::try_from(transport.start + transport.len).ok()?;
    header[1] = gso_type;
    header[2..4].copy_from_slice(&headers.to_le_bytes());
    header[4..6].copy_from_slice(&driver[4..6]);
    Some(header)
}

impl Transport {
    /// Finds the transport header of a frame. Returns `None` for a fragment, for any protocol other than TCP and UDP,
    /// and if the header is not wholly in `frame`.
    fn of(frame: &[u8]) -> Option<Self> {
        let packet = frame.get(ETHERNET..)?;
        let (protocol, ip_len, tcp_type) = match frame[12..ETHERNET] {
            [0x08, 0x00] => {
                let (protocol, len) = ipv4(packet)?;
                (protocol, len, spec::VIRTIO_NET_HDR_GSO_TCPV4)
            }
            [0x86, 0xdd] => {
                let (protocol, len) = ipv6(packet)?;
                (protocol, len, spec::VIRTIO_NET_HDR_GSO_TCPV6)
            }
            _ => return None,
        };
        let transport = packet.get(ip_len..)?;
        let (gso_type, len, sum) = match protocol {
            TCP => (tcp_type, usize::from(*transport.get(12)? >> 4) * 4, 16),
            // UDP segmentation is not offered to the driver.
            UDP => (u32::MAX, 8, 6),
            _ => return None,
        };
        let is_whole = len >= usize::from(sum) + 2 && transport.len() >= len;
        is_whole.then_some(Self {
            gso_type,
            start: ETHERNET + ip_len,
            len,
            sum,
        })
    }
}

/// Protocol, and length of the header with its options (RFC 791, 3.1).
fn ipv4(packet: &[u8]) -> Option<(u8, usize)> {
    let [first, .., high, low, _, protocol] = *packet.first_chunk::<10>()?;
    let len = usize::from(first & 0xf) * 4;
    let is_fragment = u16::from_be_bytes([high, low]) & 0x3fff != 0;
    (first >> 4 == 4 && len >= 20 && !is_fragment).then_some((protocol, len))
}

/// Protocol, and length of the header with its extension headers (RFC 8200, 4). Only extension headers within the start
/// of the frame are followed.
fn ipv6(packet: &[u8]) -> Option<(u8, usize)> {
    const HOP_BY_HOP: u8 = 0;
    const ROUTING: u8 = 43;
    const DESTINATION: u8 = 60;
    let (mut next, mut len) = (*packet.get(6)?, 40);
    while let HOP_BY_HOP | ROUTING | DESTINATION = next {
        let [following, words] = *packet.get(len..)?.first_chunk::<2>()?;
        (next, len) = (following, len + 8 + usize::from(words) * 8);
    }
    (packet[0] >> 4 == 6).then_some((next, len))
}

#[cfg(test)]
mod tests;
