//! Copies a descriptor of another process: pidfd_open(2), pidfd_getfd(2).
#![expect(unsafe_code, reason = "nix has no wrappers of these system calls")]

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
};

use nix::{libc, unistd::Pid};

/// Copies descriptor `number` of the process `of`.
pub(super) fn copy_descriptor(of: Pid, number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the call takes two integers and no pointer, so it accesses no memory of this process.
    let process = owned(unsafe { libc::syscall(libc::SYS_pidfd_open, of.as_raw(), 0) })?;
    // SAFETY: the call takes three integers and no pointer. `process` keeps the pidfd open until the call returns.
    let copy = unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) };
    owned(copy)
}

fn owned(outcome: libc::c_long) -> io::Result<OwnedFd> {
    match RawFd::try_from(outcome) {
        // SAFETY: `from_raw_fd` needs an open descriptor without another owner. The system call has just created this
        // one, and it is passed on only here. The result owns it until it is dropped.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}
