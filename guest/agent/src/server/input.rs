//! Input for processes: `SendInput`, one message at a time, and `StreamInput`, many on one connection.
//!
//! Bytes wait in the process's queue until its pipe or terminal takes them. A connection has at most one
//! message there: it is answered, or read further, only once that one is written, so who sends faster than
//! the process reads is stopped by its full connection.

use std::time::{Duration, Instant};

use api_types::envd::{
    CloseStdinRequest,
    ConnectCode::{self, DeadlineExceeded, FailedPrecondition, InvalidArgument},
    ConnectError, Decoded, Framing, ProcessInput, SendInputRequest, StreamInputRequest, frame,
};

use super::{
    Core, Work,
    conn::{Conn, Gone, Phase, Rest},
    events,
    http::{After, Head},
    process::{Input, Process},
    request::Step,
    rpc::{self, Ended},
    slots::Key,
};

/// Longest message of a stream in bytes.
const MAX_MESSAGE: u32 = 4 << 20;

pub(crate) const NO_TERMINAL: &str = "the process has no terminal: its input goes to stdin";
pub(crate) const HAS_TERMINAL: &str = "the process has a terminal: its input goes to pty";

/// A `StreamInput` call on its way in.
pub(crate) struct InputStream {
    body: Framing,
    /// Bytes of messages that are not yet whole.
    held: Vec<u8>,
    /// Whose input it is; absent until the first message.
    process: Option<Key>,
    /// Whether the last message is still in the process's queue.
    waiting: bool,
    /// Whether the body is over.
    ended: bool,
}

fn error<T>(code: ConnectCode, message: impl Into<String>) -> Result<T, ConnectError> {
    Err(ConnectError::new(code, message))
}

/// When a call's own time is over.
fn deadline(timeout: Option<Duration>) -> Option<Instant> {
    timeout.and_then(|timeout| Instant::now().checked_add(timeout))
}

/// The bytes of an input, where the process takes that kind.
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
        error(FailedPrecondition, "stdin not enabled or closed")
    } else {
        Ok(bytes)
    }
}

/// Puts input into a process's queue on behalf of a connection.
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
    core.enqueue(Work::Process(key));
    Ok(())
}

fn broken() -> ConnectError {
    ConnectError::new(FailedPrecondition, "the process does not read its input")
}

/// `SendInput`; answered once the input is in the pipe.
#[cold]
#[inline(never)]
pub(crate) fn send(
    core: &mut Core,
    conn_key: Key,
    conn: &mut Conn,
    head: &Head,
    request: SendInputRequest,
) -> Result<(), ConnectError> {
    let process = rpc::select(core, &request.process, Ended::Excluded)?;
    push(core, conn_key, process, request.input)?;
    conn.wake = deadline(head.timeout);
    conn.phase = Phase::Input(process);
    Ok(())
}

/// `CloseStdin`: the end of the input, once everything that waits is written.
pub(crate) fn close(core: &mut Core, request: &CloseStdinRequest) -> Result<(), ConnectError> {
    let key = rpc::select(core, &request.process, Ended::Excluded)?;
    if let Some(process) = core.processes.get_mut(key) {
        if process.has_terminal() {
            // A terminal's end of input is a key (^D), not an end.
            return error(FailedPrecondition, HAS_TERMINAL);
        }
        process.stdin.closing = true;
    }
    core.enqueue(Work::Process(key));
    Ok(())
}

/// What a connection has sent is in the pipe.
pub(crate) fn written(conn: &mut Conn) {
    match &mut conn.phase {
        Phase::Input(_) => rpc::answer(conn, b"{}"),
        Phase::StreamInput(stream) => stream.waiting = false,
        _ => {}
    }
}

/// Nobody will read what a connection has sent.
pub(crate) fn unread(conn: &mut Conn) {
    match &conn.phase {
        Phase::Input(_) => rpc::answer_error(conn, &broken()),
        Phase::StreamInput(_) => abort(conn, broken()),
        _ => {}
    }
}

/// The time that the caller gave is over: what is not yet written is taken back.
#[cold]
#[inline(never)]
pub(crate) fn expire(core: &mut Core, key: Key, conn: &mut Conn) {
    let process = match &conn.phase {
        Phase::Input(process) => Some(*process),
        Phase::StreamInput(stream) => stream.process,
        _ => None,
    };
    if let Some(process) = process.and_then(|process| core.processes.get_mut(process)) {
        process.stdin.queue.retain(|input| input.conn != key);
    }
    let late = ConnectError::new(DeadlineExceeded, "context deadline exceeded");
    match &conn.phase {
        Phase::Input(_) => rpc::answer_error(conn, &late),
        _ => abort(conn, late),
    }
}

/// Begins to read a `StreamInput` whose head is there.
#[cold]
#[inline(never)]
pub(crate) fn begin(conn: &mut Conn, head: &Head, body: Framing) {
    conn.wake = deadline(head.timeout);
    conn.phase = Phase::StreamInput(Box::new(InputStream {
        body,
        held: Vec::new(),
        process: None,
        waiting: false,
        ended: false,
    }));
}

/// Ends a stream with an error although its request may go on.
fn abort(conn: &mut Conn, error: ConnectError) {
    conn.after = After::Close;
    conn.begin_stream();
    events::push_end_stream(&mut conn.out, Some(error));
    conn.end_request(Rest::Unread);
}

/// Takes the next message, or the next bytes of one.
///
/// # Errors
/// The client is gone. What it has sent in whole reaches the process.
#[cold]
#[inline(never)]
pub(crate) fn step(core: &mut Core, key: Key, conn: &mut Conn) -> Result<Step, Gone> {
    let Phase::StreamInput(mut stream) = std::mem::replace(&mut conn.phase, Phase::Head) else {
        return Err(Gone);
    };
    let next = stream.next(core, key, conn);
    conn.phase = Phase::StreamInput(stream);
    match next {
        Ok(Next::Again) => Ok(Step::Again),
        Ok(Next::Wait) if conn.hangup => Err(Gone),
        Ok(Next::Wait) => Ok(Step::Wait),
        Ok(Next::Done) => {
            conn.begin_stream();
            events::push_json(&mut conn.out, conn.codec, b"{}");
            events::push_end_stream(&mut conn.out, None);
            conn.end_request(Rest::Read);
            Ok(Step::Again)
        }
        Err(Failed::Gone) => Err(Gone),
        Err(Failed::Call(error)) => {
            abort(conn, error);
            Ok(Step::Again)
        }
    }
}

enum Next {
    Again,
    Wait,
    /// Everything has reached the process.
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
            let message = rpc::message(&conn.codec.read(frame.body)?)?;
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
                self.process = Some(rpc::select(core, &start.process, Ended::Excluded)?);
                Ok(())
            }
            (Some(_), _, Some(_)) => error(InvalidArgument, "the process was selected before"),
            (None, Some(_), None) => error(InvalidArgument, "the first message selects no process"),
            (None, Some(data), Some(process)) => {
                push(core, key, process, data.input)?;
                self.waiting = true;
                Ok(())
            }
            // A sign of life, or something that is not known here.
            (None, None, _) => Ok(()),
        }
    }

    /// Moves what has arrived of the body to the messages.
    fn read(&mut self, core: &mut Core, conn: &mut Conn) -> Result<Next, Failed> {
        if conn.input.is_empty() && !conn.fill(&mut core.scratch).map_err(|Gone| Failed::Gone)? {
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

    /// Nothing has arrived: a body may be over all the same when it has no length.
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
