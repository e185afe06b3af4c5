//! A command in a sandbox, attached to this terminal.
//!
//! ```text
//! main thread      events of the process ─► standard output and error ─► exit code
//! input            standard input ─► StreamInput; at its end CloseStdin
//! signals          signals of this program ─► the process; the terminal's size ─► its terminal
//! lease            extends the sandbox's lifetime while a command is attached
//! ```
//! Each thread has its own connection. Only the main thread returns a result. The signal thread ends the program
//! itself if a signal has no effect within [`signals::GRACE`], or is repeated.

mod input;
mod lease;
mod signals;
mod status;
mod terminal;

use std::{
    io::{self, Write},
    time::Duration,
};

use client::endpoint::Wire;
use envd::{
    ClientError, EndEvent, EnvdClient, ProcessConfig, ProcessEvent, Pty, PtySize, StartRequest,
};

use crate::{
    failure::{ATTACHED, Failure, Peer, cause},
    output::BROKEN_PIPE,
    server::{SandboxRoute, Server},
};

pub(crate) use lease::{LEASE, Lease};
pub(crate) use signals::{AtEnd, Draft, Signals, ending};
pub(crate) use terminal::{is_terminal, size};

/// Exit code of a command that timed out, as in timeout(1).
const TIMED_OUT: u8 = 124;
const CANNOT_RUN: u8 = 126;
const NOT_FOUND: u8 = 127;
/// Maximum duration of a command, longer than any sandbox lives.
const FOREVER: Duration = Duration::from_secs(30 * 86_400);

/// The command's standard input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Input {
    /// /dev/null
    Nothing,
    /// Standard input of this program.
    Stream,
}

/// The command's output streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Streams {
    Pipes,
    /// A terminal of this size, in characters.
    Terminal(PtySize),
}

/// A command to run.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    pub(crate) process: ProcessConfig,
    /// `None`: the sandbox's default.
    pub(crate) user: Option<String>,
    pub(crate) input: Input,
    pub(crate) streams: Streams,
    /// Time after which the command is killed.
    pub(crate) limit: Option<Duration>,
}

/// Result of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// Exit code of this program.
    pub(crate) code: u8,
    /// Whether the connection can be used for further requests.
    pub(crate) is_reusable: bool,
}

impl Outcome {
    /// The result if the stream was not read to its end.
    pub(crate) fn left(code: u8) -> Self {
        Self {
            code,
            is_reusable: false,
        }
    }
}

/// Runs a command to its end.
///
/// # Errors
/// Returns a [`Failure`] if the connection is lost, or if the sandbox ends before the command.
pub(crate) fn attach(
    client: &mut EnvdClient<Wire>,
    server: &Server,
    route: &SandboxRoute,
    order: &Order,
    signals: &Signals,
) -> Result<Outcome, Failure> {
    let _lease = Lease::keep(server.another(), route.id.clone());
    let request = start_request(order);
    let user = order.user.as_deref();
    let stream = client.stream(
        "process.Process/Start",
        &request,
        user,
        order.limit,
        FOREVER,
    );
    let mut stream = match stream {
        Ok(stream) => stream,
        Err(why) => return not_started(&why, route, signals),
    };
    let pid = stream.pid();
    let _raw = match (order.streams, order.input) {
        (Streams::Terminal(_), Input::Stream) => Some(terminal::RawMode::enter()?),
        _ => None,
    };
    signals.forward_to(route.clone(), pid, order);
    if order.input == Input::Stream {
        input::start(route.clone(), pid, order.streams);
    }
    let mut end = None;
    loop {
        match stream.next_event() {
            Ok(Some(event)) => {
                if let Err(why) = show(&event) {
                    return output_lost(&why).map(Outcome::left);
                }
                end = event.end.or(end);
            }
            Ok(None) => break,
            Err(why) => return cut(&why, route, signals).map(Outcome::left),
        }
    }
    signals.forward_to_none();
    let code = finished(end)?;
    Ok(Outcome {
        code,
        is_reusable: true,
    })
}

fn start_request(order: &Order) -> StartRequest {
    StartRequest {
        process: Some(order.process.clone()),
        pty: match order.streams {
            Streams::Terminal(size) => Some(Pty { size: Some(size) }),
            Streams::Pipes => None,
        },
        tag: None,
        stdin: Some(order.input == Input::Stream),
    }
}

/// Writes the output of an event unchanged.
fn show(event: &ProcessEvent) -> io::Result<()> {
    let Some(data) = &event.data else {
        return Ok(());
    };
    if let Some(bytes) = data.stdout.as_ref().or(data.pty.as_ref()) {
        let mut out = io::stdout().lock();
        out.write_all(&bytes.0)?;
        out.flush()?;
    }
    match &data.stderr {
        Some(bytes) => io::stderr().lock().write_all(&bytes.0),
        None => Ok(()),
    }
}

/// The reader of the output is gone, or the output cannot be written.
fn output_lost(why: &io::Error) -> Result<u8, Failure> {
    match why.kind() {
        io::ErrorKind::BrokenPipe => Ok(u8::try_from(BROKEN_PIPE).unwrap_or(ATTACHED)),
        _ => Err(Failure::host(format!(
            "cannot write the command's output: {why}"
        ))),
    }
}

/// Reports a command that the agent did not start. As in shells, the message goes to standard error and the exit
/// code shows the reason.
fn not_started(
    why: &ClientError,
    route: &SandboxRoute,
    signals: &Signals,
) -> Result<Outcome, Failure> {
    let ClientError::Refused { code, message, .. } = why else {
        return cut(why, route, signals).map(Outcome::left);
    };
    let status = match code.as_str() {
        "invalid_argument" if message.contains("executable file not found") => NOT_FOUND,
        "invalid_argument" if message.starts_with("cannot run") => CANNOT_RUN,
        "permission_denied" => CANNOT_RUN,
        _ => {
            return Err(Failure::refused(format!(
                "cannot start the command: {message}"
            )));
        }
    };
    eprintln!("cube: {message}");
    Ok(Outcome::left(status))
}

fn cut(why: &ClientError, route: &SandboxRoute, signals: &Signals) -> Result<u8, Failure> {
    let id = &route.id;
    if let Some(code) = signals.received() {
        // The signal thread has ended the sandbox or the command.
        return Ok(code);
    }
    match why {
        ClientError::Refused { code, .. } if code == "deadline_exceeded" => {
            eprintln!("cube: the command took longer than --timeout and was killed");
            Ok(TIMED_OUT)
        }
        ClientError::NotReachable { .. } | ClientError::Protocol(_) => {
            Err(Failure::refused(format!(
                "the connection to sandbox {id} was lost: the sandbox was killed, paused or reached its end of life, or the \
             server has gone ({})",
                cause(why)
            )))
        }
        ClientError::Refused { .. } | ClientError::Local { .. } | ClientError::Timeout(_) => {
            Err(Failure::of_call(why, &Peer::Sandbox(id)))
        }
    }
}

fn finished(end: Option<EndEvent>) -> Result<u8, Failure> {
    let end = end
        .ok_or_else(|| Failure::refused("the stream of the command ended without its exit code"))?;
    Ok(status::exit_code(&end))
}
