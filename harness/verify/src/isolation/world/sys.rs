//! Checksum offload of the uplink, by the ioctl of ethtool (`linux/ethtool.h`).
#![expect(unsafe_code, reason = "nix has no wrapper of the ethtool ioctl")]

use std::{io, os::fd::AsRawFd};

use nix::{
    libc,
    sys::socket::{AddressFamily, SockFlag, SockType, socket},
};

const SIOCETHTOOL: libc::Ioctl = 0x8946;
const ETHTOOL_STXCSUM: u32 = 0x17;

/// `struct ethtool_value`.
#[repr(C)]
struct Value {
    command: u32,
    data: u32,
}

/// Sets whether a device in the network namespace of this thread fills in checksums.
pub(super) fn set_checksumming(device: &str, on: bool) -> io::Result<()> {
    let (kind, flags) = (SockType::Datagram, SockFlag::SOCK_CLOEXEC);
    let socket = socket(AddressFamily::Inet, kind, flags, None)?;
    let mut value = Value {
        command: ETHTOOL_STXCSUM,
        data: u32::from(on),
    };
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru {
            ifru_data: (&raw mut value).cast(),
        },
    };
    // The last byte stays zero and ends the name.
    let name = request.ifr_name[..libc::IFNAMSIZ - 1].iter_mut();
    for (to, from) in name.zip(device.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    // SAFETY: SIOCETHTOOL reads one `ifreq`, here `request`. With this command the kernel reads and writes one
    // `ethtool_value` through its pointer, here `value`. Both are alive until the call returns.
    match unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
