//! A host: the process that runs the cells of one context.
//!
//! It gets a control socket, as its standard input if it is started by the server itself; its standard output and
//! error are pipes to the server: what the code's own children print arrives as what the code itself prints does.

use std::{
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    path::Path,
    process::{Child, Command},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::signal::{Signal, kill, killpg},
    unistd::Pid,
};

use crate::{
    clone_state::Variables,
    language::{Language, Reach, Start},
    message, sys,
    text::Decoder,
    zygote::{Ends, Fork, Zygote},
};

/// Longest line of a host; results are one line each.
const MAX_LINE: usize = 64 << 20;

/// Which of its streams something came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    Stdout,
    Stderr,
}

/// The process and the ends of its streams.
#[derive(Debug)]
pub(crate) struct Host {
    process: Process,
    reach: Reach,
    control: UnixStream,
    /// Received and not yet a line.
    input: Vec<u8>,
    /// Not yet taken by the host.
    output: Vec<u8>,
    stdout: Pipe,
    stderr: Pipe,
}

/// Whose child the process is.
#[derive(Debug)]
enum Process {
    /// The server's; it leads a process group.
    Own(Child),
    Forked(Fork),
}

/// How a host is started.
#[derive(Debug)]
pub(crate) struct Setup<'a> {
    /// The directory of hosts.
    pub(crate) hosts: &'a Path,
    pub(crate) cwd: &'a str,
    pub(crate) how: Start,
    /// Variables beside this process's own.
    pub(crate) env: &'a Variables,
}

#[derive(Debug)]
struct Pipe {
    end: Option<OwnedFd>,
    decoder: Decoder,
}

/// The host is gone, or talks nonsense.
#[derive(Debug)]
pub(crate) struct Gone;

impl Host {
    /// Starts a host. It is ready when it says so.
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
            input: Vec::new(),
            output: Vec::new(),
            stdout,
            stderr,
        })
    }

    /// Queues a request and sends what the socket takes of it.
    pub(crate) fn send(&mut self, request: &[u8]) -> Result<(), Gone> {
        self.output.extend_from_slice(request);
        self.flush()
    }

    /// Sends what is queued.
    pub(crate) fn flush(&mut self) -> Result<(), Gone> {
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

    /// Reads once from the control socket; whole lines are taken by [`Host::next_line`].
    pub(crate) fn receive(&mut self, scratch: &mut [u8]) -> Result<(), Gone> {
        match nix::unistd::read(&self.control, scratch) {
            Ok(0) => Err(Gone),
            Ok(n) => {
                let bytes = scratch.get(..n).unwrap_or_default();
                self.input.extend_from_slice(bytes);
                if self.input.len() <= MAX_LINE {
                    Ok(())
                } else {
                    Err(Gone)
                }
            }
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(()),
            Err(_) => Err(Gone),
        }
    }

    /// The next whole line, without its end.
    pub(crate) fn next_line(&mut self) -> Option<Vec<u8>> {
        let end = self.input.iter().position(|byte| *byte == b'\n')?;
        let mut line: Vec<u8> = self.input.drain(..=end).collect();
        line.pop();
        if self.input.is_empty() {
            // One large result leaves no large buffer.
            self.input.shrink_to(4 << 10);
        }
        Some(line)
    }

    /// Text that was printed; `None` when there is none now.
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
            Ok(n) => Some(pipe.decoder.push(scratch.get(..n).unwrap_or_default())),
            Err(_) => None,
        }
    }

    /// The control socket, and whether something waits to be sent.
    pub(crate) fn control(&self) -> (BorrowedFd<'_>, bool) {
        (self.control.as_fd(), !self.output.is_empty())
    }

    /// A stream's end, unless the other one is closed.
    pub(crate) fn stream(&self, stream: Stream) -> Option<BorrowedFd<'_>> {
        let pipe = match stream {
            Stream::Stdout => &self.stdout,
            Stream::Stderr => &self.stderr,
        };
        pipe.end.as_ref().map(AsFd::as_fd)
    }

    /// Asks what runs to stop; `again` where it was asked before.
    pub(crate) fn interrupt(&mut self, again: bool) {
        if self.reach == Reach::Loop && !again {
            // One that is gone has nothing to stop.
            let _ = self.send(message::INTERRUPT);
            return;
        }
        match &self.process {
            Process::Own(child) => match self.reach {
                Reach::Group | Reach::Loop => signal(child, Signal::SIGINT),
                Reach::Host => {
                    // The process is not waited for before it is killed: its number is its own.
                    let _ = kill(pid(child), Signal::SIGINT);
                }
            },
            Process::Forked(fork) => fork.interrupt(),
        }
    }

    /// Ends the process with all that it started; what is left has to be waited for.
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
        // Interrupts go to all that the code has started.
        .process_group(0);
    sys::end_with_parent(&mut command);
    Ok(command)
}

fn signal(leader: &Child, signal: Signal) {
    // Fails only when all of them are gone.
    let _ = killpg(pid(leader), signal);
}

/// A leader's group has the same number.
fn pid(child: &Child) -> Pid {
    // Process numbers fit.
    Pid::from_raw(i32::try_from(child.id()).unwrap_or(i32::MAX))
}

impl Pipe {
    fn new() -> io::Result<(Self, io::PipeWriter)> {
        let (reader, writer) = io::pipe()?;
        let end = OwnedFd::from(reader);
        fcntl(&end, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        let pipe = Self {
            end: Some(end),
            decoder: Decoder::default(),
        };
        Ok((pipe, writer))
    }
}
