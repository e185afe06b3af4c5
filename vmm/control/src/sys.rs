//! The one unsafe step of this crate.
#![expect(
    unsafe_code,
    reason = "a descriptor number from SCM_RIGHTS has to become an owner"
)]

use super::{FromRawFd, OwnedFd, RawFd};

/// Takes ownership of a descriptor that the kernel has just put into this process.
pub(super) fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: `OwnedFd` needs an open descriptor that nobody else owns. `recvmsg` returned this number
    // in an SCM_RIGHTS message, so the kernel opened it for this call alone, and the caller passes each
    // number once. The owner closes it when it is dropped.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
