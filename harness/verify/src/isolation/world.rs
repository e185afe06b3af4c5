//! A host and an internet of the prover's own, in network namespaces that go with it ([`testbed::world`]).
//!
//! ```text
//! this process, its server and VMs            namespace "outside"
//! lo: also 203.0.113.177, 192.168.77.1        lo: every address of the "internet", of private ranges, of
//! up0 192.0.2.2 ───────── veth ───────────    metadata services; out0 192.0.2.1
//! TAPs of sandboxes                           echoes at the cases' ports, a name server at port 53 of all
//! echoes at the cases' ports
//! ```
//! The host is a careless one: it forwards, checks no senders and has services at every address. What does not get
//! out was stopped by the isolation alone. [`Witness`] sees all that arrives outside and all that the host's own
//! stack takes for itself.

mod names;
mod peers;
mod sys;
mod witness;

use std::{
    collections::BTreeSet,
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket},
    os::fd::{AsRawFd, OwnedFd},
    time::Duration,
};

use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn, sendto, socket,
};

use testbed::world::{self, Namespace, OUTSIDE, WorldError, failed};
pub(super) use testbed::world::{HOST4, UPLINK};
pub(super) use witness::{Place, Seen, Witness};

/// The name server that the operator named.
pub(super) const NAME_SERVER: &str = "198.51.100.53:53";
/// Bound of a wait for a packet.
const PATIENCE: Duration = Duration::from_secs(20);
/// Answers to nobody; packets to it mark moments.
const MARK: &str = "192.0.2.1:9";

/// Everything that somebody may be at outside.
const THERE4: [&str; 18] = [
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
const THERE6: [&str; 8] = [
    "2001:db8:100::/40",
    "2001:db8:ffff::/48",
    "fc00::/7",
    "64:ff9b::/96",
    "64:ff9b:1::/48",
    "2002::/16",
    "2001::/32",
    "2606:4700::/32",
];

/// Both namespaces, with their peers. The host's is this process's from now on.
#[derive(Debug)]
pub(super) struct World {
    outside: Namespace,
    pub(super) witness: Witness,
}

impl World {
    /// Moves this process into a network and a mount namespace of its own. No thread may run yet.
    ///
    /// # Errors
    /// See [`WorldError`].
    pub(super) fn enter(ports: &BTreeSet<u16>) -> Result<Self, WorldError> {
        let outside = world::enter(THERE4.into_iter().chain(THERE6))?;
        be_careless()?;
        let witness =
            Witness::start(|open| outside.within(open)).map_err(failed("watch the uplink"))?;
        peers::serve(ports).map_err(failed("listen at the host"))?;
        outside
            .within(|| peers::serve(ports).and_then(|()| names::serve()))
            .map_err(failed("listen outside"))?;
        Ok(Self { outside, witness })
    }

    /// A datagram socket at an address outside.
    pub(super) fn socket_at(&self, address: SocketAddr) -> io::Result<UdpSocket> {
        self.outside.within(|| {
            let socket = UdpSocket::bind(address)?;
            socket.set_read_timeout(Some(PATIENCE))?;
            Ok(socket)
        })
    }

    /// Says who finishes packets that leave by the uplink.
    pub(super) fn set_finishing(&self, finishing: Finishing) -> io::Result<()> {
        sys::set_checksumming(UPLINK, finishing == Finishing::ByUplink)
    }

    /// A socket outside that sends ICMP.
    pub(super) fn icmp_socket(&self) -> io::Result<IcmpSocket> {
        self.outside.within(|| {
            let (kind, flags) = (SockType::Raw, SockFlag::SOCK_CLOEXEC);
            let socket = socket(AddressFamily::Inet, kind, flags, SockProtocol::Icmp)?;
            Ok(IcmpSocket(socket))
        })
    }
}

/// Who fills in checksums that a guest leaves to its card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finishing {
    /// The host's kernel, before the uplink.
    ByHost,
    /// The uplink, as a network card does: what arrives behind a veth is unfinished still.
    ByUplink,
}

/// See [`World::icmp_socket`].
#[derive(Debug)]
pub(super) struct IcmpSocket(OwnedFd);

impl IcmpSocket {
    /// Sends a whole message, its checksum included.
    pub(super) fn send(&self, message: &[u8], to: Ipv4Addr) -> io::Result<()> {
        let to = SockaddrIn::from(SocketAddrV4::new(to, 0));
        sendto(self.0.as_raw_fd(), message, &to, MsgFlags::empty())?;
        Ok(())
    }
}

/// Has the host forward, check no senders, and be at more addresses.
fn be_careless() -> Result<(), WorldError> {
    let lines = "address add 203.0.113.177/32 dev lo\n\
                 address add 192.168.77.1/32 dev lo\n\
                 address add 2001:db8:1::77/128 dev lo nodad\n";
    let careless = [
        ("ipv4/conf/all/rp_filter", "0"),
        ("ipv4/conf/default/rp_filter", "0"),
        ("ipv4/ip_forward", "1"),
        ("ipv6/conf/all/forwarding", "1"),
    ];
    world::ip(lines)
        .and_then(|()| world::settings(&careless))
        .map_err(failed("make the host a careless one"))
}

/// Whether it is the host's loopback: there the prover talks to its own server.
fn is_loopback(address: Option<IpAddr>) -> bool {
    address.is_some_and(|address| address.is_loopback())
}
