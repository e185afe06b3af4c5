//! A host and an internet of the prover's own, in network namespaces that go with it.
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
mod witness;

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket},
    os::fd::{AsRawFd, OwnedFd},
    process::Command,
    thread,
    time::Duration,
};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, setns, unshare},
    sys::socket::{
        AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn, sendto, socket,
    },
    unistd::gettid,
};

pub(super) use witness::{Place, Seen, Witness};

/// Name of the uplink.
pub(super) const UPLINK: &str = "up0";
/// Its other end.
const OUTSIDE: &str = "out0";
/// Address of the uplink.
pub(super) const HOST4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
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

/// Why there is no world.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot {what}; this needs root, namespaces, a bpffs and the program ip (package iproute2)"
)]
pub struct WorldError {
    what: String,
    #[source]
    source: io::Error,
}

fn failed(what: impl Into<String>) -> impl FnOnce(io::Error) -> WorldError {
    let what = what.into();
    move |source| WorldError { what, source }
}

/// Both namespaces, with their peers. The host's is this process's from now on.
#[derive(Debug)]
pub(super) struct World {
    outside: File,
    pub(super) witness: Witness,
}

impl World {
    /// Moves this process into a network and a mount namespace of its own. No thread may run yet.
    ///
    /// # Errors
    /// See [`WorldError`].
    pub(super) fn enter(ports: &BTreeSet<u16>) -> Result<Self, WorldError> {
        unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS)
            .map_err(io::Error::from)
            .map_err(failed("leave the host's network"))?;
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
            .map_err(io::Error::from)
            .map_err(failed("keep mounts to itself"))?;
        // What is pinned there goes with the last process in here.
        mount(
            Some("bpf"),
            "/sys/fs/bpf",
            Some("bpf"),
            MsFlags::empty(),
            none,
        )
        .map_err(io::Error::from)
        .map_err(failed("mount a bpffs at /sys/fs/bpf"))?;
        let outside = thread::scope(|scope| scope.spawn(new_namespace).join())
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            .map_err(failed("make a network namespace"))?;
        build_outside(&outside)?;
        build_host()?;
        let witness =
            Witness::start(|open| within(&outside, open)).map_err(failed("watch the uplink"))?;
        peers::serve(ports).map_err(failed("listen at the host"))?;
        within(&outside, || {
            peers::serve(ports).and_then(|()| names::serve())
        })
        .map_err(failed("listen outside"))?;
        Ok(Self { outside, witness })
    }

    /// A datagram socket at an address outside.
    pub(super) fn socket_at(&self, address: SocketAddr) -> io::Result<UdpSocket> {
        within(&self.outside, || {
            let socket = UdpSocket::bind(address)?;
            socket.set_read_timeout(Some(PATIENCE))?;
            Ok(socket)
        })
    }

    /// A socket outside that sends ICMP.
    pub(super) fn icmp_socket(&self) -> io::Result<IcmpSocket> {
        within(&self.outside, || {
            let (kind, flags) = (SockType::Raw, SockFlag::SOCK_CLOEXEC);
            let socket = socket(AddressFamily::Inet, kind, flags, SockProtocol::Icmp)?;
            Ok(IcmpSocket(socket))
        })
    }
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

/// Runs `work` on a thread in that namespace.
fn within<T: Send>(namespace: &File, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    let work = || {
        setns(namespace, CloneFlags::CLONE_NEWNET)?;
        work()
    };
    thread::scope(|scope| scope.spawn(work).join())
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// A new namespace; nobody is in it, but it lives while the file is open.
fn new_namespace() -> io::Result<File> {
    unshare(CloneFlags::CLONE_NEWNET)?;
    File::open("/proc/thread-self/ns/net")
}

fn build_outside(outside: &File) -> Result<(), WorldError> {
    let host = gettid();
    let mut lines = format!(
        "link set lo up\n\
         link add {OUTSIDE} type veth peer name {UPLINK} netns {host}\n\
         address add 192.0.2.1/29 dev {OUTSIDE}\n\
         address add 2001:db8:1::1/64 dev {OUTSIDE} nodad\n\
         link set {OUTSIDE} up\n"
    );
    for block in THERE4.iter().chain(&THERE6) {
        lines += &format!("route add local {block} dev lo\n");
    }
    within(outside, || {
        ip(&lines)?;
        settings(&[
            ("ipv4/conf/all/rp_filter", "0"),
            ("ipv4/conf/default/rp_filter", "0"),
            // Echoes answer from addresses that are theirs by a route alone.
            ("ipv6/ip_nonlocal_bind", "1"),
        ])
    })
    .map_err(failed("set up the namespace outside"))
}

fn build_host() -> Result<(), WorldError> {
    let lines = format!(
        "link set lo up\n\
         address add 203.0.113.177/32 dev lo\n\
         address add 192.168.77.1/32 dev lo\n\
         address add 2001:db8:1::77/128 dev lo nodad\n\
         address add {HOST4}/29 dev {UPLINK}\n\
         address add 2001:db8:1::2/64 dev {UPLINK} nodad\n\
         link set {UPLINK} up\n\
         route add default via 192.0.2.1\n\
         route add default via 2001:db8:1::1\n"
    );
    let careless = [
        ("ipv4/conf/all/rp_filter", "0"),
        ("ipv4/conf/default/rp_filter", "0"),
        ("ipv4/ip_forward", "1"),
        ("ipv6/conf/all/forwarding", "1"),
    ];
    ip(&lines)
        .and_then(|()| settings(&careless))
        .map_err(failed("set up the namespace of the host"))
}

fn settings(values: &[(&str, &str)]) -> io::Result<()> {
    values
        .iter()
        .try_for_each(|(name, value)| fs::write(format!("/proc/sys/net/{name}"), value))
}

/// Carries out lines of `ip`, in the namespace of this thread.
fn ip(lines: &str) -> io::Result<()> {
    for line in lines.lines() {
        let done = Command::new("ip").args(line.split_whitespace()).output()?;
        if !done.status.success() {
            let said = String::from_utf8_lossy(&done.stderr);
            return Err(io::Error::other(format!("ip {line}: {}", said.trim())));
        }
    }
    Ok(())
}

/// Whether it is the host's loopback: there the prover talks to its own server.
fn is_loopback(address: Option<IpAddr>) -> bool {
    address.is_some_and(|address| address.is_loopback())
}
