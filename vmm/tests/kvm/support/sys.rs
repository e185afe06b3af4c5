//! The only `unsafe` code of these tests.
#![expect(unsafe_code, reason = "TUNSETIFF has no safe wrapper")]

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, OwnedFd},
};

use nix::libc;

/// Creates a TAP in the calling thread's network namespace, configured like the pool's. It disappears with its
/// descriptor.
pub(crate) fn open_tap(name: &str) -> io::Result<OwnedFd> {
    let tun = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")?;
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru {
            ifru_flags: i16::try_from(flags).map_err(io::Error::other)?,
        },
    };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    // SAFETY: TUNSETIFF reads and writes one `ifreq`. `request` is one, and it outlives the call.
    let outcome = unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    match outcome {
        0 => Ok(tun.into()),
        _ => Err(io::Error::last_os_error()),
    }
}
