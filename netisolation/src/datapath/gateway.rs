//! The resolver's device, its sockets, and the proxy's listener.
//!
//! The programs redirect DNS queries and handed flows to one address on a device that nothing else uses; the source
//! address identifies the TAP that sent them. The device is itself a TAP, but its descriptor is never read: the program
//! on its egress redirects every answer to the guest. The device is persistent and is removed when the last server of
//! the instance ends, so that a killed server's successor has the same device, and with it the same programs.

use std::{
    io,
    net::{
        IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, TcpListener, UdpSocket,
    },
    os::fd::{AsFd, AsRawFd, OwnedFd},
    thread,
    time::{Duration, Instant},
};

use nix::{
    libc,
    sys::socket::{
        AddressFamily, Backlog, SockFlag, SockType, SockaddrIn, SockaddrIn6, SockaddrLike, bind,
        getsockopt, listen, setsockopt, socket, sockopt,
    },
};

use crate::{
    config::MAX_TAPS,
    datapath::layout::{Address, WireKey, wire_port},
    error::{IsolationError, system, unsuitable},
    taps::device::{self, Device},
};

/// Maximum number of servers in one network namespace. The server in the first slot has most of the ports.
const SLOTS: u32 = 8;
/// The beginning of the devices' names; the number of the slot follows.
const NAME: &str = "cubedns";
/// The sockets' port if it is free. Neither flows nor the host's ephemeral ports reach it. It is always the same one,
/// because it is a setting of the programs.
const PORT: u16 = 65535;
/// The port of the proxy's listener, under the same conditions.
const PROXY_PORT: u16 = 65534;
/// How long to wait for [`PROXY_PORT`]: a killed server's proxy closes its listener when it notices that the server has
/// ended.
const PROXY_PORT_TIMEOUT: Duration = Duration::from_secs(2);
const PROXY_PORT_PAUSE: Duration = Duration::from_millis(5);
/// Connections that wait for the proxy, at most. The kernel lowers the number to `net.core.somaxconn`.
const PROXY_BACKLOG: i32 = 4096;
/// The lowest port that flows use on the wire. `bpf/layout.h` has the same number.
const FIRST_PORT: u16 = 61000;
const PORTS_OF_FIRST: u16 = 3000;
const PORTS_OF_OTHERS: u16 = 219;
/// Prefix length of a server's block: 198.18.0.0/18, 198.18.64.0/18 and so on, which together are 198.18.0.0/15.
const PREFIX4: u32 = 18;
const PREFIX6: u32 = 96;
/// Size of the buffer in which datagrams wait while no process reads them, in bytes: several thousand queries.
const QUEUE: usize = 4 << 20;

/// The sockets that receive the DNS queries of all sandboxes and the flows that are handed to the proxy. A server can
/// pass them to its successor; queries and connections that arrive meanwhile wait in them.
#[derive(Debug)]
pub struct ResolverSockets {
    pub udp: UdpSocket,
    pub tcp: TcpListener,
    /// The proxy's listener. `None` without [`crate::IsolationConfig::proxy`].
    pub proxy: Option<TcpListener>,
}

impl ResolverSockets {
    /// Duplicates the sockets. The duplicates share queues and modes with the originals.
    ///
    /// # Errors
    /// Returns an error if a descriptor cannot be duplicated.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            udp: self.udp.try_clone()?,
            tcp: self.tcp.try_clone()?,
            proxy: self
                .proxy
                .as_ref()
                .map(TcpListener::try_clone)
                .transpose()?,
        })
    }

    /// The port of the resolver's sockets, if they are bound to this device and of the family that a new pair would
    /// have.
    fn port_on(&self, device: &str, v6: bool) -> Option<u16> {
        let (udp, tcp) = (self.udp.local_addr().ok()?, self.tcp.local_addr().ok()?);
        let fits = is_on(&self.udp, device)
            && is_on(&self.tcp, device)
            && udp.port() == tcp.port()
            && (udp.is_ipv6(), tcp.is_ipv6()) == (v6, v6);
        fits.then_some(udp.port())
    }
}

/// Whether a socket is bound to a device. The kernel looks the name up, so that of a device that was replaced is not
/// found.
fn is_on(socket: &impl AsFd, device: &str) -> bool {
    let name = getsockopt(&socket.as_fd(), sockopt::BindToDevice).unwrap_or_default();
    name.as_encoded_bytes().split(|byte| *byte == 0).next() == Some(device.as_bytes())
}

#[derive(Debug)]
pub(crate) struct Gateway {
    pub(crate) device: Device,
    pub(crate) mac: [u8; 6],
    pub(crate) address4: Ipv4Addr,
    /// `None` on a host without IPv6.
    address6: Option<Ipv6Addr>,
    /// The port of the resolver's sockets.
    port: u16,
    /// The port of the proxy's listener. 0: there is none.
    proxy_port: u16,
    /// The ports of this server's flows.
    pub(crate) first_port: u16,
    pub(crate) ports: u16,
    sockets: ResolverSockets,
}

impl Gateway {
    /// Takes over a predecessor's device, or creates one in the first free slot of this namespace. `former`: indices of
    /// the devices that predecessors of this instance had. `passed`: sockets of the predecessor, which are used if they
    /// belong to the device. `has_proxy`: opens the proxy's listener, too.
    pub(crate) fn open(
        former: &[u32],
        mut passed: Option<ResolverSockets>,
        has_proxy: bool,
    ) -> Result<Self, IsolationError> {
        check_ports()?;
        for (device, slot) in former.iter().filter_map(|ifindex| reopen(*ifindex)) {
            if let Ok(gateway) = Self::set_up(device, slot, &mut passed, has_proxy) {
                return Ok(gateway);
            }
        }
        for slot in 0..SLOTS {
            match create(&format!("{NAME}{slot}")) {
                Ok(device) => return Self::set_up(device, slot, &mut passed, has_proxy),
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {}
                Err(e) => return Err(system("create the resolver's device", e)),
            }
        }
        Err(unsuitable(
            format!("{SLOTS} servers already run in this network namespace"),
            "stop one of them, or run this one in another namespace",
        ))
    }

    fn set_up(
        device: Device,
        slot: u32,
        passed: &mut Option<ResolverSockets>,
        has_proxy: bool,
    ) -> Result<Self, IsolationError> {
        let name = device.name.clone();
        let address4 = address_of(slot);
        let v6 = Ipv6Addr::from_bits(
            Ipv6Addr::new(0xfdcb, 0, 0, 0x53, 0, 0, 0, 1).to_bits() + (u128::from(slot) << 32),
        );
        let address6 = device::has_ipv6().then_some(v6);
        configure(&device, address4, address6).map_err(|e| system(format!("set up {name}"), e))?;
        let mac = device::hardware_address(&name).map_err(|e| system(format!("read {name}"), e))?;
        let former = passed.as_mut().and_then(|passed| passed.proxy.take());
        let (mut sockets, port) = sockets(&name, address6.is_some(), passed)
            .map_err(|e| system(format!("bind the resolver's sockets to {name}"), e))?;
        let mut proxy_port = 0;
        if has_proxy {
            let (listener, port) = proxy_listener(&device, address6.is_some(), former)
                .map_err(|e| system(format!("bind the proxy's listener to {name}"), e))?;
            (sockets.proxy, proxy_port) = (Some(listener), port);
        }
        let later = u16::try_from(slot).unwrap_or(0).saturating_sub(1);
        let (first_port, ports) = match slot {
            0 => (FIRST_PORT, PORTS_OF_FIRST),
            _ => (
                FIRST_PORT + PORTS_OF_FIRST + later * PORTS_OF_OTHERS,
                PORTS_OF_OTHERS,
            ),
        };
        Ok(Self {
            device,
            mac,
            address4,
            address6,
            port,
            proxy_port,
            first_port,
            ports,
            sockets,
        })
    }

    /// Sets whether the device outlives this process.
    ///
    /// # Errors
    /// Returns an error if the system call fails.
    pub(crate) fn set_persistent(&self, is_persistent: bool) -> Result<(), IsolationError> {
        device::set_persistent(self.device.fd.as_fd(), is_persistent)
            .map_err(|e| system(format!("make {} persistent", self.device.name), e))
    }

    /// Duplicates the sockets; they share their queues with the originals.
    pub(crate) fn sockets(&self) -> io::Result<ResolverSockets> {
        self.sockets.try_clone()
    }

    /// Duplicates the proxy's listener.
    pub(crate) fn proxy_listener(&self) -> io::Result<TcpListener> {
        match &self.sockets.proxy {
            Some(listener) => listener.try_clone(),
            None => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// The key in `wires` of a flow that the proxy's listener accepted from `peer`.
    pub(crate) fn wire_of(&self, peer: SocketAddr) -> Option<WireKey> {
        let (local, remote) = match peer.ip().to_canonical() {
            IpAddr::V4(v4) => (v4.into(), self.address4.into()),
            IpAddr::V6(v6) => (v6.into(), self.address6?.into()),
        };
        Some(WireKey {
            local,
            remote,
            port: wire_port(peer.port()),
            remote_port: self.program_proxy_port(),
            protocol: 6,
            zero: [0; 3],
        })
    }

    /// The number of the TAP that a peer address identifies. The TAP may not exist.
    pub(crate) fn tap_of(&self, peer: SocketAddr) -> Option<u32> {
        let index = match peer.ip().to_canonical() {
            IpAddr::V4(v4) => v4.to_bits().checked_sub(self.address4.to_bits())?,
            IpAddr::V6(v6) => {
                let distance = v6.to_bits().checked_sub(self.address6?.to_bits())?;
                u32::try_from(distance).ok()?
            }
        };
        (1..=MAX_TAPS).contains(&index).then_some(index)
    }

    /// The programs' `settings.resolver6`: zero without IPv6.
    pub(crate) fn program_address6(&self) -> Address {
        self.address6.map(Address::from).unwrap_or_default()
    }

    /// The programs' `settings.resolver_port`.
    pub(crate) fn program_port(&self) -> u16 {
        wire_port(self.port)
    }

    /// The programs' `settings.proxy_port`: zero without a proxy.
    pub(crate) fn program_proxy_port(&self) -> u16 {
        wire_port(self.proxy_port)
    }
}

/// The address of the resolver of the server in this slot: the first of its block.
fn address_of(slot: u32) -> Ipv4Addr {
    let first = Ipv4Addr::new(198, 18, 0, 1).to_bits();
    Ipv4Addr::from_bits(first + (slot << (32 - PREFIX4)))
}

/// Opens the device with this index, if a predecessor left it. Returns it with its slot.
fn reopen(ifindex: u32) -> Option<(Device, u32)> {
    let name = device::name(ifindex).ok()?;
    let slot = name.strip_prefix(NAME)?.parse().ok()?;
    let device = device::reopen_tap(&name, ifindex).ok().flatten()?;
    (slot < SLOTS).then_some((device, slot))
}

/// Creates a device. A device of this name that no process has open is of another instance's killed server, and is
/// replaced, because it has that server's program.
fn create(name: &str) -> io::Result<Device> {
    let exists = device::index(name).is_ok();
    let device = device::tap(name)?;
    if !exists {
        return Ok(device);
    }
    device::set_persistent(device.fd.as_fd(), false)?;
    drop(device);
    device::tap(name)
}

/// Checks that the ports of sandboxes' flows are not in the host's ephemeral range.
fn check_ports() -> Result<(), IsolationError> {
    let (first, last) = device::local_ports().map_err(|e| system("read ip_local_port_range", e))?;
    if last < FIRST_PORT {
        return Ok(());
    }
    Err(unsuitable(
        format!(
            "the host's ephemeral ports ({first} to {last}) overlap the sandboxes' ports (from {FIRST_PORT} on)"
        ),
        format!(
            "sysctl net.ipv4.ip_local_port_range=\"32768 {}\"",
            FIRST_PORT - 1
        ),
    ))
}

fn configure(device: &Device, v4: Ipv4Addr, v6: Option<Ipv6Addr>) -> io::Result<()> {
    let name = &device.name;
    if v6.is_some() {
        device::configure("ipv6", name, "addr_gen_mode", "1")?;
        device::configure("ipv6", name, "disable_ipv6", "0")?;
    }
    // With IFF_NOARP the kernel sends answers immediately, to the device's own MAC address.
    device::set_up(name, libc::IFF_NOARP)?;
    device::set_address4(name, v4, Ipv4Addr::from_bits(u32::MAX << (32 - PREFIX4)))?;
    match v6.map(|v6| device::set_address6(device.index, v6, PREFIX6)) {
        // A device that was taken over has the address.
        Some(Err(e)) if e.kind() != io::ErrorKind::AlreadyExists => Err(e),
        _ => Ok(()),
    }
}

/// The passed sockets if they belong to the device; otherwise, binds UDP and TCP to one port on all addresses of the
/// device. Returns the sockets and the port.
fn sockets(
    device: &str,
    v6: bool,
    passed: &mut Option<ResolverSockets>,
) -> io::Result<(ResolverSockets, u16)> {
    let port = passed
        .as_ref()
        .and_then(|passed| passed.port_on(device, v6));
    if let Some(port) = port
        && let Some(passed) = passed.take()
    {
        return Ok((passed, port));
    }
    let tcp = bound(device, SockType::Stream, v6, PORT)
        .or_else(|_| bound(device, SockType::Stream, v6, 0))?;
    let tcp = listening(tcp, 512)?;
    let port = tcp.local_addr()?.port();
    let udp = bound(device, SockType::Datagram, v6, port)?;
    // Without the capability, the kernel's default remains.
    let _default = setsockopt(&udp, sockopt::RcvBufForce, &QUEUE);
    let sockets = ResolverSockets {
        udp: udp.into(),
        tcp,
        proxy: None,
    };
    Ok((sockets, port))
}

/// The previous listener if it belongs to the device; otherwise, a new one. Returns the listener and its port.
///
/// The proxy can disconnect an accepted socket and connect it again, and no program judges that connection, because this
/// process made the socket. Packets to other hosts leave through the device, whose program drops them. Packets to an
/// address of the device itself reach services of this host, whose answers do not arrive at the device.
fn proxy_listener(
    device: &Device,
    v6: bool,
    former: Option<TcpListener>,
) -> io::Result<(TcpListener, u16)> {
    let fits = |former: &TcpListener| {
        let address = former.local_addr();
        is_on(former, &device.name) && address.is_ok_and(|address| address.is_ipv6() == v6)
    };
    let listener = match former.filter(fits) {
        Some(former) => former,
        None => listening(proxy_socket(&device.name, v6)?, PROXY_BACKLOG)?,
    };
    device::receive_only_from(listener.as_fd(), device.index)?;
    let port = listener.local_addr()?.port();
    Ok((listener, port))
}

fn proxy_socket(device: &str, v6: bool) -> io::Result<OwnedFd> {
    let deadline = Instant::now() + PROXY_PORT_TIMEOUT;
    loop {
        match bound(device, SockType::Stream, v6, PROXY_PORT) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                thread::sleep(PROXY_PORT_PAUSE);
            }
            Err(_) => return bound(device, SockType::Stream, v6, 0),
            Ok(socket) => return Ok(socket),
        }
    }
}

fn listening(socket: OwnedFd, backlog: i32) -> io::Result<TcpListener> {
    listen(&socket, Backlog::new(backlog)?)?;
    Ok(socket.into())
}

fn bound(device: &str, kind: SockType, v6: bool, port: u16) -> io::Result<OwnedFd> {
    let family = if v6 {
        AddressFamily::Inet6
    } else {
        AddressFamily::Inet
    };
    let socket = socket(family, kind, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&socket, sockopt::BindToDevice, &device.into())?;
    if kind == SockType::Stream {
        // Connections of a killed server may still be closing.
        setsockopt(&socket, sockopt::ReuseAddr, &true)?;
    }
    let address: Box<dyn SockaddrLike> = if v6 {
        setsockopt(&socket, sockopt::Ipv6V6Only, &false)?;
        let any = SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, port, 0, 0);
        Box::new(SockaddrIn6::from(any))
    } else {
        let any = SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port);
        Box::new(SockaddrIn::from(any))
    };
    bind(socket.as_fd().as_raw_fd(), address.as_ref())?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_block_of_each_server_holds_all_taps_and_all_blocks_are_in_the_range_for_benchmarks() {
        let range: ipnet::Ipv4Net = "198.18.0.0/15".parse().unwrap();
        for slot in 0..SLOTS {
            let block = ipnet::Ipv4Net::new(address_of(slot), 18).unwrap();
            let last = Ipv4Addr::from_bits(address_of(slot).to_bits() + MAX_TAPS);
            assert!(range.contains(&block) && block.contains(&last) && last < block.broadcast());
            assert!(!block.contains(&address_of(slot + 1)), "{block}");
        }
    }
}
