//! The environment of a test: a network namespace with an uplink, whose other end is the test, and an [`Isolation`].

use std::{
    cell::RefCell,
    fs,
    net::IpAddr,
    os::fd::{AsFd, OwnedFd},
    panic,
    path::PathBuf,
    process::Command,
    sync::{
        atomic::{AtomicU32, Ordering},
        mpsc::Receiver,
    },
    thread,
    time::{Duration, Instant},
};

use model::SandboxId;
use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sched::{CloneFlags, unshare},
};

use super::frame::{ICMP, Packet, UDP, UNREACHABLE, udp};
use crate::{
    Counters, ForbiddenAddresses, Isolation, IsolationConfig, NetEvent, Policy, Reason, TapIndex,
    Uplinks,
    datapath::proxy_group::ProxyGroup,
    taps::device::{self, Device},
};

/// Deadline for anything that a test waits for.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// Length of the frame header without TUNSETVNETHDRSZ, in bytes.
const VNET_HEADER: usize = 10;
/// Name of the uplink.
const WAN: &str = "wan";

pub(crate) const WAN4: &str = "203.0.113.2";
pub(crate) const WAN6: &str = "2001:db8::2";
/// Addresses on the internet.
pub(crate) const PEER4: &str = "198.51.100.7";
pub(crate) const PEER6: &str = "2001:db8:7::7";

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub(crate) struct World {
    pub(crate) isolation: Isolation,
    pub(crate) events: Receiver<NetEvent>,
    pub(crate) wan: Device,
    pub(crate) config: IsolationConfig,
}

/// A sandbox for which the test acts as the guest.
pub(crate) struct Guest {
    pub(crate) index: TapIndex,
    pub(crate) fd: OwnedFd,
    pub(crate) sandbox: SandboxId,
}

/// Runs a test in a new network namespace.
pub(crate) fn in_namespace(test: impl FnOnce() + Send + 'static) {
    if !nix::unistd::geteuid().is_root() || !std::path::Path::new("/dev/net/tun").exists() {
        eprintln!("skipped: needs root and /dev/net/tun");
        return;
    }
    let thread = thread::spawn(|| {
        let _clean = Clean;
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        command(&["link", "set", "lo", "up"]);
        test();
    });
    if let Err(payload) = thread.join() {
        panic::resume_unwind(payload);
    }
}

thread_local! {
    /// This test's instances.
    static INSTANCES: RefCell<Vec<IsolationConfig>> = const { RefCell::new(Vec::new()) };
}

/// Removes the pins and cgroups of a test, which would otherwise outlive it, as those of a killed server do.
struct Clean;

impl Drop for Clean {
    fn drop(&mut self) {
        for config in INSTANCES.take() {
            let _removed_by_its_owner = fs::remove_dir_all(config.pins.join(&config.instance));
            if let Ok(group) = ProxyGroup::find(&config) {
                group.close();
            }
        }
    }
}

/// Runs `ip` in this thread's namespace.
pub(crate) fn command(arguments: &[&str]) {
    let status = Command::new("ip").args(arguments).status().unwrap();
    assert!(status.success(), "ip {arguments:?}: {status}");
}

pub(crate) fn config() -> IsolationConfig {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let instance = format!("test{}x{number}", std::process::id());
    let pins = PathBuf::from("/sys/fs/bpf/cube-tests");
    let config = IsolationConfig {
        instance,
        pins,
        uplinks: Uplinks::DefaultRoutes,
        forbidden: ForbiddenAddresses::default(),
        stock: 0,
        max_taps: 16,
        max_flows: 256,
        bytes_per_s: None,
        proxy: false,
    };
    INSTANCES.with_borrow_mut(|all| all.push(config.clone()));
    config
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with(config())
    }

    pub(crate) fn with(config: IsolationConfig) -> Self {
        let wan = device::tap(WAN).unwrap();
        device::configure("ipv6", WAN, "addr_gen_mode", "1").unwrap();
        // Without ARP, frames to the wire have the uplink's own MAC address.
        command(&["link", "set", WAN, "arp", "off", "up"]);
        command(&["addr", "add", &format!("{WAN4}/24"), "dev", WAN]);
        command(&["addr", "add", &format!("{WAN6}/64"), "dev", WAN, "nodad"]);
        command(&["route", "add", "default", "via", "203.0.113.1"]);
        command(&["-6", "route", "add", "default", "via", "2001:db8::1"]);
        let (isolation, events) = Isolation::open(&config).unwrap();
        Self {
            isolation,
            events,
            wan,
            config,
        }
    }

    /// Starts a sandbox with a policy.
    pub(crate) fn guest(&self, policy: &Policy) -> Guest {
        let tap = self.isolation.take().unwrap();
        let number = u8::try_from(tap.index.0 % 256).unwrap();
        let sandbox = SandboxId::from_random([number; 19]);
        self.isolation.confine(tap.index, &sandbox, policy).unwrap();
        Guest {
            index: tap.index,
            fd: tap.fd,
            sandbox,
        }
    }

    pub(crate) fn counters(&self, guest: &Guest) -> Counters {
        self.isolation.counters(guest.index).unwrap()
    }

    /// The next packet on the wire.
    pub(crate) fn next_on_wire(&self) -> Packet {
        next(&self.wan.fd)
    }

    pub(crate) fn send_on_wire(&self, packet: &Packet) {
        write(&self.wan.fd, &packet.bytes());
    }

    /// Sends a packet from the guest and returns it as it appears on the wire. Skips packets of the host.
    pub(crate) fn pass(&self, guest: &Guest, packet: &Packet) -> Packet {
        guest.send(packet);
        loop {
            let next = self.next_on_wire();
            let same_kind = !matches!(packet.protocol, 1 | 58) || next.body[0] == packet.body[0];
            if (next.destination, next.protocol) == (packet.destination, packet.protocol)
                && same_kind
            {
                return next;
            }
        }
    }

    /// Checks that a frame is refused for this reason.
    pub(crate) fn refused(&self, guest: &Guest, frame: &[u8], reason: Reason) {
        let before = self.counters(guest);
        write(&guest.fd, frame);
        let after = self.counters(guest);
        let mut expected = before.refused.clone();
        *expected.entry(reason).or_default() += 1;
        assert_eq!(after.refused, expected, "{frame:02x?}");
        assert_eq!(after.packets_out, before.packets_out, "{frame:02x?}");
        self.nothing_on_wire();
    }

    /// Checks that no earlier packet is on the wire: the next packet there is one that this function sends. Skips the
    /// host's ICMP errors about datagrams to closed ports; `packets_out` shows that they are not a guest's.
    pub(crate) fn nothing_on_wire(&self) {
        let wan = ip(WAN4);
        let mark = Packet {
            source: wan,
            ..Packet::from_guest(ip(PEER4), UDP, udp(9, 9, b"mark"))
        };
        let socket = std::net::UdpSocket::bind((wan, 0)).unwrap();
        socket.send_to(b"mark", (ip(PEER4), 9)).unwrap();
        let mut next = self.next_on_wire();
        while (next.protocol, next.body[0]) == (ICMP, UNREACHABLE) {
            next = self.next_on_wire();
        }
        assert_eq!(next.destination, mark.destination);
        assert_eq!(next.body[8..], mark.body[8..], "{next:?}");
    }

    /// Waits for the next event.
    pub(crate) fn event(&self) -> NetEvent {
        self.events.recv_timeout(PATIENCE).unwrap()
    }
}

impl Guest {
    pub(crate) fn send(&self, packet: &Packet) {
        write(&self.fd, &packet.bytes());
    }

    pub(crate) fn next(&self) -> Packet {
        next(&self.fd)
    }

    /// The next frame of any type.
    pub(crate) fn next_frame(&self) -> Vec<u8> {
        read(&self.fd).unwrap().1
    }

    /// Whether no frame has arrived at the guest.
    pub(crate) fn has_nothing(&self) -> bool {
        let flags = OFlag::O_RDWR | OFlag::O_NONBLOCK;
        fcntl(&self.fd, FcntlArg::F_SETFL(flags)).unwrap();
        let mut buffer = [0; 2048];
        nix::unistd::read(&self.fd, &mut buffer).is_err()
    }
}

/// Writes a frame without offload requests.
pub(crate) fn write(fd: &OwnedFd, frame: &[u8]) {
    write_with(fd, &[0; VNET_HEADER], frame);
}

pub(crate) fn write_with(fd: &OwnedFd, header: &[u8; VNET_HEADER], frame: &[u8]) {
    let bytes = [header, frame].concat();
    assert_eq!(nix::unistd::write(fd, &bytes).unwrap(), bytes.len());
}

/// Whether the kernel accepts a frame with this header.
pub(crate) fn try_write(fd: &OwnedFd, header: &[u8], frame: &[u8]) -> bool {
    let bytes = [header, frame].concat();
    nix::unistd::write(fd, &bytes).is_ok()
}

fn next(fd: &OwnedFd) -> Packet {
    let (header, frame) = read(fd).expect("a packet");
    // VIRTIO_NET_HDR_F_NEEDS_CSUM
    match header[0] & 1 {
        0 => Packet::read(&frame).unwrap(),
        _ => Packet::read_headers(&frame).unwrap(),
    }
}

/// The next header and frame. `None` if no frame arrives in time.
pub(crate) fn read(fd: &OwnedFd) -> Option<(Vec<u8>, Vec<u8>)> {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        let mut waiting = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
        if poll(&mut waiting, PollTimeout::from(100_u8)).unwrap() == 0 {
            continue;
        }
        let mut buffer = vec![0; 70_000];
        let len = nix::unistd::read(fd, &mut buffer).unwrap();
        buffer.truncate(len);
        let frame = buffer.split_off(VNET_HEADER);
        return Some((buffer, frame));
    }
    None
}

/// Waits until a condition holds.
pub(crate) fn eventually(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "timed out waiting until {what}");
        thread::sleep(Duration::from_millis(20));
    }
}
