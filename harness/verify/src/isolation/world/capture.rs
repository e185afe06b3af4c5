//! Captures every packet at the far end of the uplink, and every packet that the host's own network stack accepts.

use std::{
    io,
    net::{IpAddr, UdpSocket},
    os::fd::{AsRawFd, OwnedFd},
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::{Duration, Instant},
};

use netprobe::link::{Layer, Link};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockProtocol, SockType, SockaddrStorage, recvfrom, socket,
};

use testbed::world::OUTSIDE;

/// An address and port without a server. [`Capture::settle`] sends its marks there.
const MARK: &str = "192.0.2.1:9";
/// Bytes of a packet that are kept, from the header above IP.
const KEPT: usize = 256;
/// Time limit for a mark to arrive. It usually arrives within microseconds.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Time before a mark is sent, in which packets that are being forwarded arrive.
const SETTLE: Duration = Duration::from_millis(50);

/// Where a packet arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::isolation) enum Place {
    /// At the other end of the uplink.
    Outside,
    /// At the host itself.
    Host,
}

/// A captured packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::isolation) struct Seen {
    pub(in crate::isolation) place: Place,
    /// Sender. `None` if the kernel does not report it.
    pub(in crate::isolation) from: Option<IpAddr>,
    pub(in crate::isolation) from_port: Option<u16>,
    /// Receiver. `None` if the kernel does not report it.
    pub(in crate::isolation) to: Option<IpAddr>,
    pub(in crate::isolation) port: Option<u16>,
    /// Number of the protocol above IP, for example 6 for TCP.
    pub(in crate::isolation) protocol: u8,
    /// Begins with the header above IP.
    pub(in crate::isolation) payload: Vec<u8>,
}

impl Seen {
    /// Whether the payload contains these bytes.
    pub(in crate::isolation) fn has(&self, bytes: &[u8]) -> bool {
        self.payload
            .windows(bytes.len().max(1))
            .any(|part| part == bytes)
    }

    /// Decodes a packet that begins with its IP header.
    fn read(place: Place, packet: &[u8]) -> Option<Self> {
        let version = packet.first()? >> 4;
        let (header, protocol, from, to) = match version {
            4 => {
                let address = |at: usize| {
                    Some(IpAddr::from(
                        <[u8; 4]>::try_from(packet.get(at..at + 4)?).ok()?,
                    ))
                };
                let length = usize::from(packet[0] & 0xf) * 4;
                (length, *packet.get(9)?, address(12)?, address(16)?)
            }
            6 => {
                let address = |at: usize| {
                    Some(IpAddr::from(
                        <[u8; 16]>::try_from(packet.get(at..at + 16)?).ok()?,
                    ))
                };
                (40, *packet.get(6)?, address(8)?, address(24)?)
            }
            _ => return None,
        };
        let payload = packet.get(header..).unwrap_or_default();
        let mut seen = Self::bare(place, protocol, payload);
        (seen.from, seen.to) = (Some(from), Some(to));
        Some(seen)
    }

    fn bare(place: Place, protocol: u8, payload: &[u8]) -> Self {
        let port = |at: usize| {
            let bytes = payload.get(at..at + 2)?;
            matches!(protocol, 6 | 17 | 132).then(|| u16::from_be_bytes([bytes[0], bytes[1]]))
        };
        Self {
            place,
            from: None,
            from_port: port(0),
            to: None,
            port: port(2),
            protocol,
            payload: payload[..payload.len().min(KEPT)].to_vec(),
        }
    }
}

/// The packets since the last [`Capture::forget`].
#[derive(Debug)]
pub(in crate::isolation) struct Capture {
    arrivals: Receiver<Seen>,
    seen: Vec<Seen>,
    marks: u64,
}

impl Capture {
    /// Starts to capture. `outside` runs a function in the outside namespace.
    pub(super) fn start(
        outside: impl FnOnce(fn() -> io::Result<Link>) -> io::Result<Link>,
    ) -> io::Result<Self> {
        let (sender, arrivals) = channel();
        let uplink = outside(|| Link::open(OUTSIDE, Layer::Ip))?;
        let to = sender.clone();
        thread::spawn(move || watch_uplink(&uplink, &to));
        for (socket, kind) in host_sockets()? {
            let to = sender.clone();
            thread::spawn(move || watch_host(&socket, kind, &to));
        }
        Ok(Self {
            arrivals,
            seen: Vec::new(),
            marks: 0,
        })
    }

    /// Waits until a mark, sent after a short pause, has arrived, and with it everything sent before. Returns the
    /// number of captured packets.
    pub(in crate::isolation) fn settle(&mut self) -> io::Result<usize> {
        thread::sleep(SETTLE);
        self.marks += 1;
        let mark = format!("mark {} of {}", self.marks, std::process::id());
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        let deadline = Instant::now() + TIMEOUT;
        loop {
            socket.send_to(mark.as_bytes(), MARK)?;
            let again = Instant::now() + Duration::from_secs(1);
            if self.take_until(|seen| seen.has(mark.as_bytes()), again) {
                return Ok(self.seen.len());
            }
            if Instant::now() > deadline {
                return Err(io::Error::other(
                    "a packet sent to the suite's own uplink did not arrive",
                ));
            }
        }
    }

    /// Waits until `wanted` accepts `count` packets. Returns false if the deadline passes first.
    pub(in crate::isolation) fn await_seen(
        &mut self,
        count: usize,
        deadline: Instant,
        wanted: impl Fn(&Seen) -> bool,
    ) -> bool {
        let mut left = count.saturating_sub(self.seen.iter().filter(|seen| wanted(seen)).count());
        while left > 0 {
            if !self.take_until(&wanted, deadline) {
                return false;
            }
            left -= 1;
        }
        true
    }

    /// The packets since the last [`Capture::forget`], oldest first.
    pub(in crate::isolation) fn seen(&self) -> &[Seen] {
        &self.seen
    }

    /// Drops all captured packets.
    pub(in crate::isolation) fn forget(&mut self) {
        while self.arrivals.try_recv().is_ok() {}
        self.seen.clear();
    }

    fn take_until(&mut self, wanted: impl Fn(&Seen) -> bool, deadline: Instant) -> bool {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok(seen) = self.arrivals.recv_timeout(left) else {
                return false;
            };
            let is_wanted = wanted(&seen);
            self.seen.push(seen);
            if is_wanted {
                return true;
            }
        }
    }
}

fn watch_uplink(link: &Link, to: &Sender<Seen>) {
    loop {
        let a_while = Instant::now() + Duration::from_secs(60);
        let packet = match link.receive(a_while) {
            Ok(Some(packet)) => packet,
            Ok(None) => continue,
            Err(_) => return,
        };
        if let Some(seen) = Seen::read(Place::Outside, &packet)
            && to.send(seen).is_err()
        {
            return;
        }
    }
}

/// Kind of a raw socket. Such a socket gets a copy of each packet that the host's stack accepts.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Packets begin with their IP header.
    V4,
    /// Packets of this protocol, without their IP header.
    V6(u8),
}

fn host_sockets() -> io::Result<Vec<(OwnedFd, Kind)>> {
    let (v4, v6) = (AddressFamily::Inet, AddressFamily::Inet6);
    let mut sockets = Vec::new();
    for (family, protocol, kind) in [
        (v4, SockProtocol::Tcp, Kind::V4),
        (v4, SockProtocol::Udp, Kind::V4),
        (v4, SockProtocol::Icmp, Kind::V4),
        (v6, SockProtocol::Tcp, Kind::V6(6)),
        (v6, SockProtocol::Udp, Kind::V6(17)),
        (v6, SockProtocol::IcmpV6, Kind::V6(58)),
    ] {
        sockets.push((
            socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?,
            kind,
        ));
    }
    Ok(sockets)
}

fn watch_host(socket: &OwnedFd, kind: Kind, to: &Sender<Seen>) {
    let mut buffer = vec![0; 2048];
    loop {
        let (length, from) = match recvfrom::<SockaddrStorage>(socket.as_raw_fd(), &mut buffer) {
            Ok((length, from)) => (length.min(buffer.len()), from),
            Err(nix::errno::Errno::EINTR) => continue,
            Err(_) => return,
        };
        let seen = match kind {
            Kind::V4 => Seen::read(Place::Host, &buffer[..length]),
            Kind::V6(protocol) => {
                let mut seen = Seen::bare(Place::Host, protocol, &buffer[..length]);
                let from = from.and_then(|from| from.as_sockaddr_in6().map(|from| from.ip()));
                seen.from = from.map(IpAddr::from);
                Some(seen)
            }
        };
        // Traffic between the suite and its server.
        let is_own =
            |seen: &Seen| is_loopback(seen.from) && seen.to.is_none_or(|to| to.is_loopback());
        let Some(seen) = seen.filter(|seen| !is_own(seen)) else {
            continue;
        };
        if to.send(seen).is_err() {
            return;
        }
    }
}

/// Whether an address is on the host's loopback interface, over which the suite talks to its server.
fn is_loopback(address: Option<IpAddr>) -> bool {
    address.is_some_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_decode_and_truncated_or_malformed_ones_do_not_panic() {
        let frame = netprobe::Frame {
            to: "10.1.2.3".parse().ok(),
            port: 5000,
            ..netprobe::Frame::default()
        };
        let packet = netprobe::frame::build(&frame, b"word").unwrap();
        let seen = Seen::read(Place::Outside, &packet[14..]).unwrap();
        assert_eq!((seen.to, seen.port), (frame.to, Some(5000)));
        assert!(seen.has(b"word") && !seen.has(b"world"));
        for length in 0..packet.len() - 14 {
            let _ = Seen::read(Place::Host, &packet[14..14 + length]);
        }
        assert_eq!(Seen::read(Place::Host, &[0; 40]), None);
    }
}
