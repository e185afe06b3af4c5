//! The things here that have no safe wrapper: a child that ends with its parent, a descriptor that the kernel
//! has just made.
#![expect(
    unsafe_code,
    reason = "code between fork and exec has no safe interface, nor has a new descriptor"
)]

use std::{
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::Command,
};

use nix::sys::{
    prctl::set_pdeathsig,
    signal::{SigSet, Signal},
    socket::{SockFlag, accept4},
};

/// Has the kernel kill the command's process when this one ends, however it ends. The process hears all
/// signals, also those that this one keeps to itself.
pub(crate) fn end_with_parent(command: &mut Command) {
    let ask = || {
        SigSet::all().thread_unblock()?;
        Ok(set_pdeathsig(Signal::SIGKILL)?)
    };
    // SAFETY: between fork and exec only async-signal-safe calls may be made and nothing may be allocated.
    // `ask` is two system calls, rt_sigprocmask and prctl, and its error is a number. It runs once, in the
    // child, before exec.
    unsafe { command.pre_exec(ask) };
}

/// A connection of a listening socket, whatever its family; it does not block.
pub(crate) fn accept(listener: BorrowedFd<'_>) -> nix::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = accept4(listener.as_raw_fd(), flags)?;
    // SAFETY: the descriptor must be open and owned by nobody else. accept4 has just made it and given its
    // number to this function alone. The owner made here closes it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
