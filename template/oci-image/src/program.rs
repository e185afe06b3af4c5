//! The program `cube-image`: one process for each conversion and each hash, which runs when the CPU is otherwise idle.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::ExitStatusExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use nix::{
    libc,
    poll::{PollFd, PollFlags, poll},
};
use rustix::{
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
    process::{Pid, setpriority_process},
};

use crate::{
    convert::ConvertError,
    digest::Digest,
    worker::{Order, Reply, Task, confine::Resources, receive, send},
};

/// The lowest priority of nice(1). It only counts among processes of the same cgroup.
const NICE: i32 = 19;
/// Interval at which a waiting client checks other conditions, in milliseconds.
const STEP_MS: u16 = 50;

/// Configuration of the program.
#[derive(Clone, Debug)]
pub struct Program {
    path: PathBuf,
    group: Option<PathBuf>,
    pub(crate) resources: Resources,
}

impl Program {
    #[must_use]
    pub fn new(path: &Path, resources: Resources) -> Self {
        Self {
            path: path.to_owned(),
            group: None,
            resources,
        }
    }

    /// Moves each process into a cgroup with a low CPU weight. `procs` is the group's file `cgroup.procs`.
    #[must_use]
    pub fn in_group(self, procs: Option<PathBuf>) -> Self {
        Self {
            group: procs,
            ..self
        }
    }

    pub(crate) fn start(&self) -> Result<Worker, ConvertError> {
        let worker = self.spawn();
        worker.map_err(|source| ConvertError::Start {
            program: self.path.clone(),
            source,
        })
    }

    fn spawn(&self) -> io::Result<Worker> {
        let flags = SocketFlags::CLOEXEC;
        let (socket, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let child = Command::new(&self.path)
            .env_clear()
            .current_dir("/")
            .stdin(theirs)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let resources = self.resources.clone();
        let worker = Worker {
            child,
            socket,
            resources,
        };
        let pid = worker.child.id();
        // Sandboxes have precedence. The process waits for its order, so it has done no work yet.
        if let Some(procs) = &self.group {
            fs::write(procs, pid.to_string()).map_err(|e| {
                io::Error::new(e.kind(), format!("cannot write {}: {e}", procs.display()))
            })?;
        }
        // The kernel derives the lowest I/O priority from this.
        if let Some(pid) = Pid::from_raw(pid.cast_signed()) {
            setpriority_process(Some(pid), NICE)?;
        }
        // If memory runs short, the kernel kills the worker and not the server.
        fs::write(format!("/proc/{pid}/oom_score_adj"), "1000")?;
        Ok(worker)
    }

    /// The SHA-256 of a file.
    ///
    /// # Errors
    /// Returns an error if the process cannot be started or ends early, if the file cannot be read, and
    /// [`ConvertError::Cancelled`] soon after `is_cancelled` returns true.
    pub fn sum(
        &self,
        file: &File,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Digest, ConvertError> {
        let mut worker = self.start()?;
        let order = Order {
            resources: self.resources.clone(),
            task: Task::Sum,
        };
        if let Err(error) = send(worker.socket.as_fd(), &order, &[file.as_fd()]) {
            return Err(worker.end().unwrap_or(ConvertError::Reply(error)));
        }
        match worker.reply(is_cancelled, || Ok(()))? {
            Reply::Sum(digest) => Ok(digest),
            _ => Err(ConvertError::Reply(io::ErrorKind::InvalidData.into())),
        }
    }
}

/// Escapes text of a process that may be compromised.
fn printable(text: &str) -> String {
    let plain = |c: char| if c.is_control() { '?' } else { c };
    text.chars().take(2000).map(plain).collect()
}

/// A running `cube-image`, which converts or hashes one input. Dropping it kills and reaps it.
pub(crate) struct Worker {
    child: Child,
    pub(crate) socket: OwnedFd,
    resources: Resources,
}

impl Worker {
    /// Waits for the reply. Calls `watch` every [`STEP_MS`], and once after the process has finished writing.
    pub(crate) fn reply(
        &mut self,
        is_cancelled: &dyn Fn() -> bool,
        mut watch: impl FnMut() -> Result<(), ConvertError>,
    ) -> Result<Reply, ConvertError> {
        let deadline = Duration::from_secs(self.resources.deadline_seconds);
        let begin = Instant::now();
        loop {
            let has_ended = self.has_message();
            watch()?;
            if has_ended {
                break;
            }
            if is_cancelled() {
                return Err(ConvertError::Cancelled);
            }
            if begin.elapsed() > deadline {
                return Err(ConvertError::Deadline(deadline.as_secs()));
            }
        }
        match receive(self.socket.as_fd()) {
            Ok((Reply::Refused(text), _)) => Err(ConvertError::Refused(printable(&text))),
            Ok((reply, _)) => Ok(reply),
            Err(error) => Err(self.end().unwrap_or(ConvertError::Reply(error))),
        }
    }

    /// Waits for a message or the end of the process, for at most [`STEP_MS`].
    fn has_message(&self) -> bool {
        let mut sources = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
        // A signal handler of the server may interrupt the call.
        poll(&mut sources, STEP_MS).is_ok_and(|ready| ready > 0)
    }

    /// The error with which the process ended, if any. Kills the process if it still runs.
    pub(crate) fn end(&mut self) -> Option<ConvertError> {
        // The socket of a process closes shortly before its exit status is available.
        let begin = Instant::now();
        while self.child.try_wait().ok()?.is_none() && begin.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(5));
        }
        // Harmless after its end.
        let _ = self.child.kill();
        let status = self.child.wait().ok()?;
        match status.signal() {
            None if status.success() => None,
            Some(libc::SIGXCPU) => Some(ConvertError::Cpu(self.resources.cpu_seconds)),
            Some(libc::SIGKILL) => Some(ConvertError::Killed),
            // Rust aborts when an allocation fails. A panic aborts too, but sends a response first.
            Some(libc::SIGABRT) => Some(ConvertError::Memory(self.resources.memory)),
            _ => Some(ConvertError::Ended(status)),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Harmless after its end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_has_the_lowest_priority_and_is_killed_first() {
        let dir = tempfile::tempdir().unwrap();
        let procs = dir.path().join("cgroup.procs");
        // It waits for its standard input, like the converter.
        let program = Program::new(Path::new("/bin/cat"), Resources::default());
        let worker = program.clone().in_group(Some(procs.clone())).start();
        let worker = worker.unwrap();
        let read = |name: &str| fs::read_to_string(format!("/proc/{}/{name}", worker.child.id()));
        let stat = read("stat").unwrap();
        let (_, fields) = stat.rsplit_once(") ").unwrap();
        // The nice value is field 19 in proc(5), and `fields` begins with field 3.
        assert_eq!(fields.split(' ').nth(16), Some("19"), "{stat}");
        assert_eq!(read("oom_score_adj").unwrap().trim(), "1000");
        let moved = fs::read_to_string(&procs).unwrap();
        assert_eq!(moved, worker.child.id().to_string());
        // A worker that would have a normal weight is not started.
        let missing = dir.path().join("missing/cgroup.procs");
        let refused = program.in_group(Some(missing)).start().err().unwrap();
        let ConvertError::Start { source, .. } = refused else {
            panic!("{refused}");
        };
        assert!(source.to_string().contains("missing/cgroup.procs"));
    }
}
