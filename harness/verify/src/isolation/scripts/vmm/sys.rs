//! A descriptor of another process: pidfd_open(2), pidfd_getfd(2).
#![expect(unsafe_code, reason = "these system calls have no wrapper here")]

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
};

use nix::{libc, unistd::Pid};

/// A copy of the descriptor that is number `number` in the process.
pub(super) fn copy_descriptor(of: Pid, number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes two numbers and no pointer.
    let process = owned(unsafe { libc::syscall(libc::SYS_pidfd_open, of.as_raw(), 0) })?;
    // SAFETY: pidfd_getfd takes three numbers and no pointer; `process` is open until it returns.
    let copy = unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) };
    owned(copy)
}

fn owned(outcome: libc::c_long) -> io::Result<OwnedFd> {
    match RawFd::try_from(outcome) {
        // SAFETY: needs an open descriptor that nobody else owns; the kernel made this one for the call that returned
        // it, and it is handed over once; the result owns it until it is dropped.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}
