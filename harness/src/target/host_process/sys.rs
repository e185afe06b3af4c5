//! Opens a descriptor of a child process (pidfd_open(2)), which can be polled for the end of the process.
#![expect(unsafe_code, reason = "std and nix have no stable call for pidfd_open")]

use std::{
    io,
    os::fd::{FromRawFd, OwnedFd, RawFd},
    process::Child,
};

use nix::libc;

/// A descriptor of `child` that becomes readable when the process has ended.
pub(in crate::target) fn pidfd(child: &Child) -> io::Result<OwnedFd> {
    // SAFETY: the call takes two integers and no pointer. The child was not waited for, so its id is not reused.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, child.id(), 0) };
    match RawFd::try_from(fd) {
        // SAFETY: the kernel has just returned this descriptor, and nothing else owns it.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}
