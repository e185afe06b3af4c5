//! A VMM process as its owner holds it: by pidfd, so that a signal never meets another process, whether the
//! process is a child of this one or was adopted from a server that is no more.

mod sys;

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    process::Child,
    sync::Arc,
    time::Duration,
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::record::ProcessName;

/// See the module. Dropping it does nothing to the process.
#[derive(Debug)]
pub(crate) struct Vm {
    pub(crate) name: ProcessName,
    pub(crate) pidfd: Arc<OwnedFd>,
    /// Absent for an adopted one, which init reaps.
    child: Option<Child>,
}

impl Vm {
    /// Of a child that was just started.
    pub(crate) fn of_child(child: Child) -> Result<Self, (io::Error, Child)> {
        let pid = child.id();
        let found = open(pid).and_then(|pidfd| {
            let name = ProcessName::of(pid).ok_or_else(|| io::Error::other("it ended at once"))?;
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

    /// The process of this name; absent if it is gone.
    pub(crate) fn adopt(name: ProcessName) -> Option<Self> {
        let pidfd = open(name.pid).ok()?;
        // The descriptor holds the process that has the id now; only then is the name compared.
        name.is_alive().then(|| Self {
            name,
            pidfd: Arc::new(pidfd),
            child: None,
        })
    }

    /// Waits for its end and reaps it.
    pub(crate) async fn gone(self) -> io::Result<()> {
        let watched = sys::watch(Arc::clone(&self.pidfd))?;
        // Readable once and for ever.
        drop(watched.readable().await?);
        self.reap()
    }

    /// Kills it and waits until it is gone.
    ///
    /// # Errors
    /// It does not go within `timeout`.
    pub(crate) fn end(self, timeout: Duration) -> io::Result<()> {
        kill(&self.pidfd);
        let bound = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX);
        let mut fds = [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, bound)? {
            0 => Err(io::Error::from(io::ErrorKind::TimedOut)),
            _ => self.reap(),
        }
    }

    fn reap(mut self) -> io::Result<()> {
        match &mut self.child {
            Some(child) => child.wait().map(|_| ()),
            None => Ok(()),
        }
    }
}

/// Kills the process behind a descriptor; one that is gone is no error.
pub(crate) fn kill(pidfd: &OwnedFd) {
    let _ = pidfd_send_signal(pidfd, Signal::KILL);
}

fn open(pid: u32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn sleeper() -> Vm {
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
        // One that is gone can be killed again.
        kill(&adopted.pidfd);
    }

    #[tokio::test]
    async fn the_end_of_a_process_is_noticed() {
        let vm = sleeper();
        let pidfd = Arc::clone(&vm.pidfd);
        let waiter = tokio::spawn(vm.gone());
        kill(&pidfd);
        waiter.await.unwrap().unwrap();
    }
}
