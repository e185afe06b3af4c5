//! Input for processes: `SendInput`, one message per request, and `StreamInput`, many on one connection.
//!
//! Bytes wait in the process's queue until its pipe or terminal takes them. A connection has at most one message in
//! that queue. Once it is written, a `SendInput` is answered, and a `StreamInput` is read further. A sender that is
//! faster than the process is therefore stopped by its own full socket.

use std::time::{Duration, Instant};

use envd::{
    CloseStdinRequest,
    ConnectCode::{DeadlineExceeded, FailedPrecondition, InvalidArgument},
    ConnectError, Decoded, Framing, ProcessInput, SendInputRequest, StreamInputRequest, frame,
};

use transport::{Exchange, Gone, Key, Step};

use super::{
    super::{
        answer, call,
        core::{Conn, Core, Job},
        envelope,
        head::Head,
        message::{self, error},
    },
    child::{Input, Process},
    select::{Ended, select},
};

/// Longest message of a stream in bytes.
const MAX_MESSAGE: u32 = 4 << 20;

pub(crate) const NO_TERMINAL: &str = "the process has no terminal: its input goes to stdin";
pub(crate) const HAS_TERMINAL: &str = "the process has a terminal: its input goes to pty";

/// A `SendInput` call whose bytes are in the process's queue.
struct SentInput {
    process: Key,
}

/// A `StreamInput` call whose request is being read.
struct InputStream {
    body: Framing,
    /// Bytes of an incomplete message.
    held: Vec<u8>,
    /// The process that the first message selects.
    process: Option<Key>,
    /// The last message is still in the process's queue.
    waiting: bool,
    /// The body has ended.
    ended: bool,
}

/// When a call times out; `None` without a timeout.
fn deadline(timeout: Option<Duration>) -> Option<Instant> {
    timeout.and_then(|timeout| Instant::now().checked_add(timeout))
}

/// The bytes of an input. Fails if the process does not accept that kind of input, or its input is closed.
fn bytes_for(process: &Process, input: ProcessInput) -> Result<Vec<u8>, ConnectError> {
    let bytes = match (input.stdin, input.pty) {
        (None, None) => return error(InvalidArgument, "no input"),
        (Some(_), _) if process.has_terminal() => {
            return error(FailedPrecondition, HAS_TERMINAL);
        }
        (Some(stdin), _) => stdin.0,
        (None, Some(pty)) if process.has_terminal() => pty.0,
        (None, Some(_)) => return error(FailedPrecondition, NO_TERMINAL),
    };
    if process.stdin.fd.is_none() || process.stdin.closing {
        return error(FailedPrecondition, "stdin not enabled or closed");
    }
    Ok(bytes)
}

/// Queues input for a process on behalf of a connection.
fn push(core: &mut Core, conn: Key, key: Key, input: ProcessInput) -> Result<(), ConnectError> {
    let Some(process) = core.processes.get_mut(key).filter(|p| p.is_running()) else {
        return Err(broken());
    };
    let bytes = bytes_for(process, input)?;
    process.stdin.queue.push_back(Input {
        conn,
        bytes,
        written: 0,
    });
    core.enqueue(Job::Process, key);
    Ok(())
}

/// Removes a connection's unwritten bytes from the process's queue.
fn take_back(core: &mut Core, conn: Key, process: Option<Key>) {
    if let Some(process) = process.and_then(|process| core.processes.get_mut(process)) {
        process.stdin.queue.retain(|input| input.conn != conn);
    }
}

fn broken() -> ConnectError {
    ConnectError::new(FailedPrecondition, "the process does not read its input")
}

fn late() -> ConnectError {
    ConnectError::new(DeadlineExceeded, "context deadline exceeded")
}

/// `SendInput`. The call is answered once the input is in the pipe.
#[cold]
#[inline(never)]
pub(crate) fn send(
    core: &mut Core,
    conn_key: Key,
    conn: &mut Conn,
    head: &Head,
    request: SendInputRequest,
) -> Result<(), ConnectError> {
    let process = select(core, &request.process, Ended::Excluded)?;
    push(core, conn_key, process, request.input)?;
    conn.wake = deadline(head.fields.timeout);
    conn.begin(SentInput { process });
    Ok(())
}

/// `CloseStdin`: closes the input after everything in the queue is written.
pub(crate) fn close(core: &mut Core, request: &CloseStdinRequest) -> Result<(), ConnectError> {
    let key = select(core, &request.process, Ended::Excluded)?;
    if let Some(process) = core.processes.get_mut(key) {
        if process.has_terminal() {
            // The end of a terminal's input is a key (^D), not a closed descriptor.
            return error(FailedPrecondition, HAS_TERMINAL);
        }
        process.stdin.closing = true;
    }
    core.enqueue(Job::Process, key);
    Ok(())
}

/// Called when all of a connection's input is in the pipe.
pub(crate) fn written(conn: &mut Conn) {
    if let Some(stream) = conn.exchange::<InputStream>() {
        stream.waiting = false;
    } else if conn.exchange::<SentInput>().is_some() {
        answer::success(conn, b"{}");
    }
}

/// Called when a process's input was closed before all of a connection's bytes were written.
pub(crate) fn unread(conn: &mut Conn) {
    if conn.exchange::<InputStream>().is_some() {
        answer::abort_stream(conn, broken());
    } else if conn.exchange::<SentInput>().is_some() {
        answer::failure(conn, &broken());
    }
}

/// Begins to read a `StreamInput` whose head has arrived.
#[cold]
#[inline(never)]
pub(crate) fn begin(conn: &mut Conn, head: &Head, body: &Framing) {
    if !call::begin_request_stream(conn, head) {
        return;
    }
    conn.wake = deadline(head.fields.timeout);
    conn.begin(InputStream {
        body: body.clone(),
        held: Vec::new(),
        process: None,
        waiting: false,
        ended: false,
    });
}

impl Exchange<Core> for SentInput {
    fn step(&mut self, _: &mut Core, _: Key, conn: &mut Conn) -> Result<Step, Gone> {
        conn.wait()
    }

    #[cold]
    fn expire(
        &mut self,
        core: &mut Core,
        key: Key,
        conn: &mut Conn,
        _: Instant,
    ) -> Result<(), Gone> {
        take_back(core, key, Some(self.process));
        answer::failure(conn, &late());
        Ok(())
    }
}

impl Exchange<Core> for InputStream {
    /// Takes the next message, or reads further bytes of it. If the client is gone, a message that is already in the
    /// queue still reaches the process.
    #[cold]
    fn step(&mut self, core: &mut Core, key: Key, conn: &mut Conn) -> Result<Step, Gone> {
        match self.next(core, key, conn) {
            Ok(Next::Again) => {}
            Ok(Next::Wait) => return conn.wait(),
            Ok(Next::Done) => {
                answer::begin_stream(conn);
                envelope::push_json(&mut conn.out, conn.call, b"{}");
                answer::end_stream(conn, None);
            }
            Err(Failed::Gone) => return Err(Gone),
            Err(Failed::Call(error)) => answer::abort_stream(conn, error),
        }
        Ok(Step::Again)
    }

    #[cold]
    fn expire(
        &mut self,
        core: &mut Core,
        key: Key,
        conn: &mut Conn,
        _: Instant,
    ) -> Result<(), Gone> {
        take_back(core, key, self.process);
        answer::abort_stream(conn, late());
        Ok(())
    }
}

enum Next {
    Again,
    Wait,
    /// Every message has reached the process.
    Done,
}

enum Failed {
    Gone,
    Call(ConnectError),
}

impl From<ConnectError> for Failed {
    fn from(error: ConnectError) -> Self {
        Self::Call(error)
    }
}

impl InputStream {
    fn next(&mut self, core: &mut Core, key: Key, conn: &mut Conn) -> Result<Next, Failed> {
        if self.waiting {
            return Ok(Next::Wait);
        }
        let decoded = frame::decode(&self.held, MAX_MESSAGE);
        let decoded = decoded.or_else(|e| error(InvalidArgument, e.to_string()))?;
        if let Some((frame, used)) = decoded {
            if frame.flags != 0 {
                return Err(ConnectError::new(InvalidArgument, "only messages are read").into());
            }
            let message = message::read(&conn.call.read(frame.body)?)?;
            self.held.drain(..used);
            self.take(core, key, message)?;
            return Ok(Next::Again);
        }
        if self.ended {
            return if self.held.is_empty() {
                Ok(Next::Done)
            } else {
                Err(cut().into())
            };
        }
        self.read(core, conn)
    }

    fn take(
        &mut self,
        core: &mut Core,
        key: Key,
        message: StreamInputRequest,
    ) -> Result<(), ConnectError> {
        match (message.start, message.data, self.process) {
            (Some(start), _, None) => {
                self.process = Some(select(core, &start.process, Ended::Excluded)?);
                Ok(())
            }
            (Some(_), _, Some(_)) => error(InvalidArgument, "the process was selected before"),
            (None, Some(_), None) => error(InvalidArgument, "the first message selects no process"),
            (None, Some(data), Some(process)) => {
                push(core, key, process, data.input)?;
                self.waiting = true;
                Ok(())
            }
            // A keepalive, or an unknown message.
            (None, None, _) => Ok(()),
        }
    }

    /// Decodes received bytes of the body and appends them to `held`.
    fn read(&mut self, core: &mut Core, conn: &mut Conn) -> Result<Next, Failed> {
        if conn.input.is_empty()
            && !conn
                .fill(&mut core.io.scratch)
                .map_err(|Gone| Failed::Gone)?
        {
            return self.at_end();
        }
        let input = std::mem::take(&mut conn.input);
        let mut rest = input.as_slice();
        let taken = loop {
            match self.body.next(&mut rest) {
                Ok(Decoded::Data(data)) => self.held.extend_from_slice(data),
                Ok(Decoded::More) => break Ok(Next::Again),
                Ok(Decoded::End) => {
                    self.ended = true;
                    break Ok(Next::Again);
                }
                Err(error) => {
                    break Err(ConnectError::new(InvalidArgument, error.to_string()).into());
                }
            }
        };
        let used = input.len() - rest.len();
        conn.input = input;
        conn.consume(used);
        taken
    }

    /// Called when nothing has arrived. A body of length zero is also complete.
    fn at_end(&mut self) -> Result<Next, Failed> {
        match self.body {
            Framing::Length(0) => {
                self.ended = true;
                Ok(Next::Again)
            }
            Framing::Length(_) | Framing::Chunked(_) => Ok(Next::Wait),
        }
    }
}

fn cut() -> ConnectError {
    ConnectError::new(InvalidArgument, "the request ends within a message")
}
