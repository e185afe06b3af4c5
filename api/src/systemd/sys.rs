//! Unsafe code of this crate.
#![expect(
    unsafe_code,
    reason = "systemd passes descriptors by number, without an owner"
)]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};

/// Takes ownership of the descriptor with this number and makes it close-on-exec.
pub(super) fn take(number: usize) -> io::Result<OwnedFd> {
    let number = RawFd::try_from(number).map_err(io::Error::other)?;
    // SAFETY: `from_raw_fd` needs an open descriptor without another owner. systemd opened the descriptors that
    // LISTEN_FDS counts for this process (`listening_sockets` has compared LISTEN_PID), and each number is taken once.
    // If the number is not open, fcntl fails, and the value is forgotten. This holds until the `OwnedFd` is dropped.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    match fcntl(&fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)) {
        Ok(_) => Ok(fd),
        Err(error) => {
            std::mem::forget(fd);
            Err(error.into())
        }
    }
}
