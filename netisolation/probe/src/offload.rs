//! Frames of which something is left to the card: a checksum, or the cutting into segments. The header before a frame
//! says what (virtio 1.2, 5.1.6); a card that believes any header writes where it says.

use std::net::{IpAddr, SocketAddr};

use crate::{
    Frame, Transport,
    frame::{NoFrame, build, checksum},
};

/// VIRTIO_NET_HDR_F_NEEDS_CSUM.
const NEEDS_CSUM: u8 = 1;
/// VIRTIO_NET_HDR_GSO_TCPV4 and TCPV6.
const TCP4: u8 = 1;
const TCP6: u8 = 4;
/// Of a packet that is to be cut: larger than any uplink takes as a whole.
const LARGE: usize = 3000;
/// Bytes of segments: none, few, the least that a stack announces, usual, and more than fit.
const SIZES: [u16; 8] = [0, 1, 8, 47, 48, 1400, 1461, 2990];

/// `struct virtio_net_hdr`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// VIRTIO_NET_HDR_F_…
    pub flags: u8,
    /// VIRTIO_NET_HDR_GSO_…
    pub gso_type: u8,
    /// Bytes of all headers.
    pub hdr_len: u16,
    /// Bytes of payload in a segment.
    pub gso_size: u16,
    /// Where summing begins.
    pub csum_start: u16,
    /// Where from there the sum goes.
    pub csum_offset: u16,
}

impl Header {
    /// As it lies before a frame.
    #[must_use]
    pub fn bytes(self) -> [u8; 10] {
        let [a, b] = self.hdr_len.to_le_bytes();
        let [c, d] = self.gso_size.to_le_bytes();
        let [e, f] = self.csum_start.to_le_bytes();
        let [g, h] = self.csum_offset.to_le_bytes();
        [self.flags, self.gso_type, a, b, c, d, e, f, g, h]
    }
}

/// A frame as stacks leave it to a card, and the one header that fits it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// Its checksum is to be filled in.
    pub header: Header,
    /// The frame.
    pub frame: Vec<u8>,
    /// As what it can be cut.
    gso_type: Option<u8>,
}

/// A datagram and a segment to this address, with `word` in them and so many bytes besides.
///
/// # Errors
/// More than fits.
pub fn left(to: SocketAddr, word: &str, more: usize) -> Result<Vec<Left>, NoFrame> {
    let mut payload = word.as_bytes().to_vec();
    payload.resize(word.len() + more, b'.');
    let of = |transport| {
        let frame = Frame {
            to: Some(to.ip()),
            port: to.port(),
            transport,
            ..Frame::default()
        };
        Ok(unfinished(build(&frame, &payload)?, to.ip(), transport))
    };
    [Transport::Udp, Transport::Tcp]
        .map(of)
        .into_iter()
        .collect()
}

fn unfinished(mut frame: Vec<u8>, to: IpAddr, transport: Transport) -> Left {
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
    // The sum of the pseudo header alone.
    let sum = !checksum(&[&frame[addresses], &length, &[0, 0, 0, protocol]]);
    frame[start + offset..start + offset + 2].copy_from_slice(&sum.to_be_bytes());
    let header = Header {
        flags: NEEDS_CSUM,
        csum_start: u16::try_from(start).unwrap_or(0),
        csum_offset: u16::try_from(offset).unwrap_or(0),
        ..Header::default()
    };
    Left {
        header,
        frame,
        gso_type,
    }
}

/// Hands each frame to this address with each header that does not fit it: every place for its checksum, and every kind
/// and size of segments. Of echo requests nothing can be left to a card.
///
/// # Errors
/// More than fits.
pub fn each_unfit(
    to: SocketAddr,
    word: &str,
    mut send: impl FnMut(Header, &[u8]),
) -> Result<(), NoFrame> {
    let echo = Frame {
        to: Some(to.ip()),
        transport: Transport::Icmp,
        ..Frame::default()
    };
    let echo = build(&echo, word.as_bytes())?;
    let whole = left(to, word, 0)?;
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
    for left in whole {
        let end = u16::try_from(left.frame.len()).unwrap_or(0) + 2;
        for csum_start in 0..end {
            for csum_offset in 0..end {
                let header = Header {
                    csum_start,
                    csum_offset,
                    ..left.header
                };
                if header != left.header {
                    send(header, &left.frame);
                }
            }
        }
    }
    for left in self::left(to, word, LARGE)? {
        left.each_cut(|header| send(header, &left.frame));
    }
    Ok(())
}

impl Left {
    fn each_cut(&self, mut send: impl FnMut(Header)) {
        let header_lens = [
            0,
            self.header.csum_start,
            self.header.csum_start + 20,
            u16::MAX,
        ];
        for gso_type in 0..=u8::MAX {
            for gso_size in SIZES {
                for hdr_len in header_lens {
                    for flags in [0, NEEDS_CSUM] {
                        let is_fit = self.gso_type == Some(gso_type)
                            && (48..=1400).contains(&gso_size)
                            && flags == NEEDS_CSUM;
                        let header = Header {
                            flags,
                            gso_type,
                            hdr_len,
                            gso_size,
                            ..self.header
                        };
                        // Without any segments it is the frame's own.
                        if !is_fit && header != self.header {
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
    fn every_place_of_a_checksum_but_its_own_is_tried() {
        for to in ["198.51.100.21:5000", "[2001:db8:100::21]:5000"] {
            let to: SocketAddr = to.parse().unwrap();
            let fit = [
                left(to, "word", 0).unwrap(),
                left(to, "word", LARGE).unwrap(),
            ]
            .concat();
            let mut tried = 0_usize;
            each_unfit(to, "word", |header, frame| {
                assert!(
                    !fit.iter()
                        .any(|own| own.header == header && own.frame == frame)
                );
                tried += 1;
            })
            .unwrap();
            assert!(tried > 20_000, "{tried}");
        }
    }

    #[test]
    fn what_is_left_is_the_sum_of_all_but_the_pseudo_header() {
        for to in ["198.51.100.21:5000", "[2001:db8:100::21]:5000"] {
            for left in left(to.parse().unwrap(), "word", 3).unwrap() {
                let start = usize::from(left.header.csum_start);
                let at = start + usize::from(left.header.csum_offset);
                let sum = checksum(&[&left.frame[start..]]);
                let mut frame = left.frame.clone();
                frame[at..at + 2].copy_from_slice(&sum.to_be_bytes());
                let addresses = if start == 34 { 26..34 } else { 22..54 };
                let length = u32::try_from(frame.len() - start).unwrap().to_be_bytes();
                let protocol = if left.gso_type.is_some() { 6 } else { 17 };
                let pseudo = [&frame[addresses], &length, &[0, 0, 0, protocol]].concat();
                assert_eq!(checksum(&[&pseudo, &frame[start..]]), 0);
            }
        }
    }
}
