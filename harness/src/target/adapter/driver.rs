//! The thread that owns an adapter's process.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, BufReader, Read, Write},
    os::{fd::AsFd, unix::process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender},
    thread,
    time::{Duration, Instant},
};

use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::{Signal, killpg},
    unistd::Pid,
};

use super::line::{self, Answer, Op, Request};
use crate::{
    clock,
    event::{Failure, FailureCause},
};

/// Kept part of an adapter's standard error, in bytes.
const MAX_STDERR: u64 = 1 << 20;
/// Maximum time for an adapter to read a request.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time for an adapter to end after the end of its standard input.
const END_TIMEOUT: Duration = Duration::from_secs(20);
/// The same for an adapter that has violated the protocol.
const BROKEN_TIMEOUT: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(5);
/// Wait if no pending call can time out.
const IDLE: Duration = Duration::from_secs(3600);

/// A response and the time at which it arrived.
pub(super) type Reply = Result<(Answer, u64), Failure>;

/// Input of the driver.
#[derive(Debug)]
pub(super) enum Message {
    Call {
        request: Request,
        timeout: Duration,
        reply: SyncSender<Reply>,
    },
    /// A line of the adapter, and the time at which it arrived.
    Line(Vec<u8>, u64),
    /// The adapter's standard output ended, with the reason.
    Closed(String),
    /// No further calls follow: end the adapter.
    Finish,
}

/// A call that waits for its response.
struct Pending {
    op: Op,
    deadline: Instant,
    /// `None` for a stop that the driver itself requested.
    reply: Option<SyncSender<Reply>>,
}

impl Pending {
    fn finish(self, reply: Reply) {
        if let Some(to) = self.reply {
            // Fails only if the caller has ended, and callers wait for the reply.
            let _ = to.send(reply);
        }
    }
}

/// Owner of the process and of all pending calls.
pub(super) struct Driver {
    child: Child,
    stdin: Option<ChildStdin>,
    pending: HashMap<u64, Pending>,
    /// Id of the last request.
    last: u64,
    /// Starts that timed out. If the adapter responds to one later, its sandbox is stopped.
    late_starts: Vec<u64>,
    /// Why the adapter can no longer be used.
    broken: Option<String>,
    stderr: PathBuf,
}

impl Driver {
    /// Starts the adapter in its own process group, so that Ctrl-C does not end it before its sandboxes are
    /// stopped.
    pub(super) fn spawn(
        command: &[String],
        stderr: &Path,
        messages: Sender<Message>,
        received: Receiver<Message>,
    ) -> Result<thread::JoinHandle<()>, Failure> {
        let (program, arguments) = command.split_first().ok_or_else(|| Failure {
            cause: FailureCause::Spawn,
            message: "target.command is empty, it must name the adapter's program".to_owned(),
        })?;
        let failed = |e: io::Error| Failure {
            cause: FailureCause::Spawn,
            message: format!("cannot start the adapter {program}: {e}"),
        };
        let log = File::create(stderr).map_err(failed)?;
        let mut child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let stdin = child.stdin.take();
        if let Some(stdin) = &stdin {
            fcntl(stdin, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).map_err(|e| failed(e.into()))?;
        }
        if let (Some(out), Some(err)) = (child.stdout.take(), child.stderr.take()) {
            thread::spawn(move || read_lines(out, &messages));
            thread::spawn(move || keep(err, log));
        }
        let driver = Self {
            child,
            stdin,
            pending: HashMap::new(),
            last: 0,
            late_starts: Vec::new(),
            broken: None,
            stderr: stderr.to_owned(),
        };
        Ok(thread::spawn(move || driver.run(&received)))
    }

    fn run(mut self, received: &Receiver<Message>) {
        loop {
            let next = self.pending.values().map(|call| call.deadline).min();
            let wait = next.map_or(IDLE, |at| at.saturating_duration_since(Instant::now()));
            match received.recv_timeout(wait) {
                Ok(Message::Call {
                    request,
                    timeout,
                    reply,
                }) => self.send(request, timeout, Some(reply)),
                Ok(Message::Line(line, at_ns)) => self.take(&line, at_ns),
                Ok(Message::Closed(why)) => self.fail(&why),
                Ok(Message::Finish) | Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.expire();
        }
        self.end();
    }

    /// Writes a request and adds the call to the pending ones.
    fn send(&mut self, mut request: Request, timeout: Duration, reply: Option<SyncSender<Reply>>) {
        self.last += 1;
        request.id = self.last;
        let call = Pending {
            op: request.op,
            deadline: Instant::now() + timeout,
            reply,
        };
        self.pending.insert(request.id, call);
        if self.broken.is_none()
            && let Err(error) = self.write(&request)
        {
            self.fail(&format!("it does not read its standard input: {error}"));
        }
        if let Some(why) = self.broken.clone() {
            self.fail(&why);
        }
    }

    fn write(&mut self, request: &Request) -> io::Result<()> {
        let stdin = self.stdin.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        let mut line = serde_json::to_vec(request).map_err(io::Error::from)?;
        line.push(b'\n');
        let deadline = Instant::now() + WRITE_TIMEOUT;
        let mut left = line.as_slice();
        while !left.is_empty() {
            match stdin.write(left) {
                Ok(n) => left = &left[n..],
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    let rest = deadline.saturating_duration_since(Instant::now());
                    let bound = PollTimeout::try_from(rest).unwrap_or(PollTimeout::MAX);
                    let mut fds = [PollFd::new(stdin.as_fd(), PollFlags::POLLOUT)];
                    if poll(&mut fds, bound)? == 0 {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Passes a response to its pending call.
    fn take(&mut self, line: &[u8], at_ns: u64) {
        if self.broken.is_some() {
            return;
        }
        let answer: Answer = match serde_json::from_slice(line) {
            Ok(answer) => answer,
            Err(error) => {
                let text = line::printable(&String::from_utf8_lossy(line));
                return self.fail(&format!(
                    "it printed a line that is not a response ({error}): {text}"
                ));
            }
        };
        let Some(call) = self.pending.remove(&answer.id) else {
            return self.unexpected(&answer);
        };
        let reply = match &answer.error {
            None => Ok((answer, at_ns)),
            Some(why) => Err(Failure {
                cause: cause_of(call.op),
                message: format!("the adapter answered: {}", line::printable(why)),
            }),
        };
        call.finish(reply);
    }

    /// Handles a response without a pending call: late, or invalid.
    fn unexpected(&mut self, answer: &Answer) {
        if let Some(position) = self.late_starts.iter().position(|id| *id == answer.id) {
            self.late_starts.swap_remove(position);
            if let Ok(sandbox) = answer.sandbox() {
                let request = Request {
                    sandbox: Some(sandbox),
                    ..Request::new(Op::Stop)
                };
                self.send(request, END_TIMEOUT, None);
            }
        } else if answer.id == 0 || answer.id > self.last {
            self.fail(&format!(
                "it answered request {}, which was not sent",
                answer.id
            ));
        }
    }

    fn expire(&mut self) {
        let now = Instant::now();
        let over = self.pending.iter().filter(|(_, call)| call.deadline <= now);
        let over: Vec<u64> = over.map(|(id, _)| *id).collect();
        for id in over {
            let Some(call) = self.pending.remove(&id) else {
                continue;
            };
            if call.op == Op::Start {
                self.late_starts.push(id);
            }
            let failure = Failure {
                cause: FailureCause::Timeout,
                message: format!(
                    "the adapter did not answer request {id} ({:?}) in time",
                    call.op
                ),
            };
            call.finish(Err(failure));
        }
    }

    /// Fails all pending and future calls.
    fn fail(&mut self, why: &str) {
        self.broken.get_or_insert_with(|| why.to_owned());
        let message = format!(
            "the adapter cannot be used: {why} (its standard error is in {})",
            self.stderr.display()
        );
        for (_, call) in self.pending.drain() {
            let failure = Failure {
                cause: FailureCause::Connect,
                message: message.clone(),
            };
            call.finish(Err(failure));
        }
    }

    /// Closes the adapter's standard input, waits until it has ended, and kills the rest of its process group.
    fn end(&mut self) {
        self.stdin = None;
        let wait = match &self.broken {
            None => END_TIMEOUT,
            Some(_) => BROKEN_TIMEOUT,
        };
        let deadline = Instant::now() + wait;
        let mut status = self.child.try_wait();
        while matches!(status, Ok(None)) && Instant::now() < deadline {
            thread::sleep(POLL);
            status = self.child.try_wait();
        }
        if let Ok(None) = status {
            eprintln!(
                "cube-bench: killed the adapter, which did not exit: its sandboxes may still run"
            );
        }
        if let Ok(pid) = i32::try_from(self.child.id()) {
            // Fails if no process of the group is left.
            let _ = killpg(Pid::from_raw(pid), Signal::SIGKILL);
        }
        let _ = self.child.wait();
    }
}

fn cause_of(op: Op) -> FailureCause {
    match op {
        Op::Hello => FailureCause::Connect,
        Op::Start => FailureCause::Create,
        Op::Exec => FailureCause::Exec,
        Op::Stop => FailureCause::Kill,
    }
}

fn read_lines(from: ChildStdout, messages: &Sender<Message>) {
    let mut from = BufReader::new(from);
    loop {
        let message = match line::read(&mut from) {
            Ok(Some(line)) => Message::Line(line, clock::monotonic_ns()),
            Ok(None) => Message::Closed("it ended, or closed its standard output".to_owned()),
            Err(error) => Message::Closed(error.to_string()),
        };
        let is_last = matches!(message, Message::Closed(_));
        if messages.send(message).is_err() || is_last {
            return;
        }
    }
}

fn keep(from: ChildStderr, mut log: File) {
    let mut from = from;
    let kept = io::copy(&mut from.by_ref().take(MAX_STDERR), &mut log);
    if kept.is_ok() {
        // Reads the rest, so that it never blocks the adapter.
        let _ = io::copy(&mut from, &mut io::sink());
    }
}
