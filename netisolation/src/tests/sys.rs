//! Receives descriptors in messages, and changes TAPs as a VMM or another program on the host does.
#![expect(
    unsafe_code,
    reason = "a received descriptor is a raw number; ioctls have no safe wrappers"
)]

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

use nix::{libc, sys::socket::ControlMessageOwned};

/// The descriptors in a message.
pub(crate) fn received(message: ControlMessageOwned) -> Vec<OwnedFd> {
    let ControlMessageOwned::ScmRights(fds) = message else {
        panic!("{message:?}");
    };
    // SAFETY: needs open descriptors without another owner; the kernel created them for this message, which is consumed
    // here; the results own them until they are dropped.
    let owned = fds
        .into_iter()
        .map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
    owned.collect()
}

/// Sets the length of the frame header, as a VMM does.
pub(crate) fn set_header_len(tap: &OwnedFd, bytes: libc::c_int) {
    // SAFETY: TUNSETVNETHDRSZ reads one int, which `bytes` is until the call returns.
    let done = unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const bytes) };
    assert_eq!(done, 0);
}

/// Sets the offloads that the TAP's reader performs itself (`TUN_F_…`).
pub(crate) fn set_offloads(tap: &OwnedFd, offloads: u32) {
    try_offloads(tap, offloads).unwrap();
}

/// Like [`set_offloads`], with flags that the kernel may not support.
pub(crate) fn try_offloads(tap: &OwnedFd, offloads: u32) -> io::Result<()> {
    let offloads = libc::c_ulong::from(offloads);
    // SAFETY: TUNSETOFFLOAD takes its argument by value and no pointer; the descriptor is borrowed until it returns.
    done(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETOFFLOAD, offloads) })
}

/// Sets the byte order of headers. Fails if the kernel supports only its own.
pub(crate) fn set_big_endian(tap: &OwnedFd, is_big: bool) -> io::Result<()> {
    /// `linux/if_tun.h`.
    const TUNSETVNETBE: libc::Ioctl = 0x4004_54de;
    let is_big = libc::c_int::from(is_big);
    // SAFETY: TUNSETVNETBE reads one int, which `is_big` is until the call returns.
    done(unsafe { libc::ioctl(tap.as_raw_fd(), TUNSETVNETBE, &raw const is_big) })
}

/// Attaches the descriptor to a TAP again.
pub(crate) fn try_attach(tap: &OwnedFd) -> io::Result<()> {
    let flags = libc::IFF_TAP | libc::IFF_NO_PI;
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru {
            ifru_flags: i16::try_from(flags).unwrap(),
        },
    };
    // SAFETY: TUNSETIFF reads and writes one `ifreq`, which `request` is, and it outlives the call.
    done(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })
}

/// Ends a connection, so that its socket can connect again (connect(2), AF_UNSPEC).
pub(crate) fn disconnect(socket: &impl AsRawFd) -> io::Result<()> {
    let address = libc::sockaddr {
        sa_family: libc::AF_UNSPEC.try_into().unwrap(),
        sa_data: [0; 14],
    };
    let size = size_of_val(&address).try_into().unwrap();
    // SAFETY: connect(2) reads `size` bytes at the address, which is a local that outlives the call.
    done(unsafe { libc::connect(socket.as_raw_fd(), &raw const address, size) })
}

fn done(outcome: libc::c_int) -> io::Result<()> {
    match outcome {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
