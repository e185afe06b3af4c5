//! A process that this thread traces with ptrace(2). Waits until it stops or ends.

use std::{
    cell::Cell,
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::{
        signal::Signal,
        wait::{Id, WaitPidFlag, WaitStatus, waitid},
    },
    unistd::Pid,
};

/// Timeout of a single system call, long enough for an emulated host.
pub(super) const TIMEOUT: Duration = Duration::from_secs(60);

/// The reason why an attempt ended without success.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::confinement) enum Stop {
    /// The system call returned an error.
    Refused(&'static str, Errno),
    /// A signal killed the process during the system call.
    Killed(&'static str, Signal),
    /// All system calls succeeded, but had no effect.
    Futile(&'static str),
    /// The attempt could not be made, or a result was not the expected one.
    Broken(String),
}

impl Stop {
    pub(in crate::confinement) fn describe(&self) -> String {
        match self {
            Self::Refused(call, errno) => format!("{call}: {errno:?}"),
            Self::Killed(call, signal) => format!("{call}: killed by {signal}"),
            Self::Futile(what) => format!("no error, and {what}"),
            Self::Broken(what) => what.clone(),
        }
    }
}

pub(in crate::confinement) type Try<T> = Result<T, Stop>;

pub(super) fn broken(what: &str, error: impl std::fmt::Display) -> Stop {
    Stop::Broken(format!("{what}: {error}"))
}

/// Relation of the tracer to the process, which decides who reaps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::confinement) enum Relation {
    /// The tracer is also the parent, and reaps the process elsewhere.
    Parent,
    /// Another process is the parent. The kernel notifies it of the end after the tracer has reaped the process.
    Other,
}

/// The reason why a process is stopped.
pub(super) enum Halt {
    /// Entry or exit of a system call.
    Call,
    /// One of the ptrace events that the options enable.
    Event(i32),
    /// A signal, which will not be delivered.
    Signal,
}

#[derive(Debug)]
pub(super) struct Tracee {
    pub(super) pid: Pid,
    relation: Relation,
    /// Whether the process has ended. Its id may then belong to another process.
    pub(super) ended: Cell<bool>,
}

impl Tracee {
    pub(super) fn new(pid: Pid, relation: Relation) -> Self {
        let ended = Cell::new(false);
        Self {
            pid,
            relation,
            ended,
        }
    }

    /// Waits until the process stops or ends. `call` names the system call in errors. Reaps a process that has ended,
    /// unless the tracer is its parent.
    pub(super) fn next_halt(&self, call: &'static str) -> Try<Halt> {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WSTOPPED | WaitPidFlag::__WALL;
        let flags = flags | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        let deadline = Instant::now() + TIMEOUT;
        let mut polls = 0_u32;
        loop {
            let status = waitid(Id::Pid(self.pid), flags);
            match status.map_err(|e| broken("cannot wait for the VMM", e))? {
                WaitStatus::StillAlive if Instant::now() > deadline => {
                    return Err(Stop::Broken(format!(
                        "{call}: no answer within {TIMEOUT:?}"
                    )));
                }
                WaitStatus::StillAlive => pause(&mut polls),
                WaitStatus::Signaled(_, signal, _) => {
                    self.reap();
                    return Err(Stop::Killed(call, signal));
                }
                WaitStatus::Exited(_, status) => {
                    self.reap();
                    return Err(Stop::Broken(format!("{call}: exited with {status}")));
                }
                stopped => {
                    self.consume(WaitPidFlag::WSTOPPED);
                    return Ok(halt(stopped));
                }
            }
        }
    }

    fn reap(&self) {
        self.ended.set(true);
        if self.relation == Relation::Other {
            self.consume(WaitPidFlag::WEXITED);
        }
    }

    /// Consumes a status that `next_halt` has only peeked at.
    fn consume(&self, of: WaitPidFlag) {
        // The status is known to be available, so this returns at once.
        let _ = waitid(
            Id::Pid(self.pid),
            of | WaitPidFlag::__WALL | WaitPidFlag::WNOHANG,
        );
    }
}

/// Waits between two polls, briefly at first because most system calls return at once.
fn pause(polls: &mut u32) {
    *polls += 1;
    match *polls {
        ..200 => thread::yield_now(),
        _ => thread::sleep(Duration::from_micros(200)),
    }
}

fn halt(status: WaitStatus) -> Halt {
    match status {
        WaitStatus::PtraceSyscall(_) => Halt::Call,
        WaitStatus::PtraceEvent(_, _, event) if event != 0 => Halt::Event(event),
        _ => Halt::Signal,
    }
}
