//! A host and an internet for the cases, in network namespaces that end with the process ([`testbed::world`]).
//!
//! ```text
//! this process, its server and VMs            namespace "outside"
//! lo: also 203.0.113.177, 192.168.77.1        lo: every address of the "internet", of private ranges, of
//! up0 192.0.2.2 ───────── veth ───────────    metadata services; out0 192.0.2.1
//! TAPs of sandboxes                           echo servers at the cases' ports, a name server at port 53
//! echo servers at the cases' ports
//! ```
//! The host is deliberately misconfigured: it forwards packets, checks no sender addresses, and has services at
//! every address. If a packet does not get out, only the isolation can have stopped it. [`Capture`] records all
//! packets that arrive outside or that the host's own stack accepts.

mod capture;
mod names;
mod peers;
mod sys;

use std::{
    collections::BTreeSet,
    io,
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket},
    os::fd::{AsRawFd, OwnedFd},
    time::Duration,
};

use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn, sendto, socket,
};

use super::l7::Origins;
pub(super) use capture::{Capture, Place, Seen};
use testbed::world::{self, Namespace, WorldError, failed};
pub(super) use testbed::world::{HOST4, UPLINK};

/// Ports of [`Origins`].
const ORIGINS: [u16; 2] = [80, 443];
/// The name server in the options of `cube-api`.
pub(super) const NAME_SERVER: &str = "198.51.100.53:53";
/// Time limit of a wait for a packet.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Address blocks of the outside.
const OUTSIDE4: [&str; 18] = [
    "9.255.255.0/24",
    "11.0.0.0/24",
    "100.63.255.0/24",
    "100.128.0.0/24",
    "172.15.255.0/24",
    "172.32.0.0/24",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "100.64.0.0/10",
    "169.254.0.0/16",
    "198.18.0.0/15",
    "192.0.0.0/24",
    "1.1.1.0/24",
    "8.8.8.0/24",
    "240.0.0.0/8",
];
const OUTSIDE6: [&str; 8] = [
    "2001:db8:100::/40",
    "2001:db8:ffff::/48",
    "fc00::/7",
    "64:ff9b::/96",
    "64:ff9b:1::/48",
    "2002::/16",
    "2001::/32",
    "2606:4700::/32",
];

/// The outside namespace with its peers, and the capture in both namespaces. This process is in the host's namespace.
#[derive(Debug)]
pub(super) struct World {
    outside: Namespace,
    pub(super) capture: Capture,
    /// Servers at the ports 80 and 443 of every address outside.
    pub(super) origins: Origins,
}

impl World {
    /// Moves this process into new network and mount namespaces, in which peers listen at `ports`. The process must not
    /// have another thread.
    pub(super) fn enter(ports: &BTreeSet<u16>) -> Result<Self, WorldError> {
        let outside = world::enter(OUTSIDE4.into_iter().chain(OUTSIDE6))?;
        misconfigure_host()?;
        let capture = Capture::start(|open| outside.within(open))
            .map_err(failed("capture packets on the uplink"))?;
        peers::serve(ports).map_err(failed("listen at the host"))?;
        let origins = outside
            .within(|| {
                // The origins listen at their ports.
                let ports = ports.iter().copied().filter(|port| !ORIGINS.contains(port));
                peers::serve(&ports.collect())?;
                names::serve()?;
                Origins::listen()
            })
            .map_err(failed("listen outside"))?;
        Ok(Self {
            outside,
            capture,
            origins,
        })
    }

    /// Opens a datagram socket at an address outside.
    pub(super) fn socket_at(&self, address: SocketAddr) -> io::Result<UdpSocket> {
        self.outside.within(|| {
            let socket = UdpSocket::bind(address)?;
            socket.set_read_timeout(Some(TIMEOUT))?;
            Ok(socket)
        })
    }

    /// Selects where checksums of packets that leave through the uplink are filled in.
    pub(super) fn set_finishing(&self, finishing: Finishing) -> io::Result<()> {
        sys::set_checksumming(UPLINK, finishing == Finishing::ByUplink)
    }

    /// Opens a socket outside that sends ICMP messages.
    pub(super) fn icmp_socket(&self) -> io::Result<IcmpSocket> {
        self.outside.within(|| {
            let (kind, flags) = (SockType::Raw, SockFlag::SOCK_CLOEXEC);
            let socket = socket(AddressFamily::Inet, kind, flags, SockProtocol::Icmp)?;
            Ok(IcmpSocket(socket))
        })
    }
}

/// Where a checksum that the guest left to its network device is filled in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finishing {
    /// The host's kernel, before the uplink.
    ByHost,
    /// The uplink, as a network card does. Behind a veth, packets arrive without the checksum.
    ByUplink,
}

/// A socket outside that sends ICMP messages.
#[derive(Debug)]
pub(super) struct IcmpSocket(OwnedFd);

impl IcmpSocket {
    /// Sends a message, which must include its checksum.
    pub(super) fn send(&self, message: &[u8], to: Ipv4Addr) -> io::Result<()> {
        let to = SockaddrIn::from(SocketAddrV4::new(to, 0));
        sendto(self.0.as_raw_fd(), message, &to, MsgFlags::empty())?;
        Ok(())
    }
}

/// Makes the host forward packets, accept any sender address, and have more addresses.
fn misconfigure_host() -> Result<(), WorldError> {
    let lines = "address add 203.0.113.177/32 dev lo\n\
                 address add 192.168.77.1/32 dev lo\n\
                 address add 2001:db8:1::77/128 dev lo nodad\n";
    let settings = [
        ("ipv4/conf/all/rp_filter", "0"),
        ("ipv4/conf/default/rp_filter", "0"),
        ("ipv4/ip_forward", "1"),
        ("ipv6/conf/all/forwarding", "1"),
    ];
    world::ip(lines)
        .and_then(|()| world::settings(&settings))
        .map_err(failed("configure the host's namespace"))
}
