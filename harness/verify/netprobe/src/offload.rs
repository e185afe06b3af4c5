//! Frames with offload requests: a checksum or the segmentation is left to the card. The header before a frame
//! describes the request (virtio 1.2, 5.1.6). A host that does not validate the header would store the checksum at
//! any offset in the frame.

use std::net::{IpAddr, SocketAddr};

use crate::{
    Frame, Transport,
    frame::{FrameError, build, checksum},
};

/// VIRTIO_NET_HDR_F_NEEDS_CSUM.
const NEEDS_CSUM: u8 = 1;
/// VIRTIO_NET_HDR_GSO_TCPV4 and VIRTIO_NET_HDR_GSO_TCPV6.
const TCP4: u8 = 1;
const TCP6: u8 = 4;
/// Payload of a packet for segmentation, in bytes: exceeds the MTU of every uplink.
const LARGE: usize = 3000;
/// Segment sizes in bytes: none, too small (1 to 47), the smallest valid one (48), usual (1400), and too large.
const SEGMENT_SIZES: [u16; 8] = [0, 1, 8, 47, 48, 1400, 1461, 2990];

/// `struct virtio_net_hdr`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// VIRTIO_NET_HDR_F_…
    pub flags: u8,
    /// VIRTIO_NET_HDR_GSO_…
    pub gso_type: u8,
    /// Length of all headers, in bytes.
    pub hdr_len: u16,
    /// Payload of a segment, in bytes.
    pub gso_size: u16,
    /// Offset in the frame at which the checksum starts.
    pub csum_start: u16,
    /// Offset of the checksum field from `csum_start`.
    pub csum_offset: u16,
}

impl Header {
    /// The header's bytes before a frame.
    #[must_use]
    pub fn bytes(self) -> [u8; 10] {
        let [a, b] = self.hdr_len.to_le_bytes();
        let [c, d] = self.gso_size.to_le_bytes();
        let [e, f] = self.csum_start.to_le_bytes();
        let [g, h] = self.csum_offset.to_le_bytes();
        [self.flags, self.gso_type, a, b, c, d, e, f, g, h]
    }
}

/// A frame with a partial checksum, which the card is to complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartialFrame {
    /// The only header that matches the frame without segmentation.
    pub header: Header,
    pub frame: Vec<u8>,
    /// The valid type of segmentation. `None`: the frame cannot be segmented.
    gso_type: Option<u8>,
}

/// Makes a UDP datagram and a TCP segment to an address, with `word` and `padding` bytes as their payload.
///
/// # Errors
/// Returns an error if the payload is too long for a packet.
pub fn partial_frames(
    to: SocketAddr,
    word: &str,
    padding: usize,
) -> Result<Vec<PartialFrame>, FrameError> {
    let mut payload = word.as_bytes().to_vec();
    payload.resize(word.len() + padding, b'.');
    let of = |transport| {
        let frame = Frame {
            to: Some(to.ip()),
            port: to.port(),
            transport,
            ..Frame::default()
        };
        let bytes = build(&frame, &payload)?;
        Ok(with_partial_checksum(bytes, to.ip(), transport))
    };
    [Transport::Udp, Transport::Tcp]
        .map(of)
        .into_iter()
        .collect()
}

fn with_partial_checksum(mut frame: Vec<u8>, to: IpAddr, transport: Transport) -> PartialFrame {
    let (start, addresses) = match to {
        IpAddr::V4(_) => (34, 26..34),
        IpAddr::V6(_) => (54, 22..54),
    };
    let (protocol, offset, gso_type) = match (transport, to) {
        (Transport::Tcp, IpAddr::V4(_)) => (6, 16, Some(TCP4)),
        (Transport::Tcp, IpAddr::V6(_)) => (6, 16, Some(TCP6)),
        _ => (17, 6, None),
    };
    let length = u32::try_from(frame.len() - start)
        .unwrap_or(0)
        .to_be_bytes();
    // The field contains the sum of the pseudo header.
    let sum = !checksum(&[&frame[addresses], &length, &[0, 0, 0, protocol]]);
    frame[start + offset..start + offset + 2].copy_from_slice(&sum.to_be_bytes());
    let header = Header {
        flags: NEEDS_CSUM,
        csum_start: u16::try_from(start).unwrap_or(0),
        csum_offset: u16::try_from(offset).unwrap_or(0),
        ..Header::default()
    };
    PartialFrame {
        header,
        frame,
        gso_type,
    }
}

/// Calls `send` with UDP, TCP and ICMP frames and headers that do not match them: every wrong checksum offset up to
/// the end of the frame, and every segmentation type with several sizes. An ICMP echo request has no valid offload
/// request.
///
/// # Errors
/// Returns an error if the payload is too long for a packet.
pub fn each_unfit(
    to: SocketAddr,
    word: &str,
    mut send: impl FnMut(Header, &[u8]),
) -> Result<(), FrameError> {
    let echo = Frame {
        to: Some(to.ip()),
        transport: Transport::Icmp,
        ..Frame::default()
    };
    let echo = build(&echo, word.as_bytes())?;
    let whole = partial_frames(to, word, 0)?;
    let header = whole[0].header;
    for csum_offset in [0, 2, 6, 16] {
        send(
            Header {
                csum_offset,
                ..header
            },
            &echo,
        );
    }
    for partial in whole {
        let end = u16::try_from(partial.frame.len()).unwrap_or(0) + 2;
        for csum_start in 0..end {
            for csum_offset in 0..end {
                let header = Header {
                    csum_start,
                    csum_offset,
                    ..partial.header
                };
                if header != partial.header {
                    send(header, &partial.frame);
                }
            }
        }
    }
    for partial in partial_frames(to, word, LARGE)? {
        partial.each_invalid_segmentation(|header| send(header, &partial.frame));
    }
    Ok(())
}

impl PartialFrame {
    fn each_invalid_segmentation(&self, mut send: impl FnMut(Header)) {
        let header_lens = [
            0,
            self.header.csum_start,
            self.header.csum_start + 20,
            u16::MAX,
        ];
        for gso_type in 0..=u8::MAX {
            for gso_size in SEGMENT_SIZES {
                for hdr_len in header_lens {
                    for flags in [0, NEEDS_CSUM] {
                        let is_valid = self.gso_type == Some(gso_type)
                            && (48..=1400).contains(&gso_size)
                            && flags == NEEDS_CSUM;
                        let header = Header {
                            flags,
                            gso_type,
                            hdr_len,
                            gso_size,
                            ..self.header
                        };
                        // `self.header` requests no segmentation and is valid too.
                        if !is_valid && header != self.header {
                            send(header);
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_checksum_offset_except_the_valid_one_is_tried() {
        for to in ["198.51.100.21:5000", "[2001:db8:100::21]:5000"] {
            let to: SocketAddr = to.parse().unwrap();
            let valid = [
                partial_frames(to, "word", 0).unwrap(),
                partial_frames(to, "word", LARGE).unwrap(),
            ]
            .concat();
            let mut tried = 0_usize;
            each_unfit(to, "word", |header, frame| {
                assert!(
                    !valid
                        .iter()
                        .any(|own| own.header == header && own.frame == frame)
                );
                tried += 1;
            })
            .unwrap();
            assert!(tried > 20_000, "{tried}");
        }
    }

    #[test]
    fn completing_the_partial_checksum_gives_a_valid_checksum() {
        for to in ["198.51.100.21:5000", "[2001:db8:100::21]:5000"] {
            for partial in partial_frames(to.parse().unwrap(), "word", 3).unwrap() {
                let start = usize::from(partial.header.csum_start);
                let at = start + usize::from(partial.header.csum_offset);
                let sum = checksum(&[&partial.frame[start..]]);
                let mut frame = partial.frame.clone();
                frame[at..at + 2].copy_from_slice(&sum.to_be_bytes());
                let addresses = if start == 34 { 26..34 } else { 22..54 };
                let length = u32::try_from(frame.len() - start).unwrap().to_be_bytes();
                let protocol = if partial.gso_type.is_some() { 6 } else { 17 };
                let pseudo = [&frame[addresses], &length, &[0, 0, 0, protocol]].concat();
                assert_eq!(checksum(&[&pseudo, &frame[start..]]), 0);
            }
        }
    }
}
