//! The unsafe code of this crate.
#![expect(
    unsafe_code,
    reason = "tokio requires that the descriptor stays open while it is watched"
)]

use std::{io, os::fd::OwnedFd, sync::Arc};

use tokio::io::{Interest, unix::AsyncFd};

/// Watches a pidfd for the exit of its process. Must be called within a Tokio runtime.
///
/// # Errors
/// The runtime cannot register the descriptor.
pub(super) fn watch(pidfd: Arc<OwnedFd>) -> io::Result<AsyncFd<Arc<OwnedFd>>> {
    // SAFETY: the descriptor must stay open and unchanged while the `AsyncFd` lives. The `AsyncFd` owns a reference to
    // an `OwnedFd`, which closes its descriptor only when the last reference is dropped; an `Arc` gives no exclusive
    // access while there are other references. This holds until the `AsyncFd` is dropped.
    unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }.map_err(io::Error::from)
}
