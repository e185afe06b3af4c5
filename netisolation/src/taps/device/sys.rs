//! ioctls on network devices: netdevice(7) and the kernel documentation, `networking/tuntap.rst`.
#![expect(unsafe_code, reason = "devices are created and configured by ioctls")]

use std::{
    ffi::CStr,
    io,
    net::{Ipv4Addr, Ipv6Addr},
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
};

use nix::{
    libc,
    sys::socket::{AddressFamily, SockFlag, SockType, socket},
};

/// The argument of SIOCSIFADDR on an AF_INET6 socket (`struct in6_ifreq` of `linux/ipv6.h`).
#[repr(C)]
struct Request6 {
    address: libc::in6_addr,
    prefix: u32,
    ifindex: libc::c_int,
}

/// Creates a TAP with IFF_NO_PI and IFF_VNET_HDR. Returns its descriptor and name.
pub(crate) fn make_tap(pattern: &str) -> io::Result<(OwnedFd, String)> {
    let tun = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/net/tun")?;
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    let mut request = request(pattern)?;
    request.ifr_ifru.ifru_flags = i16::try_from(flags).map_err(io::Error::other)?;
    // SAFETY: TUNSETIFF reads and writes one `ifreq`, which `request` is, and it outlives the call.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })?;
    Ok((tun.into(), name_of(&request)))
}

/// Sets whether a TAP outlives its last descriptor.
pub(crate) fn set_persistent(tap: BorrowedFd<'_>, is_persistent: bool) -> io::Result<()> {
    let value = libc::c_ulong::from(is_persistent);
    // SAFETY: TUNSETPERSIST takes its argument by value and no pointer; the descriptor is borrowed until it returns.
    check(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETPERSIST, value) })
}

/// Lets a socket, and those that it accepts, receive only what arrives at a device (kernel documentation,
/// `networking/filter.rst`).
pub(crate) fn receive_only_from(socket: BorrowedFd<'_>, ifindex: u32) -> io::Result<()> {
    let step = |code: u32, jf: u8, k: u32| -> io::Result<libc::sock_filter> {
        let code = u16::try_from(code).map_err(io::Error::other)?;
        Ok(libc::sock_filter { code, jt: 0, jf, k })
    };
    let device = (libc::SKF_AD_OFF + libc::SKF_AD_IFINDEX).cast_unsigned();
    let mut steps = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, device)?,
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, ifindex)?,
        step(libc::BPF_RET | libc::BPF_K, 0, u32::MAX)?,
        step(libc::BPF_RET | libc::BPF_K, 0, 0)?,
    ];
    let program = libc::sock_fprog {
        len: 4,
        filter: steps.as_mut_ptr(),
    };
    let size = libc::socklen_t::try_from(size_of_val(&program)).map_err(io::Error::other)?;
    // SAFETY: SO_ATTACH_FILTER reads one `sock_fprog` and the `len` steps at `filter`; both are locals of this function, and
    // the kernel copies them before the call returns.
    check(unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            size,
        )
    })
}

pub(crate) fn index(name: &str) -> io::Result<u32> {
    let request = query(name, libc::SIOCGIFINDEX)?;
    // SAFETY: SIOCGIFINDEX stored the index in this member, and any value is an integer; `request` lives on.
    let index = unsafe { request.ifr_ifru.ifru_ifindex };
    u32::try_from(index).map_err(io::Error::other)
}

pub(crate) fn name(ifindex: u32) -> io::Result<String> {
    let mut request = request("")?;
    request.ifr_ifru.ifru_ifindex = i32::try_from(ifindex).map_err(io::Error::other)?;
    call(&mut request, libc::SIOCGIFNAME)?;
    Ok(name_of(&request))
}

/// Flags of a device: IFF_UP and others.
pub(crate) fn flags(name: &str) -> io::Result<libc::c_int> {
    let request = query(name, libc::SIOCGIFFLAGS)?;
    // SAFETY: SIOCGIFFLAGS stored the flags in this member, and any value is an integer; `request` lives on.
    Ok(unsafe { request.ifr_ifru.ifru_flags }.into())
}

/// MTU of a device: bytes of the largest packet, without the Ethernet header.
pub(crate) fn mtu(name: &str) -> io::Result<u32> {
    let request = query(name, libc::SIOCGIFMTU)?;
    // SAFETY: SIOCGIFMTU stored the size in this member, and any value is an integer; `request` lives on.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    u32::try_from(mtu).map_err(io::Error::other)
}

/// Length of a device's transmit queue, in frames.
pub(crate) fn queue(name: &str) -> io::Result<u32> {
    let request = query(name, libc::SIOCGIFTXQLEN)?;
    // SAFETY: SIOCGIFTXQLEN stored the number in `ifr_qlen`, which shares this member's place and type, and any value
    // is an integer; `request` lives on.
    let frames = unsafe { request.ifr_ifru.ifru_metric };
    u32::try_from(frames).map_err(io::Error::other)
}

/// Brings a device up and sets the flags in `more`. Keeps all other flags.
pub(crate) fn set_up(name: &str, more: libc::c_int) -> io::Result<()> {
    let wanted = flags(name)? | libc::IFF_UP | more;
    let mut request = request(name)?;
    // The request has room for the low 16 bits, which contain all flags that it can set.
    let [low, high, ..] = wanted.to_ne_bytes();
    request.ifr_ifru.ifru_flags = i16::from_ne_bytes([low, high]);
    call(&mut request, libc::SIOCSIFFLAGS)
}

/// MAC address of an Ethernet device. Fails for other devices.
pub(crate) fn hardware_address(name: &str) -> io::Result<[u8; 6]> {
    let request = query(name, libc::SIOCGIFHWADDR)?;
    // SAFETY: SIOCGIFHWADDR stored a `sockaddr` in this member, whose bytes may be any; `request` lives on.
    let address = unsafe { request.ifr_ifru.ifru_hwaddr };
    if address.sa_family != libc::ARPHRD_ETHER {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            format!("{name} is not an Ethernet device"),
        ));
    }
    let mut mac = [0; 6];
    for (to, from) in mac.iter_mut().zip(address.sa_data) {
        *to = from.to_ne_bytes()[0];
    }
    Ok(mac)
}

/// IPv4 address of a device. Fails with EADDRNOTAVAIL if it has none.
pub(crate) fn address4(name: &str) -> io::Result<Ipv4Addr> {
    let mut request = request(name)?;
    request.ifr_ifru.ifru_addr.sa_family =
        u16::try_from(libc::AF_INET).map_err(io::Error::other)?;
    call(&mut request, libc::SIOCGIFADDR)?;
    // SAFETY: SIOCGIFADDR stored a `sockaddr_in` in this member, whose bytes may be any; `request` lives on.
    let data = unsafe { request.ifr_ifru.ifru_addr }.sa_data;
    let octet = |at: usize| data[at].to_ne_bytes()[0];
    Ok(Ipv4Addr::new(octet(2), octet(3), octet(4), octet(5)))
}

/// Sets a device's IPv4 address and netmask. If the device is up, the kernel adds a route to the network.
pub(crate) fn set_address4(name: &str, address: Ipv4Addr, mask: Ipv4Addr) -> io::Result<()> {
    for (ioctl, value) in [(libc::SIOCSIFADDR, address), (libc::SIOCSIFNETMASK, mask)] {
        let mut request = request(name)?;
        let mut socket_address = libc::sockaddr {
            sa_family: u16::try_from(libc::AF_INET).map_err(io::Error::other)?,
            sa_data: [0; 14],
        };
        // `sockaddr_in`: port, then address.
        for (to, from) in socket_address.sa_data[2..6].iter_mut().zip(value.octets()) {
            *to = libc::c_char::from_ne_bytes([from]);
        }
        request.ifr_ifru.ifru_addr = socket_address;
        call(&mut request, ioctl)?;
    }
    Ok(())
}

/// Adds an IPv6 address to a device. The kernel adds a route to the network.
pub(crate) fn set_address6(ifindex: u32, address: Ipv6Addr, prefix: u32) -> io::Result<()> {
    let mut request = Request6 {
        address: libc::in6_addr {
            s6_addr: address.octets(),
        },
        prefix,
        ifindex: i32::try_from(ifindex).map_err(io::Error::other)?,
    };
    let socket = datagram(AddressFamily::Inet6)?;
    // SAFETY: SIOCSIFADDR of an AF_INET6 socket reads one `in6_ifreq`, which `request` is laid out as, and it
    // outlives the call.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFADDR, &raw mut request) })
}

fn request(name: &str) -> io::Result<libc::ifreq> {
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru {
            ifru_map: libc::__c_anonymous_ifru_map {
                mem_start: 0,
                mem_end: 0,
                base_addr: 0,
                irq: 0,
                dma: 0,
                port: 0,
            },
        },
    };
    if name.len() >= libc::IFNAMSIZ {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{name} is too long for a device name"),
        ));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    Ok(request)
}

fn name_of(request: &libc::ifreq) -> String {
    let bytes: Vec<u8> = request
        .ifr_name
        .iter()
        .map(|c| c.to_ne_bytes()[0])
        .collect();
    match CStr::from_bytes_until_nul(&bytes) {
        Ok(name) => name.to_string_lossy().into_owned(),
        Err(_) => String::from_utf8_lossy(&bytes).into_owned(),
    }
}

fn query(name: &str, ioctl: libc::Ioctl) -> io::Result<libc::ifreq> {
    let mut request = request(name)?;
    call(&mut request, ioctl)?;
    Ok(request)
}

fn call(request: &mut libc::ifreq, ioctl: libc::Ioctl) -> io::Result<()> {
    let socket = datagram(AddressFamily::Inet)?;
    // SAFETY: each ioctl that callers pass reads or writes one `ifreq`, which `request` is, and it outlives the call.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), ioctl, &raw mut *request) })
}

fn datagram(family: AddressFamily) -> io::Result<OwnedFd> {
    Ok(socket(
        family,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?)
}

fn check(outcome: libc::c_int) -> io::Result<()> {
    if outcome < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
