//! Network devices in this thread's network namespace: TAPs, addresses, routes, per-device settings.

use std::{
    collections::BTreeSet,
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::{AsFd, OwnedFd},
};

use nix::libc;
use ranges::rtnetlink;

mod sys;

pub(crate) use sys::{
    address4, flags, hardware_address, index, make_tap, mtu, name, queue, receive_only_from,
    set_address4, set_address6, set_persistent, set_up,
};

/// IFA_F_TEMPORARY, IFA_F_DADFAILED, IFA_F_DEPRECATED, IFA_F_TENTATIVE (`linux/if_addr.h`).
const UNFIT_V6: u32 = 0x01 | 0x08 | 0x20 | 0x40;
/// The parent of a root queueing discipline (`linux/pkt_sched.h`).
const TC_H_ROOT: u32 = u32::MAX;

/// A TAP, initially down and without addresses. The kernel removes it when all its descriptors are closed, unless it is
/// persistent.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) fd: OwnedFd,
    pub(crate) name: String,
    pub(crate) index: u32,
}

/// An address of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Assigned {
    pub(crate) ifindex: u32,
    pub(crate) address: IpAddr,
    /// Whether sandboxes' packets may have it as their source address. True for every IPv4 address, and for a global
    /// IPv6 address that is not temporary or deprecated and has passed duplicate address detection.
    pub(crate) usable: bool,
}

/// Creates a TAP. `%d` in `pattern` becomes the lowest free number.
pub(crate) fn tap(pattern: &str) -> io::Result<Device> {
    let (fd, name) = make_tap(pattern)?;
    let index = index(&name)?;
    Ok(Device { fd, name, index })
}

/// Opens a TAP that outlived its last descriptor. `None` if a process has it open, or it no longer exists.
pub(crate) fn reopen_tap(name: &str, expected: u32) -> io::Result<Option<Device>> {
    let (fd, name) = match make_tap(name) {
        Err(e) if e.raw_os_error() == Some(libc::EBUSY) => return Ok(None),
        opened => opened?,
    };
    // If the device is gone, the call has created a new one, which is removed with the descriptor.
    let found = index(&name)?;
    Ok((found == expected).then_some(Device {
        fd,
        name,
        index: found,
    }))
}

/// Removes a TAP that no process has open. Unless the TAP is persistent, the kernel removes it. Returns `false` if a
/// process has it open, or a system call fails. Waits for the kernel's RTNL lock.
pub(crate) fn remove_unopened(name: &str, index: u32) -> bool {
    match reopen_tap(name, index) {
        Ok(Some(device)) => set_persistent(device.fd.as_fd(), false).is_ok(),
        Ok(None) | Err(_) => false,
    }
}

/// Sets a device's queueing discipline to `noqueue`: the sender of a frame then passes it to the driver synchronously.
/// The message is built by hand, because the host has only two rtnetlink(7) requests.
pub(crate) fn bypass_queueing(index: u32) -> io::Result<()> {
    const LENGTH: u32 = 48;
    // `nlmsghdr`, `tcmsg`, `rtattr` (`linux/netlink.h`, `linux/rtnetlink.h`).
    let flags = libc::NLM_F_REQUEST | libc::NLM_F_ACK | libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
    let kind = u32::from(libc::TCA_KIND) << 16 | 12;
    let words = [
        LENGTH,
        flags.cast_unsigned() << 16 | u32::from(libc::RTM_NEWQDISC),
        0,
        0,
        0,
        index,
        0,
        TC_H_ROOT,
        0,
        kind,
    ];
    let mut message: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    message.extend(b"noqueue\0");
    rtnetlink::acknowledgement(&rtnetlink::request(&message)?)
}

/// Writes a device's setting in `/proc/sys/net`. `family`: `ipv4` or `ipv6`.
pub(crate) fn configure(family: &str, device: &str, key: &str, value: &str) -> io::Result<()> {
    fs::write(format!("/proc/sys/net/{family}/conf/{device}/{key}"), value)
}

/// Like [`configure`], but writes only if the setting has a different value.
pub(crate) fn ensure(family: &str, device: &str, key: &str, value: &str) -> io::Result<()> {
    let path = format!("/proc/sys/net/{family}/conf/{device}/{key}");
    if fs::read_to_string(path)?.trim() == value {
        return Ok(());
    }
    configure(family, device, key, value)
}

/// Whether the kernel supports IPv6.
pub(crate) fn has_ipv6() -> bool {
    fs::exists("/proc/sys/net/ipv6/conf/all").unwrap_or(false)
}

/// All addresses in this namespace.
pub(crate) fn addresses() -> io::Result<Vec<Assigned>> {
    let mut all = addresses6()?;
    for interface in nix::ifaddrs::getifaddrs()? {
        let address = interface.address.as_ref().and_then(|a| a.as_sockaddr_in());
        if let Some(v4) = address.map(|a| a.ip()) {
            // The device may have been removed in the meantime.
            let Ok(ifindex) = index(&interface.interface_name) else {
                continue;
            };
            let address = IpAddr::V4(v4);
            all.push(Assigned {
                ifindex,
                address,
                usable: true,
            });
        }
    }
    Ok(all)
}

/// All IPv6 addresses in this namespace.
pub(crate) fn addresses6() -> io::Result<Vec<Assigned>> {
    let table = read_table("if_inet6")?;
    Ok(table.lines().filter_map(address6).collect())
}

/// Parses a line of `if_inet6`: address, index, prefix length, scope and flags in hexadecimal digits, then the name.
pub(crate) fn address6(line: &str) -> Option<Assigned> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [address, index, _, scope, flags, _] = words[..] else {
        return None;
    };
    let hex = |word: &str| u32::from_str_radix(word, 16).ok();
    let address = u128::from_str_radix(address, 16).ok()?;
    Some(Assigned {
        ifindex: hex(index)?,
        address: Ipv6Addr::from_bits(address).into(),
        usable: hex(scope)? == 0 && hex(flags)? & UNFIT_V6 == 0,
    })
}

/// Names of the devices of all default routes.
pub(crate) fn default_routes() -> io::Result<BTreeSet<String>> {
    let mut names: BTreeSet<String> = read_table("route")?.lines().filter_map(route4).collect();
    names.extend(read_table("ipv6_route")?.lines().filter_map(route6));
    names.remove("lo");
    Ok(names)
}

/// The device of a line of `route`, if the line is an IPv4 default route.
pub(crate) fn route4(line: &str) -> Option<String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    match words[..] {
        [name, "00000000", _, flags, _, _, _, "00000000", ..] if is_usable_route(flags) => {
            Some(name.to_owned())
        }
        _ => None,
    }
}

/// The device of a line of `ipv6_route`, if the line is an IPv6 default route.
pub(crate) fn route6(line: &str) -> Option<String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    match words[..] {
        [to, "00", _, _, _, _, _, _, flags, name]
            if is_usable_route(flags) && to.bytes().all(|b| b == b'0') =>
        {
            Some(name.to_owned())
        }
        _ => None,
    }
}

/// Whether RTF_UP is set and RTF_REJECT is not (`linux/route.h`).
fn is_usable_route(flags: &str) -> bool {
    u32::from_str_radix(flags, 16).is_ok_and(|flags| flags & 1 != 0 && flags & 0x200 == 0)
}

/// Reads a file of this thread's `/proc/net`. Empty if the kernel lacks the protocol.
fn read_table(name: &str) -> io::Result<String> {
    match fs::read_to_string(format!("/proc/thread-self/net/{name}")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        other => other,
    }
}

/// First and last of the host's ephemeral ports.
pub(crate) fn local_ports() -> io::Result<(u16, u16)> {
    let text = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")?;
    let mut words = text.split_whitespace().map(str::parse);
    match (words.next(), words.next()) {
        (Some(Ok(first)), Some(Ok(last))) => Ok((first, last)),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, text)),
    }
}

/// A device's IPv4 address, if it has one.
pub(crate) fn has_address4(name: &str) -> io::Result<Option<Ipv4Addr>> {
    match address4(name) {
        Ok(address) => Ok(Some(address)),
        Err(error) if error.raw_os_error() == Some(libc::EADDRNOTAVAIL) => Ok(None),
        Err(error) => Err(error),
    }
}
