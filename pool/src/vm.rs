//! A VMM process, referred to by a pidfd, so that a signal never reaches another process that reuses its id. The
//! process is a child of this process, or was adopted from a previous server.

mod sys;

use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
    process::Child,
    sync::Arc,
    time::Duration,
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::record::ProcessName;

/// Makes the kernel kill a VM before other processes of the host.
pub(crate) const OOM_SCORE: &str = "500";
/// The same, as the mark of a stopped process.
const OOM_SCORE_STOPPED: &str = "501";

/// A VMM process. Dropping this value does not affect the process.
#[derive(Debug)]
pub(crate) struct Vm {
    pub(crate) name: ProcessName,
    pub(crate) pidfd: Arc<OwnedFd>,
    /// `None` for an adopted process, which init reaps.
    child: Option<Child>,
}

impl Vm {
    /// Wraps a child process.
    ///
    /// # Errors
    /// Returns the child with the error if it has already exited or its pidfd cannot be opened.
    pub(crate) fn of_child(child: Child) -> Result<Self, (io::Error, Child)> {
        let pid = child.id();
        let found = open(pid).and_then(|pidfd| {
            let name = ProcessName::of(pid).ok_or_else(|| io::Error::other("it exited at once"))?;
            Ok((name, pidfd))
        });
        match found {
            Ok((name, pidfd)) => Ok(Self {
                name,
                pidfd: Arc::new(pidfd),
                child: Some(child),
            }),
            Err(e) => Err((e, child)),
        }
    }

    /// Adopts the process with this name. `None` if it has exited.
    pub(crate) fn adopt(name: ProcessName) -> Option<Self> {
        let pidfd = open(name.pid).ok()?;
        // The pidfd refers to the process that has this id now. Comparing the start time shows whether it is still the
        // named process.
        name.is_alive().then(|| Self {
            name,
            pidfd: Arc::new(pidfd),
            child: None,
        })
    }

    /// Waits until the process exits. Reaps it if it is a child.
    pub(crate) async fn exited(self) -> io::Result<()> {
        let watched = sys::watch(Arc::clone(&self.pidfd))?;
        // Once readable, a pidfd remains readable.
        drop(watched.readable().await?);
        self.reap()
    }

    /// Kills the process and waits until it exits. Reaps it if it is a child.
    ///
    /// # Errors
    /// Returns `TimedOut` if the process does not exit within `timeout`.
    pub(crate) fn end(self, timeout: Duration) -> io::Result<()> {
        self.stop(timeout)?;
        self.reap()
    }

    /// Like [`Vm::end`], but leaves a child as a zombie.
    ///
    /// # Errors
    /// Returns the errors of [`Vm::end`].
    pub(crate) fn stop(&self, timeout: Duration) -> io::Result<()> {
        kill(&self.pidfd);
        let bound = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX);
        let mut fds = [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, bound)? {
            0 => Err(io::Error::from(io::ErrorKind::TimedOut)),
            _ => Ok(()),
        }
    }

    fn reap(mut self) -> io::Result<()> {
        match &mut self.child {
            Some(child) => child.wait().map(|_| ()),
            None => Ok(()),
        }
    }
}

/// Sends SIGKILL to the process behind a pidfd. A process that has exited is not an error.
pub(crate) fn kill(pidfd: &OwnedFd) {
    let _ = pidfd_send_signal(pidfd, Signal::KILL);
}

/// Stops a process until [`go_on`]: its VM neither runs nor responds, and keeps everything. The mark shows a later
/// server that the process was not stopped by an operator. It is set first and removed last, so that a server that is
/// killed in between leaves no stopped process without it.
///
/// # Errors
/// Returns an error if the process has exited or the mark cannot be set.
pub(crate) fn halt(pid: u32, pidfd: &OwnedFd) -> io::Result<()> {
    set_oom_score(pid, OOM_SCORE_STOPPED)?;
    Ok(pidfd_send_signal(pidfd, Signal::STOP)?)
}

/// Continues a process that [`halt`] stopped.
pub(crate) fn go_on(pid: u32, pidfd: &OwnedFd) {
    if pidfd_send_signal(pidfd, Signal::CONT).is_ok() {
        let _exited = set_oom_score(pid, OOM_SCORE);
    }
}

/// Whether this server or a previous one stopped the process with [`halt`].
pub(crate) fn is_halted(pid: u32) -> bool {
    let score = fs::read_to_string(format!("/proc/{pid}/oom_score_adj"));
    score.is_ok_and(|score| score.trim() == OOM_SCORE_STOPPED)
}

/// Sets the likelihood that the kernel kills a process when the host has no memory.
///
/// # Errors
/// Returns an error if the process has exited or the kernel refuses the value.
pub(crate) fn set_oom_score(pid: u32, score: &str) -> io::Result<()> {
    fs::write(format!("/proc/{pid}/oom_score_adj"), score)
}

/// Opens the pidfd of a child that has not been reaped.
pub(crate) fn open(pid: u32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::process::Command;

    use super::*;

    pub(crate) fn sleeper() -> Vm {
        let child = Command::new("sleep").arg("600").spawn().unwrap();
        Vm::of_child(child).unwrap()
    }

    #[test]
    fn a_killed_child_is_reaped() {
        let vm = sleeper();
        let name = vm.name;
        assert!(name.is_alive());
        let adopted = Vm::adopt(name).unwrap();
        vm.end(Duration::from_secs(20)).unwrap();
        assert!(!name.is_alive());
        assert!(Vm::adopt(name).is_none());
        // A second kill has no effect.
        kill(&adopted.pidfd);
    }

    #[test]
    fn a_stopped_process_is_marked_until_it_continues() {
        let vm = sleeper();
        let pid = vm.name.pid;
        let state = || {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            stat.split(") ").nth(1).unwrap().starts_with('T')
        };
        let until = |is_stopped| {
            let deadline = std::time::Instant::now() + Duration::from_secs(20);
            while state() != is_stopped {
                assert!(std::time::Instant::now() < deadline);
                std::thread::yield_now();
            }
        };
        halt(pid, &vm.pidfd).unwrap();
        until(true);
        assert!(is_halted(pid));
        go_on(pid, &vm.pidfd);
        until(false);
        assert!(!is_halted(pid));
        vm.end(Duration::from_secs(20)).unwrap();
    }

    #[tokio::test]
    async fn the_exit_of_a_process_is_noticed() {
        let vm = sleeper();
        let pidfd = Arc::clone(&vm.pidfd);
        let waiter = tokio::spawn(vm.exited());
        kill(&pidfd);
        waiter.await.unwrap().unwrap();
    }
}
