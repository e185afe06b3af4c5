//! Opens a TAP, which creates it if needed (the kernel's `Documentation/networking/tuntap.rst`), and brings the
//! loopback interface up (netdevice(7)).
#![expect(
    unsafe_code,
    reason = "a descriptor becomes one of a TAP by an ioctl, and flags are set by one"
)]

use std::{
    fs::File,
    io,
    net::UdpSocket,
    os::fd::{AsRawFd, OwnedFd},
};

use nix::libc;

/// Opens the TAP `name` in the namespace of this thread, with the flags that a VMM needs. Creates it if it does not
/// exist.
pub fn open_tap(name: &str) -> io::Result<OwnedFd> {
    if name.len() >= libc::IFNAMSIZ {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let tun = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")?;
    // SAFETY: `zeroed` needs a type for which all-zero bytes are valid. An `ifreq` consists of an array of bytes and a
    // union of integers, addresses and raw pointers, and all-zero bytes are valid for each of these. The pointers are
    // never dereferenced.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = i16::try_from(flags).map_err(io::Error::other)?;
    // SAFETY: TUNSETIFF reads and writes one `ifreq`, here `request`, which is alive until the call returns.
    match unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &raw mut request) } {
        0 => Ok(tun.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Brings the loopback interface up in the namespace of this thread.
pub(super) fn loopback_up() -> io::Result<()> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    // SAFETY: `zeroed` needs a type for which all-zero bytes are valid, and an `ifreq` is one (see `open_tap`).
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = libc::c_char::from_ne_bytes([*from]);
    }
    request.ifr_ifru.ifru_flags = i16::try_from(libc::IFF_UP).map_err(io::Error::other)?;
    // SAFETY: SIOCSIFFLAGS reads one `ifreq`, here `request`. Both `request` and the socket are alive until the call
    // returns.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
