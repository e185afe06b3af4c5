//! The one operation of this crate that has no safe wrapper: a child that ends with its parent.
#![expect(
    unsafe_code,
    reason = "code between fork and exec has no safe interface"
)]

use std::{os::unix::process::CommandExt, process::Command};

use nix::sys::{
    prctl::set_pdeathsig,
    signal::{SigSet, Signal},
};

/// Makes the kernel kill the command's process when this one ends, however it ends. The process starts with no signal
/// blocked, whatever this one has blocked.
pub(crate) fn end_with_parent(command: &mut Command) {
    let set_up = || {
        SigSet::all().thread_unblock()?;
        Ok(set_pdeathsig(Signal::SIGKILL)?)
    };
    // SAFETY: between fork and exec only async-signal-safe calls may be made and nothing may be allocated. `set_up`
    // makes two system calls, rt_sigprocmask and prctl, and its error is a number. It runs once, in the child, before
    // exec.
    unsafe { command.pre_exec(set_up) };
}
