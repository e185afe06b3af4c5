//! A process that a caller has started, and its pipes.
//!
//! ```text
//! running ── reaped, pipes at their end ──► ended ── 30 s ──► forgotten
//!    └─ killed by the agent: pipes are emptied once, their end is not awaited ──┘
//! ```
//! Output is read only while every follower has room, so a slow reader blocks the process on its full pipe and
//! costs no memory. Without followers, output is read and dropped: a process never blocks because its caller is
//! gone.

use std::{
    collections::VecDeque,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use envd::{EndEvent, ProcessConfig};
use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
    unistd::{self, Pid},
};

use transport::Key;

use super::events::{PTY_PIECE, Pipe};

/// How long the status of an ended process is kept.
pub(crate) const KEEP_END: Duration = Duration::from_secs(30);

/// A process that a caller has started.
pub(crate) struct Process {
    pub(crate) pid: i32,
    /// Empty after the end.
    pub(crate) config: ProcessConfig,
    pub(crate) tag: Option<String>,
    pub(crate) stdin: Stdin,
    pub(crate) outputs: [Output; 2],
    /// Connections that receive its events.
    pub(crate) followers: Vec<Key>,
    /// The connection that started it.
    pub(crate) starter: Key,
    /// When it is killed; `None` without a timeout.
    pub(crate) deadline: Option<Instant>,
    /// It was sent SIGKILL or SIGTERM, or had a terminal when it was reaped: descendants that hold its outputs open are
    /// not waited for.
    pub(crate) cut: bool,
    /// Its exit status, once reaped.
    pub(crate) status: Option<EndEvent>,
    /// When its end was reported, after it had been reaped and its output was complete.
    pub(crate) ended: Option<Instant>,
}

/// The agent's end of a standard input, and the bytes to be written to it.
pub(crate) struct Stdin {
    pub(crate) fd: Option<OwnedFd>,
    pub(crate) writable: bool,
    /// Close `fd` once the queue is empty.
    pub(crate) closing: bool,
    pub(crate) queue: VecDeque<Input>,
}

/// The bytes of one message, and the connection that sent it. The first `written` bytes have been written.
pub(crate) struct Input {
    pub(crate) conn: Key,
    pub(crate) bytes: Vec<u8>,
    pub(crate) written: usize,
}

/// The agent's end of an output.
pub(crate) struct Output {
    pub(crate) pipe: Pipe,
    /// `None` after end-of-file.
    pub(crate) fd: Option<OwnedFd>,
    pub(crate) readable: bool,
}

impl Process {
    /// Sends a signal to its process group. Does nothing once it has been reaped.
    pub(crate) fn signal(&mut self, signal: Signal) -> Result<(), Errno> {
        if matches!(signal, Signal::SIGKILL | Signal::SIGTERM) {
            self.cut = true;
        }
        // The PID is valid until the process is reaped.
        match self.status {
            None => kill(Pid::from_raw(-self.pid), signal),
            Some(_) => Ok(()),
        }
    }

    pub(crate) fn has_terminal(&self) -> bool {
        self.outputs.iter().any(|output| output.pipe == Pipe::Pty)
    }

    /// The agent's end of its terminal.
    pub(crate) fn terminal(&self) -> Option<&OwnedFd> {
        let mut outputs = self.outputs.iter();
        let terminal = outputs.find(|output| output.pipe == Pipe::Pty);
        terminal.and_then(|output| output.fd.as_ref())
    }

    /// Records its exit status. Bytes that are already in the pipes are still sent. Descendants that hold its terminal
    /// got SIGHUP and are not waited for.
    pub(crate) fn reaped(&mut self, status: EndEvent) {
        self.status = Some(status);
        self.cut |= self.has_terminal();
        for output in &mut self.outputs {
            output.readable = true;
        }
    }

    /// Whether its end has not been reported yet, so that it can still be followed.
    pub(crate) fn is_running(&self) -> bool {
        self.ended.is_none()
    }

    /// Reads one piece of output into `scratch`. Returns the stream and the length of the piece; `None` if there is
    /// nothing to read.
    pub(crate) fn read(&mut self, scratch: &mut [u8]) -> Option<(Pipe, usize)> {
        self.outputs
            .iter_mut()
            .find_map(|output| output.read(scratch))
    }

    /// Whether it has been reaped and its output is complete.
    pub(crate) fn is_over(&self) -> bool {
        let silent = |output: &Output| output.fd.is_none() || (self.cut && !output.readable);
        self.status.is_some() && self.outputs.iter().all(silent)
    }

    /// Frees everything that an ended process does not need.
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
    pub(crate) fn new(pipe: Pipe, fd: Option<OwnedFd>) -> Self {
        Self {
            pipe,
            fd,
            readable: false,
        }
    }

    fn read(&mut self, scratch: &mut [u8]) -> Option<(Pipe, usize)> {
        let most = match self.pipe {
            Pipe::Stdout | Pipe::Stderr => scratch.len(),
            Pipe::Pty => scratch.len().min(PTY_PIECE),
        };
        let mut len = 0;
        while let Some(fd) = self.fd.as_ref().filter(|_| self.readable && len < most) {
            match unistd::read(fd, scratch.get_mut(len..most).unwrap_or_default()) {
                Ok(0) => self.fd = None,
                Ok(n) => len += n,
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => self.readable = false,
                // A terminal returns EIO once its other end is closed.
                Err(_) => self.fd = None,
            }
            // One read of a pipe returns all that it holds, up to `most`; one read of a terminal returns at most a line
            // or 4 KiB.
            if len > 0 && self.pipe != Pipe::Pty {
                break;
            }
        }
        (len > 0).then_some((self.pipe, len))
    }
}

/// The outcome of a connection's input.
pub(crate) enum Written {
    /// All bytes are in the pipe.
    Done(Key),
    /// The pipe has no reader, or the agent has closed its end.
    Broken(Key),
}

impl Stdin {
    pub(crate) fn new(fd: Option<OwnedFd>) -> Self {
        Self {
            fd,
            writable: true,
            closing: false,
            queue: VecDeque::new(),
        }
    }

    /// Writes until one input is finished or the pipe is full. Returns the outcome of the finished input; `None` if
    /// none is finished.
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
