//! Ownership of received descriptors, the only `unsafe` code of [`crate::frame`].
#![expect(
    unsafe_code,
    reason = "a descriptor number from SCM_RIGHTS has to become an owner"
)]

use super::{FromRawFd, OwnedFd, RawFd};

/// Takes ownership of a descriptor that the kernel has just added to this process.
pub(super) fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: `OwnedFd` needs an open descriptor without another owner. `recvmsg` returned this number in an SCM_RIGHTS
    // message, so the kernel opened it for this call alone, and the caller passes each number once. The owner closes it
    // on drop.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
