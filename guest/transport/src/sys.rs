//! The one operation of this crate that has no safe wrapper.
#![expect(unsafe_code, reason = "accept4 returns a bare descriptor number")]

use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// Takes ownership of a descriptor that the kernel has just created for the caller.
pub(crate) fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: `OwnedFd` requires an open descriptor without another owner. The only caller passes the result
    // of a successful `accept4`, once. The owner closes the descriptor when it is dropped.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
