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
    sys::signal::{Signal, kill},
    unistd::{self, Pid},
};

use super::{
    events::{PTY_PIECE, Pipe},
    slots::Key,
};

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

    /// Whether it runs on a terminal.
    pub(crate) fn has_terminal(&self) -> bool {
        self.outputs.iter().any(|output| output.pipe == Pipe::Pty)
    }

    /// Our end of its terminal.
    pub(crate) fn terminal(&self) -> Option<&OwnedFd> {
        let mut outputs = self.outputs.iter();
        let terminal = outputs.find(|output| output.pipe == Pipe::Pty);
        terminal.and_then(|output| output.fd.as_ref())
    }

    /// It is dead. Who still holds its terminal has been hung up and is not waited for; the same goes for
    /// who was to die with it. Everything that is in the pipes now belongs to it.
    pub(crate) fn reaped(&mut self, status: EndEvent) {
        self.status = Some(status);
        self.cut |= self.has_terminal();
        for output in &mut self.outputs {
            output.readable = true;
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
                // A terminal says so when nobody holds its other end.
                Err(_) => self.fd = None,
            }
            // A pipe gives all it has at once, a terminal a line or 4 KiB.
            if len > 0 && self.pipe != Pipe::Pty {
                break;
            }
        }
        (len > 0).then_some((self.pipe, len))
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
    pub(crate) fn new(fd: Option<OwnedFd>) -> Self {
        Self {
            fd,
            writable: true,
            closing: false,
            queue: VecDeque::new(),
        }
    }

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

/// How it ended, in the words of Go's `ProcessState`, from waitpid(2)'s status; `None` when it has not.
pub(crate) fn end_event(status: i32) -> Option<EndEvent> {
    let (exit_code, exited, text) = if libc::WIFEXITED(status) {
        let code = libc::WEXITSTATUS(status);
        (code, true, format!("exit status {code}"))
    } else if libc::WIFSIGNALED(status) {
        let dumped = if libc::WCOREDUMP(status) {
            " (core dumped)"
        } else {
            ""
        };
        let signal = signal_text(libc::WTERMSIG(status));
        (-1, false, format!("signal: {signal}{dumped}"))
    } else {
        return None;
    };
    Some(EndEvent {
        exit_code,
        exited,
        error: (exit_code != 0).then(|| text.clone()),
        status: text,
    })
}

/// Go's names of signals (syscall/zerrors_linux_amd64.go), by number from 1.
const SIGNALS: [&str; 31] = [
    "hangup",
    "interrupt",
    "quit",
    "illegal instruction",
    "trace/breakpoint trap",
    "aborted",
    "bus error",
    "floating point exception",
    "killed",
    "user defined signal 1",
    "segmentation fault",
    "user defined signal 2",
    "broken pipe",
    "alarm clock",
    "terminated",
    "stack fault",
    "child exited",
    "continued",
    "stopped (signal)",
    "stopped",
    "stopped (tty input)",
    "stopped (tty output)",
    "urgent I/O condition",
    "CPU time limit exceeded",
    "file size limit exceeded",
    "virtual timer expired",
    "profiling timer expired",
    "window changed",
    "I/O possible",
    "power failure",
    "bad system call",
];

fn signal_text(signal: i32) -> String {
    let place = usize::try_from(signal).ok().and_then(|n| n.checked_sub(1));
    let name = place.and_then(|place| SIGNALS.get(place));
    name.map_or_else(|| format!("signal {signal}"), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_told_as_go_tells_them() {
        let told = |status| {
            let end = end_event(status)?;
            Some((end.exit_code, end.exited, end.status, end.error.is_some()))
        };
        let text = |text: &str| text.to_owned();
        assert_eq!(told(0), Some((0, true, text("exit status 0"), false)));
        assert_eq!(told(3 << 8), Some((3, true, text("exit status 3"), true)));
        assert_eq!(told(9), Some((-1, false, text("signal: killed"), true)));
        let aborted = text("signal: aborted (core dumped)");
        assert_eq!(told(0x80 | 6), Some((-1, false, aborted, true)));
        let unnamed = text("signal: signal 34");
        assert_eq!(told(34), Some((-1, false, unnamed, true)));
        // Stopped, and going on again.
        assert_eq!((told(0x137f), told(0xffff)), (None, None));
        for (number, name) in [
            (13, "broken pipe"),
            (28, "window changed"),
            (31, "bad system call"),
        ] {
            assert_eq!(signal_text(number), name);
        }
    }
}
