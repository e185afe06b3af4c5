//! The end of a guest.

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

/// How long processes may take to end when they are asked to.
const PATIENCE: Duration = Duration::from_secs(2);

/// Ends every other process of the guest and leaves its writable layer clean on disk.
pub(crate) fn end_machine(layer: Option<BorrowedFd<'_>>) {
    let everybody = Pid::from_raw(-1);
    for signal in [Signal::SIGTERM, Signal::SIGCONT] {
        // Nobody there is what is wanted.
        let _ = kill(everybody, signal);
    }
    reap_until(Instant::now() + PATIENCE);
    let _ = kill(everybody, Signal::SIGKILL);
    reap_until(Instant::now() + PATIENCE);
    sync();
    if let Some(Err(errno)) = layer.map(sys::freeze) {
        console::fail(&format!("the writable layer is not clean: {errno}"));
    }
}

/// Reaps children until none is left or the time has come. SIGCHLD is blocked here and ends each wait.
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

/// Powers the guest off. Unwritten data are lost: see [`end_machine`].
pub(crate) fn power_off() -> ! {
    let Err(errno) = reboot(RebootMode::RB_POWER_OFF);
    console::fail(&format!("cannot power off: {errno}"));
    std::process::exit(1)
}
