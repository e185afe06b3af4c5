//! The one unsafe step of this crate.
#![expect(
    unsafe_code,
    reason = "tokio asks for a promise about the descriptor that it watches"
)]

use std::{io, os::fd::OwnedFd, sync::Arc};

use tokio::io::{Interest, unix::AsyncFd};

/// Watches a pidfd for the end of its process. Needs a runtime around it.
///
/// # Errors
/// The runtime's.
pub(super) fn watch(pidfd: Arc<OwnedFd>) -> io::Result<AsyncFd<Arc<OwnedFd>>> {
    // SAFETY: needs a descriptor that stays open and the same while the `AsyncFd` lives. The `AsyncFd` owns a
    // reference to an `OwnedFd`, which closes its descriptor only when the last reference is dropped and gives
    // no other out, since an `Arc` hands out no exclusive access while there is another. Until the `AsyncFd`
    // is dropped.
    unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }.map_err(io::Error::from)
}
