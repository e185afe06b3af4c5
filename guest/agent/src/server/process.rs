//! `process.Process`: starting, following and controlling processes.

pub(crate) mod child;
mod end;
pub(crate) mod events;
pub(crate) mod follow;
pub(crate) mod input;
mod select;
pub(crate) mod signals;
mod start;
mod terminal;

use std::{os::fd::AsFd, time::Instant};

use envd::{
    ConnectCode::{FailedPrecondition, Internal, InvalidArgument},
    ConnectError, ConnectRequest, ListResponse, ProcessInfo, SendSignalRequest, Signal,
    UpdateRequest,
};
use nix::{errno::Errno, sys::signal};
use transport::Key;

use super::{
    answer, call,
    core::{Conn, Core, Job},
    head::Head,
    message::{self, error},
    route::{ProcessCall, ProcessStream},
};
use input::NO_TERMINAL;
use select::{Ended, select};
use terminal::Size;

/// Handles a unary call.
#[inline(never)]
pub(crate) fn unary(
    core: &mut Core,
    key: Key,
    conn: &mut Conn,
    method: ProcessCall,
    head: &Head,
    body: &[u8],
) {
    let Some(body) = call::begin_unary(conn, head, body) else {
        return;
    };
    let body = body.as_ref();
    let answered = match method {
        ProcessCall::List => message::write(&list(core)).map(Some),
        ProcessCall::SendSignal => message::read(body)
            .and_then(|m| send_signal(core, &m))
            .map(done),
        ProcessCall::Update => message::read(body).and_then(|m| update(core, &m)).map(done),
        ProcessCall::CloseStdin => message::read(body)
            .and_then(|m| input::close(core, &m))
            .map(done),
        ProcessCall::SendInput => message::read(body)
            .and_then(|m| input::send(core, key, conn, head, m))
            .map(|()| None),
    };
    call::end_unary(conn, answered);
}

/// The empty message.
fn done((): ()) -> Option<Vec<u8>> {
    Some(b"{}".to_vec())
}

/// Handles a call that is answered with a stream of events.
pub(crate) fn stream(
    core: &mut Core,
    key: Key,
    conn: &mut Conn,
    method: ProcessStream,
    head: &Head,
    body: &[u8],
) {
    let Some(body) = call::begin_stream(conn, head, body) else {
        return;
    };
    let (process, deadline) = match method {
        // The timeout applies to the process.
        ProcessStream::Start => {
            let request = message::read(&body);
            (
                request.and_then(|request| start::start(core, key, head, request)),
                None,
            )
        }
        // The timeout applies to the stream.
        ProcessStream::Connect => {
            let request = message::read(&body);
            let timeout = head.fields.timeout;
            (
                request.and_then(|request: ConnectRequest| {
                    select(core, &request.process, Ended::Included)
                }),
                timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
            )
        }
    };
    match process {
        Ok(process) => follow::begin(core, key, conn, process, deadline, head),
        Err(error) => answer::refuse_stream(conn, error),
    }
}

fn list(core: &Core) -> ListResponse {
    let running = core
        .processes
        .iter()
        .filter(|(_, process)| process.is_running());
    let mut processes: Vec<(i32, ProcessInfo)> = running
        .map(|(_, process)| {
            let info = ProcessInfo {
                config: process.config.clone(),
                pid: process.pid.unsigned_abs(),
                tag: process.tag.clone(),
            };
            (process.pid, info)
        })
        .collect();
    processes.sort_by_key(|(pid, _)| *pid);
    ListResponse {
        processes: processes.into_iter().map(|(_, info)| info).collect(),
    }
}

fn send_signal(core: &mut Core, request: &SendSignalRequest) -> Result<(), ConnectError> {
    let signal = match request.signal {
        Signal::Kill => signal::Signal::SIGKILL,
        Signal::Term => signal::Signal::SIGTERM,
        Signal::Unspecified => return error(InvalidArgument, "no signal to send"),
    };
    let key = select(core, &request.process, Ended::Excluded)?;
    let sent = core
        .processes
        .get_mut(key)
        .map(|process| process.signal(signal));
    core.enqueue(Job::Process, key);
    match sent {
        // `ESRCH`: the process has ended and is not yet reaped.
        Some(Ok(()) | Err(Errno::ESRCH)) | None => Ok(()),
        Some(Err(errno)) => error(Internal, format!("error sending signal: {errno}")),
    }
}

/// Resizes the terminal.
fn update(core: &mut Core, request: &UpdateRequest) -> Result<(), ConnectError> {
    let key = select(core, &request.process, Ended::Excluded)?;
    let size = request.pty.and_then(|pty| pty.size);
    let size = size.map(Size::check).transpose()?;
    let process = core.processes.get_mut(key);
    let has_terminal = process.as_ref().is_some_and(|p| p.has_terminal());
    let terminal = process.as_ref().and_then(|p| p.terminal());
    match (size, terminal) {
        (Some(_), _) if !has_terminal => error(FailedPrecondition, NO_TERMINAL),
        (Some(size), Some(terminal)) => match terminal::resize(terminal.as_fd(), size) {
            Ok(()) => Ok(()),
            Err(errno) => error(Internal, format!("error resizing the terminal: {errno}")),
        },
        // The terminal is closed, or no size was given.
        (Some(_), None) | (None, _) => Ok(()),
    }
}
