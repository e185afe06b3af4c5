//! The one thing here that has no safe wrapper: a child that ends with its parent.
#![expect(
    unsafe_code,
    reason = "code between fork and exec has no safe interface"
)]

use std::{os::unix::process::CommandExt, process::Command};

use nix::sys::{prctl::set_pdeathsig, signal::Signal};

/// Has the kernel kill the command's process when this one ends, however it ends.
pub(crate) fn end_with_parent(command: &mut Command) {
    let ask = || set_pdeathsig(Signal::SIGKILL).map_err(std::io::Error::from);
    // SAFETY: between fork and exec only async-signal-safe calls may be made and nothing may be allocated.
    // `ask` is one prctl system call, and its error is a number. It runs once, in the child, before exec.
    unsafe { command.pre_exec(ask) };
}
