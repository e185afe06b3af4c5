//! Opening a TAP, which is made if it is not there (the kernel's `Documentation/networking/tuntap.rst`), and switching
//! the loopback interface on (netdevice(7)).
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

/// A descriptor of this TAP in the namespace of this thread, as a VMM wants it.
pub fn open_tap(name: &str) -> io::Result<OwnedFd> {
    if name.len() >= libc::IFNAMSIZ {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let tun = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")?;
    // SAFETY: an `ifreq` is a name of bytes and a union of plain integers, addresses and pointers that nobody reads
    // here; all-zero bytes are a value of each of them.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = i16::try_from(flags).map_err(io::Error::other)?;
    // SAFETY: TUNSETIFF reads and writes one `ifreq`, which `request` is, and it outlives the call.
    match unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &raw mut request) } {
        0 => Ok(tun.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Switches the loopback interface of this thread's namespace on.
pub(super) fn loopback_up() -> io::Result<()> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    // SAFETY: as above, all-zero bytes are a value of `ifreq`.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = libc::c_char::from_ne_bytes([*from]);
    }
    request.ifr_ifru.ifru_flags = i16::try_from(libc::IFF_UP).map_err(io::Error::other)?;
    // SAFETY: SIOCSIFFLAGS reads one `ifreq`, which `request` is, and it outlives the call; the socket is open until
    // the function returns.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
