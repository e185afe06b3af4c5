//! Descriptors out of messages.
#![expect(unsafe_code, reason = "a descriptor in a message is a bare number")]

use std::os::fd::{FromRawFd, OwnedFd};

use nix::sys::socket::ControlMessageOwned;

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
