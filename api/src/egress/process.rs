//! Proxy processes. Each is reaped by its own thread, so that a proxy that is finishing its connections after this
//! server has handed over is reaped too.

use std::{
    collections::BTreeSet,
    io,
    process::{Child, ExitStatus},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use nix::{
    errno::Errno,
    sys::{
        signal::{Signal, kill},
        wait::{Id, WaitPidFlag, waitid},
    },
    unistd::Pid,
};
use tokio::sync::oneshot;

/// Ids of processes that have not been reaped. While the lock is held, none of them is reaped, so an id in the set
/// still refers to the same process.
#[derive(Clone, Debug, Default)]
pub(super) struct Processes(Arc<Mutex<BTreeSet<i32>>>);

/// Resolves when a process has exited.
pub(super) type Ended = oneshot::Receiver<io::Result<ExitStatus>>;

impl Processes {
    /// Reaps the process when it exits, even if the result is dropped.
    ///
    /// # Errors
    /// Returns an error if the thread cannot be started. The process is then killed.
    pub(super) fn watch(&self, mut child: Child) -> io::Result<(i32, Ended)> {
        let pid = i32::try_from(child.id()).map_err(io::Error::other)?;
        self.lock().insert(pid);
        let (tell, ended) = oneshot::channel();
        let known = self.clone();
        let reap = move || {
            let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
            while waitid(Id::Pid(Pid::from_raw(pid)), flags) == Err(Errno::EINTR) {}
            let mut alive = known.lock();
            let status = child.wait();
            alive.remove(&pid);
            drop(alive);
            let _nothing_waits = tell.send(status);
        };
        let started = thread::Builder::new()
            .name("egress-wait".into())
            .spawn(reap);
        if let Err(why) = started {
            self.kill(pid);
            return Err(why);
        }
        Ok((pid, ended))
    }

    /// Kills a process that has not been reaped.
    pub(super) fn kill(&self, pid: i32) {
        let alive = self.lock();
        if alive.contains(&pid) {
            let _ended = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }

    pub(super) fn kill_all(&self) {
        for pid in self.lock().iter() {
            let _ended = kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// A panic while the lock is held cannot leave the set half changed.
    fn lock(&self) -> MutexGuard<'_, BTreeSet<i32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[tokio::test]
    async fn a_process_is_reaped_and_then_not_killed() {
        let processes = Processes::default();
        let mut command = Command::new("sleep");
        let (pid, ended) = processes
            .watch(command.arg("1000").spawn().unwrap())
            .unwrap();
        assert!(!processes.is_empty());
        processes.kill(pid);
        let status = ended.await.unwrap().unwrap();
        assert!(!status.success() && processes.is_empty());
        // Has no effect, even if another process has this id now.
        processes.kill(pid);
        processes.kill_all();
    }
}
