//! A process that was started for somebody, and its pipes.
//!
//! ```text
//! running ── reaped, pipes at their end ──► ended ── 30 s ──► forgotten
//!    └─ signalled to death: pipes are emptied once, not waited for ──┘
//! ```
//! Output is read only while every follower has room, so a slow reader stops the process by its full pipe
//! and costs no memory. Without followers output is read and dropped: a process never stands still because
//! its caller went away.

use std::{
    collections::VecDeque,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use api_types::envd::{EndEvent, ProcessConfig};
use nix::{
    errno::Errno,
    sys::{
        signal::{Signal, kill},
        wait::WaitStatus,
    },
    unistd::{self, Pid},
};

use super::{events::Pipe, slots::Key};

/// How long the end of a process can be asked for.
pub(crate) const KEEP_END: Duration = Duration::from_secs(30);

/// A process.
pub(crate) struct Process {
    pub(crate) pid: i32,
    /// Emptied at the end.
    pub(crate) config: ProcessConfig,
    pub(crate) tag: Option<String>,
    pub(crate) stdin: Stdin,
    pub(crate) outputs: [Output; 2],
    /// Connections that get its events.
    pub(crate) followers: Vec<Key>,
    /// Which of them started it.
    pub(crate) starter: Key,
    /// When it is killed.
    pub(crate) deadline: Option<Instant>,
    /// It was sent a deadly signal: descendants that hold its pipes are not waited for.
    pub(crate) cut: bool,
    /// How it ended, once reaped.
    pub(crate) status: Option<EndEvent>,
    /// When everything was over.
    pub(crate) ended: Option<Instant>,
}

/// The writing end of a standard input.
pub(crate) struct Stdin {
    pub(crate) fd: Option<OwnedFd>,
    pub(crate) writable: bool,
    /// To be closed once everything is written.
    pub(crate) closing: bool,
    /// What waits to be written, and for whom.
    pub(crate) queue: VecDeque<Input>,
}

/// Bytes of one `SendInput`.
pub(crate) struct Input {
    pub(crate) conn: Key,
    pub(crate) bytes: Vec<u8>,
    pub(crate) written: usize,
}

/// The reading end of an output.
pub(crate) struct Output {
    pub(crate) pipe: Pipe,
    /// Absent after its end.
    pub(crate) fd: Option<OwnedFd>,
    pub(crate) readable: bool,
}

impl Process {
    /// Sends a signal to it and to what it started in its session's first group.
    pub(crate) fn signal(&mut self, signal: Signal) -> Result<(), Errno> {
        if matches!(signal, Signal::SIGKILL | Signal::SIGTERM) {
            self.cut = true;
        }
        // Not yet reaped, so the number is still its own.
        match self.status {
            None => kill(Pid::from_raw(-self.pid), signal),
            Some(_) => Ok(()),
        }
    }

    /// Whether it can still be signalled and followed.
    pub(crate) fn is_running(&self) -> bool {
        self.ended.is_none()
    }

    /// Reads one piece of output: which stream, and how many bytes of `scratch`.
    pub(crate) fn read(&mut self, scratch: &mut [u8]) -> Option<(Pipe, usize)> {
        self.outputs
            .iter_mut()
            .find_map(|output| output.read(scratch))
    }

    /// Whether nothing more can come out of it.
    pub(crate) fn is_over(&self) -> bool {
        let silent = |output: &Output| output.fd.is_none() || (self.cut && !output.readable);
        self.status.is_some() && self.outputs.iter().all(silent)
    }

    /// Gives everything back that an ended process does not need.
    pub(crate) fn end(&mut self, now: Instant) {
        self.ended = Some(now);
        self.deadline = None;
        self.config = ProcessConfig::default();
        self.followers = Vec::new();
        self.stdin.fd = None;
        for output in &mut self.outputs {
            output.fd = None;
        }
    }
}

impl Output {
    fn read(&mut self, scratch: &mut [u8]) -> Option<(Pipe, usize)> {
        while let Some(fd) = self.fd.as_ref().filter(|_| self.readable) {
            match unistd::read(fd, scratch) {
                Ok(0) => self.fd = None,
                Ok(n) => return Some((self.pipe, n)),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => self.readable = false,
                Err(_) => self.fd = None,
            }
        }
        None
    }
}

/// What became of input.
pub(crate) enum Written {
    /// All of it is in the pipe.
    Done(Key),
    /// Nobody reads any more.
    Broken(Key),
}

impl Stdin {
    /// Writes until something is done, or the pipe is full.
    pub(crate) fn write(&mut self) -> Option<Written> {
        while let Some(input) = self.queue.front_mut() {
            let conn = input.conn;
            let Some(fd) = &self.fd else {
                self.queue.pop_front();
                return Some(Written::Broken(conn));
            };
            let rest = input.bytes.get(input.written..).unwrap_or_default();
            if rest.is_empty() {
                self.queue.pop_front();
                return Some(Written::Done(conn));
            }
            if !self.writable {
                return None;
            }
            match unistd::write(fd, rest) {
                Ok(n) => input.written += n,
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => self.writable = false,
                Err(_) => self.fd = None,
            }
        }
        if self.closing {
            self.fd = None;
        }
        None
    }
}

/// How it ended, in the words of Go's `ProcessState`; `None` when it has not.
pub(crate) fn end_event(status: WaitStatus) -> Option<EndEvent> {
    let (exit_code, exited, text) = match status {
        WaitStatus::Exited(_, code) => (code, true, format!("exit status {code}")),
        WaitStatus::Signaled(_, signal, dumped) => {
            let dumped = if dumped { " (core dumped)" } else { "" };
            (
                -1,
                false,
                format!("signal: {}{dumped}", signal_text(signal)),
            )
        }
        _ => return None,
    };
    Some(EndEvent {
        exit_code,
        exited,
        error: (exit_code != 0).then(|| text.clone()),
        status: text,
    })
}

/// Go's names of signals (syscall/zerrors_linux_amd64.go).
fn signal_text(signal: Signal) -> &'static str {
    match signal {
        Signal::SIGHUP => "hangup",
        Signal::SIGINT => "interrupt",
        Signal::SIGQUIT => "quit",
        Signal::SIGILL => "illegal instruction",
        Signal::SIGTRAP => "trace/breakpoint trap",
        Signal::SIGABRT => "aborted",
        Signal::SIGBUS => "bus error",
        Signal::SIGFPE => "floating point exception",
        Signal::SIGKILL => "killed",
        Signal::SIGUSR1 => "user defined signal 1",
        Signal::SIGSEGV => "segmentation fault",
        Signal::SIGUSR2 => "user defined signal 2",
        Signal::SIGPIPE => "broken pipe",
        Signal::SIGALRM => "alarm clock",
        Signal::SIGTERM => "terminated",
        Signal::SIGSTKFLT => "stack fault",
        Signal::SIGXCPU => "CPU time limit exceeded",
        Signal::SIGXFSZ => "file size limit exceeded",
        Signal::SIGVTALRM => "virtual timer expired",
        Signal::SIGPROF => "profiling timer expired",
        Signal::SIGIO => "I/O possible",
        Signal::SIGPWR => "power failure",
        Signal::SIGSYS => "bad system call",
        other => other.as_str(),
    }
}
