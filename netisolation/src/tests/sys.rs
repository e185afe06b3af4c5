//! Descriptors out of messages, and what a VMM or a host does to a TAP.
#![expect(
    unsafe_code,
    reason = "a descriptor in a message is a bare number; ioctls have no safe wrapper"
)]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use nix::{libc, sys::socket::ControlMessageOwned};

/// The one descriptor that came.
pub(crate) fn received(message: ControlMessageOwned) -> OwnedFd {
    let ControlMessageOwned::ScmRights(fds) = message else {
        panic!("{message:?}");
    };
    let [fd] = fds[..] else {
        panic!("{fds:?}");
    };
    // SAFETY: needs an open descriptor that nobody else owns; the kernel made it for this message, which is consumed
    // here and is read once; the result owns it until it is dropped.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// As a VMM does.
pub(crate) fn set_header_len(tap: &OwnedFd, bytes: libc::c_int) {
    // SAFETY: TUNSETVNETHDRSZ reads one int, which `bytes` is until the call returns.
    let done = unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const bytes) };
    assert_eq!(done, 0);
}

/// The device outlives its descriptors.
pub(crate) fn set_persistent(tap: &OwnedFd) {
    // SAFETY: TUNSETPERSIST takes its argument by value and no pointer; the descriptor is borrowed until it returns.
    let done = unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETPERSIST, 1) };
    assert_eq!(done, 0);
}
