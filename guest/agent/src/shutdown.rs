//! Shutting down a guest.

use std::{
    os::fd::BorrowedFd,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::{
        reboot::{RebootMode, reboot},
        signal::{SigSet, Signal, kill},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{Pid, sync},
};

use crate::{console, sys};

/// How long processes may take to end after SIGTERM, and again after SIGKILL.
const PATIENCE: Duration = Duration::from_secs(2);

/// Ends every other process of the guest, writes all data back and freezes the writable layer.
pub(crate) fn end_machine(layer: Option<BorrowedFd<'_>>) {
    let everybody = Pid::from_raw(-1);
    for signal in [Signal::SIGTERM, Signal::SIGCONT] {
        // Fails if there is no other process.
        let _ = kill(everybody, signal);
    }
    reap_until(Instant::now() + PATIENCE);
    let _ = kill(everybody, Signal::SIGKILL);
    reap_until(Instant::now() + PATIENCE);
    sync();
    if let Some(Err(errno)) = layer.map(sys::freeze) {
        console::fail(&format!("cannot freeze the writable layer: {errno}"));
    }
}

/// Reaps children until none is left or the deadline has passed. SIGCHLD must be blocked; each wait ends when it
/// arrives.
fn reap_until(deadline: Instant) {
    let mut child = SigSet::empty();
    child.add(Signal::SIGCHLD);
    loop {
        match waitpid(Pid::from_raw(-1), Some(WaitPidFlag::WNOHANG)) {
            Err(Errno::ECHILD) => return,
            Ok(WaitStatus::StillAlive) => {}
            Ok(_) | Err(_) => continue,
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || !sys::wait_for(&child, left) {
            return;
        }
    }
}

/// Powers the guest off. Data that [`end_machine`] has not written back is lost.
pub(crate) fn power_off() -> ! {
    let Err(errno) = reboot(RebootMode::RB_POWER_OFF);
    console::fail(&format!("cannot power off: {errno}"));
    std::process::exit(1)
}
