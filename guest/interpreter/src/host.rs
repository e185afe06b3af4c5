//! A host: the process that runs the cells of one context.
//!
//! It gets a control socket: as its standard input if the server starts it directly, as a passed descriptor if the
//! zygote forks it. Its standard output and error are pipes to the server, so output of its child processes arrives
//! like that of the code itself.

use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    process::{Child, Command},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::{
        epoll::EpollFlags,
        signal::{Signal, kill, killpg},
    },
    unistd::Pid,
};
use transport::{Key, Reactor, Token};

use crate::{
    language::{Language, Reach},
    message,
    setup::Setup,
    sys,
    text::Decoder,
    zygote::{Ends, Fork, Zygote},
};

/// Longest line from a host in bytes. A result is one line.
const MAX_LINE: usize = 64 << 20;

/// A standard stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    Stdout,
    Stderr,
}

/// A polled descriptor of a host, as a number of [`Token::Service`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Source {
    Control,
    Stdout,
    Stderr,
}

impl Source {
    /// The source with that number.
    pub(crate) fn find(number: u8) -> Option<Self> {
        let all = [Self::Control, Self::Stdout, Self::Stderr];
        all.get(usize::from(number)).copied()
    }

    fn token(self, context: Key) -> Token {
        Token::Service(self as u8, context)
    }
}

/// The process and the server's ends of its streams.
#[derive(Debug)]
pub(crate) struct Host {
    process: Process,
    reach: Reach,
    control: UnixStream,
    control_ready: Readiness,
    /// Received bytes of an incomplete line.
    input: Vec<u8>,
    /// Bytes that the host has not taken yet.
    output: Vec<u8>,
    /// Whether the poller reports room on the control socket.
    watches_room: bool,
    stdout: Pipe,
    stderr: Pipe,
}

/// The events that an edge-triggered poller has reported for a descriptor. `readable` is cleared when a read has
/// emptied it.
#[derive(Clone, Copy, Debug, Default)]
struct Readiness {
    readable: bool,
    hangup: bool,
}

impl Readiness {
    fn mark(&mut self, flags: EpollFlags) {
        let gone = EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR | EpollFlags::EPOLLRDHUP;
        self.hangup |= flags.intersects(gone);
        self.readable |= self.hangup || flags.contains(EpollFlags::EPOLLIN);
    }

    /// A short read has emptied the descriptor. After a hang-up, a further read must still return the end of input.
    fn after_read(&mut self, read: usize, wanted: usize) {
        self.readable = read == wanted || self.hangup;
    }
}

/// The host's process, by its parent.
#[derive(Debug)]
enum Process {
    /// The server's child, which leads a process group.
    Own(Child),
    Forked(Fork),
}

/// The reading end of a standard stream.
#[derive(Debug)]
struct Pipe {
    /// `None` after end-of-file.
    end: Option<OwnedFd>,
    ready: Readiness,
    decoder: Decoder,
}

/// The host's control socket is closed or broken, or the host has sent a line longer than [`MAX_LINE`].
#[derive(Debug)]
pub(crate) struct Gone;

impl Host {
    /// Starts a host. The host sends a line once it is ready.
    pub(crate) fn start(
        language: &Language,
        setup: &Setup<'_>,
        zygote: &mut Zygote,
    ) -> io::Result<Self> {
        let (control, theirs) = UnixStream::pair()?;
        control.set_nonblocking(true)?;
        let (stdout, stdout_writer) = Pipe::new()?;
        let (stderr, stderr_writer) = Pipe::new()?;
        let process = match language {
            Language::Python => {
                let ends = Ends {
                    control: theirs.as_fd(),
                    stdout: stdout_writer.as_fd(),
                    stderr: stderr_writer.as_fd(),
                };
                Process::Forked(zygote.fork(setup, &ends)?)
            }
            Language::JavaScript
            | Language::TypeScript
            | Language::Java
            | Language::Bash
            | Language::Kernel(_) => {
                let mut command = command(language, setup)?;
                command
                    .stdin(OwnedFd::from(theirs))
                    .stdout(stdout_writer)
                    .stderr(stderr_writer);
                Process::Own(command.spawn()?)
            }
        };
        Ok(Self {
            process,
            reach: language.reach(),
            control,
            control_ready: Readiness::default(),
            input: Vec::new(),
            output: Vec::new(),
            watches_room: false,
            stdout,
            stderr,
        })
    }

    /// Adds the host's descriptors to the poller.
    pub(crate) fn watch(&self, io: &Reactor, context: Key) -> Result<(), Errno> {
        let control = EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP;
        io.watch(&self.control, Source::Control.token(context), control)?;
        for (source, pipe) in [
            (Source::Stdout, &self.stdout),
            (Source::Stderr, &self.stderr),
        ] {
            if let Some(end) = &pipe.end {
                io.watch(end, source.token(context), EpollFlags::EPOLLIN)?;
            }
        }
        Ok(())
    }

    /// Records that a descriptor is ready.
    pub(crate) fn mark(&mut self, source: Source, flags: EpollFlags) {
        match source {
            Source::Control => self.control_ready.mark(flags),
            Source::Stdout => self.stdout.ready.mark(flags),
            Source::Stderr => self.stderr.ready.mark(flags),
        }
    }

    /// Whether a descriptor has something to read, as far as the poller has reported.
    pub(crate) fn is_readable(&self) -> bool {
        let pipes = [&self.stdout, &self.stderr];
        self.control_ready.readable
            || pipes
                .iter()
                .any(|pipe| pipe.ready.readable && pipe.end.is_some())
    }

    /// Queues a request and sends as much as the socket takes.
    pub(crate) fn send(&mut self, request: &[u8]) -> Result<(), Gone> {
        self.output.extend_from_slice(request);
        self.write()
    }

    /// Whether part of a request has not been sent.
    pub(crate) fn has_pending_request(&self) -> bool {
        !self.output.is_empty()
    }

    /// Sends as much of the queue as the socket takes, and has the poller report when a full socket has room.
    pub(crate) fn flush(&mut self, io: &Reactor, context: Key) -> Result<(), Gone> {
        self.write()?;
        if self.has_pending_request() && !self.watches_room {
            let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLOUT;
            let token = Source::Control.token(context);
            io.modify(&self.control, token, flags).map_err(|_| Gone)?;
            self.watches_room = true;
        }
        Ok(())
    }

    fn write(&mut self) -> Result<(), Gone> {
        while !self.output.is_empty() {
            match nix::unistd::write(&self.control, &self.output) {
                Ok(n) => drop(self.output.drain(..n)),
                Err(Errno::EAGAIN) => break,
                Err(Errno::EINTR) => {}
                Err(_) => return Err(Gone),
            }
        }
        Ok(())
    }

    /// Reads once from the control socket. [`Host::next_line`] returns the complete lines.
    pub(crate) fn receive(&mut self, scratch: &mut [u8]) -> Result<(), Gone> {
        if !self.control_ready.readable {
            return Ok(());
        }
        match nix::unistd::read(&self.control, scratch) {
            Ok(0) => Err(Gone),
            Ok(n) => {
                self.control_ready.after_read(n, scratch.len());
                let bytes = scratch.get(..n).unwrap_or_default();
                self.input.extend_from_slice(bytes);
                if self.input.len() <= MAX_LINE {
                    Ok(())
                } else {
                    Err(Gone)
                }
            }
            Err(Errno::EAGAIN) => {
                self.control_ready.readable = false;
                Ok(())
            }
            Err(Errno::EINTR) => Ok(()),
            Err(_) => Err(Gone),
        }
    }

    /// The next complete line, without the line end.
    pub(crate) fn next_line(&mut self) -> Option<Vec<u8>> {
        let end = self.input.iter().position(|byte| *byte == b'\n')?;
        let mut line: Vec<u8> = self.input.drain(..=end).collect();
        line.pop();
        if self.input.is_empty() {
            // A large result must not leave a large buffer.
            self.input.shrink_to(4 << 10);
        }
        Some(line)
    }

    /// Reads once from a standard stream; `None` if nothing is available or the stream has ended. Tries to read even if
    /// the poller has reported nothing, because it may not have reported the latest output yet.
    pub(crate) fn read(&mut self, stream: Stream, scratch: &mut [u8]) -> Option<String> {
        let pipe = match stream {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        };
        let end = pipe.end.as_ref()?;
        match nix::unistd::read(end, scratch) {
            Ok(0) => {
                pipe.end = None;
                Some(pipe.decoder.finish()).filter(|text| !text.is_empty())
            }
            Ok(n) => {
                pipe.ready.after_read(n, scratch.len());
                Some(pipe.decoder.push(scratch.get(..n).unwrap_or_default()))
            }
            Err(_) => {
                pipe.ready.readable = false;
                None
            }
        }
    }

    /// Whether a standard stream has output, as far as the poller has reported.
    pub(crate) fn has_output(&self, stream: Stream) -> bool {
        let pipe = match stream {
            Stream::Stdout => &self.stdout,
            Stream::Stderr => &self.stderr,
        };
        pipe.ready.readable
    }

    /// Interrupts the running cell; `again` if it has been interrupted before.
    pub(crate) fn interrupt(&mut self, again: bool) {
        if self.reach == Reach::Loop && !again {
            // Fails only if the host has ended, and then nothing runs.
            let _ = self.send(message::INTERRUPT);
            return;
        }
        match &self.process {
            Process::Own(child) => match self.reach {
                Reach::Group | Reach::Loop => signal(child, Signal::SIGINT),
                Reach::Host => {
                    // The PID is valid: the process is reaped only after it was killed.
                    let _ = kill(pid(child), Signal::SIGINT);
                }
            },
            Process::Forked(fork) => fork.interrupt(),
        }
    }

    /// Kills the process and its process group. Returns the process if it is the server's own child, which the caller
    /// must reap.
    pub(crate) fn kill(self) -> Option<Child> {
        match self.process {
            Process::Own(child) => {
                signal(&child, Signal::SIGKILL);
                Some(child)
            }
            Process::Forked(fork) => {
                fork.end();
                None
            }
        }
    }
}

fn command(language: &Language, setup: &Setup<'_>) -> io::Result<Command> {
    let words = language.command(setup.hosts, setup.how);
    let (program, arguments) = words.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .current_dir(setup.cwd)
        .envs(setup.env)
        // Interrupts go to all processes that the code has started.
        .process_group(0);
    sys::end_with_parent(&mut command);
    Ok(command)
}

fn signal(leader: &Child, signal: Signal) {
    // Fails only if all processes of the group have ended.
    let _ = killpg(pid(leader), signal);
}

/// The PID, which is also the ID of the group that the process leads.
fn pid(child: &Child) -> Pid {
    // PIDs fit in 22 bits.
    Pid::from_raw(i32::try_from(child.id()).unwrap_or(i32::MAX))
}

impl Pipe {
    fn new() -> io::Result<(Self, io::PipeWriter)> {
        let (reader, writer) = io::pipe()?;
        let end = OwnedFd::from(reader);
        fcntl(&end, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        let pipe = Self {
            end: Some(end),
            ready: Readiness::default(),
            decoder: Decoder::default(),
        };
        Ok((pipe, writer))
    }
}
