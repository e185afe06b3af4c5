//! `process.Process`.

use std::{
    os::fd::AsFd,
    time::{Duration, Instant},
};

use api_types::envd::{
    ConnectCode::{self, FailedPrecondition, Internal, InvalidArgument, NotFound, Unimplemented},
    ConnectError, ConnectRequest, Framing, ListResponse, ProcessInfo, ProcessSelector,
    SendSignalRequest, Signal, UpdateRequest, frame,
};
use nix::{errno::Errno, sys::signal};
use serde::{Serialize, de::DeserializeOwned};

use super::{
    Core, Work,
    codec::{self, Codec},
    conn::{Conn, Follow, Rest},
    events, filesystem,
    http::{self, Head},
    input::{self, NO_TERMINAL},
    process::Process,
    route::{Stream, Unary},
    slots::Key,
    start,
    terminal::{self, Size},
    watch,
};

/// Sign of life on a silent stream when the caller names no period.
pub(crate) const KEEPALIVE: Duration = Duration::from_secs(90);

pub(crate) fn error<T>(code: ConnectCode, message: impl Into<String>) -> Result<T, ConnectError> {
    Err(ConnectError::new(code, message))
}

/// A successful unary call; `json` is its message.
pub(crate) fn answer(conn: &mut Conn, json: &[u8]) {
    match conn.codec.write(json) {
        Ok(message) => conn.answer(200, conn.codec.unary_type(), &message),
        Err(error) => answer_error(conn, &error),
    }
}

/// A failed unary call.
#[cold]
#[inline(never)]
pub(crate) fn answer_error(conn: &mut Conn, error: &ConnectError) {
    let body = serde_json::to_vec(error).unwrap_or_default();
    conn.answer(error.code.http_status(), http::JSON, &body);
}

/// The message in a body.
pub(crate) fn message<T: DeserializeOwned>(body: &[u8]) -> Result<T, ConnectError> {
    serde_json::from_slice(body)
        .or_else(|e| error(InvalidArgument, format!("the message cannot be read: {e}")))
}

/// A call that is answered once.
#[inline(never)]
pub(crate) fn unary(
    core: &mut Core,
    key: Key,
    conn: &mut Conn,
    method: Unary,
    head: &Head,
    body: &[u8],
) {
    let Some(codec) = Codec::of_unary(head) else {
        let types = "the content type must be application/json or application/proto";
        return conn.error(415, types);
    };
    let body = match codec.read(body) {
        Ok(body) => body,
        Err(error) => return answer_error(conn, &error),
    };
    let body = body.as_ref();
    conn.codec = codec;
    let answered = match method {
        _ if !head.encoding.is_empty() => error(Unimplemented, "compression is not offered"),
        Unary::List => json(&list(core)),
        Unary::SendSignal => message(body).and_then(|m| send_signal(core, &m)),
        Unary::Update => message(body).and_then(|m| update(core, &m)),
        Unary::Filesystem(method) => match filesystem::call(core, conn, method, head, body) {
            Ok(Some(answer)) => Ok(answer),
            // Answered later.
            Ok(None) => return,
            Err(error) => Err(error),
        },
        Unary::CloseStdin => message(body)
            .and_then(|m| input::close(core, &m))
            .and_then(done),
        Unary::SendInput => {
            match message(body).and_then(|m| input::send(core, key, conn, head, m)) {
                // Answered later.
                Ok(()) => return,
                Err(error) => Err(error),
            }
        }
    };
    match answered {
        Ok(message) => answer(conn, &message),
        Err(error) => answer_error(conn, &error),
    }
}

fn done(_: ()) -> Result<Vec<u8>, ConnectError> {
    Ok(b"{}".to_vec())
}

pub(crate) fn json<T: Serialize>(message: &T) -> Result<Vec<u8>, ConnectError> {
    serde_json::to_vec(message).or_else(|e| error(Internal, e.to_string()))
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

/// Which ends of processes a selector may find.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    Included,
    Excluded,
}

pub(crate) fn select(
    core: &Core,
    selector: &ProcessSelector,
    ended: Ended,
) -> Result<Key, ConnectError> {
    let matches = |process: &Process| match (selector.pid, &selector.tag) {
        (Some(pid), _) => process.pid.unsigned_abs() == pid,
        (None, Some(tag)) => process.tag.as_ref() == Some(tag),
        (None, None) => false,
    };
    let found = core
        .processes
        .iter()
        .filter(|(_, process)| matches(process));
    let found = found.filter(|(_, process)| process.is_running() || ended == Ended::Included);
    // A running one first, else the one that ended last.
    let best = found.max_by_key(|(_, process)| (process.is_running(), process.ended));
    match (best, selector.pid, &selector.tag) {
        (Some((key, _)), _, _) => Ok(key),
        (None, Some(pid), _) => error(NotFound, format!("process with pid {pid} not found")),
        (None, None, Some(tag)) => error(NotFound, format!("process with tag {tag} not found")),
        (None, None, None) => error(InvalidArgument, "neither pid nor tag of a process"),
    }
}

fn send_signal(core: &mut Core, request: &SendSignalRequest) -> Result<Vec<u8>, ConnectError> {
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
    core.enqueue(Work::Process(key));
    match sent {
        // Between its last breath and its funeral.
        Some(Ok(()) | Err(Errno::ESRCH)) | None => Ok(b"{}".to_vec()),
        Some(Err(errno)) => error(Internal, format!("error sending signal: {errno}")),
    }
}

/// Another size of the terminal.
fn update(core: &mut Core, request: &UpdateRequest) -> Result<Vec<u8>, ConnectError> {
    let key = select(core, &request.process, Ended::Excluded)?;
    let size = request.pty.and_then(|pty| pty.size);
    let size = size.map(Size::check).transpose()?;
    let process = core.processes.get_mut(key);
    let has_terminal = process.as_ref().is_some_and(|p| p.has_terminal());
    let terminal = process.as_ref().and_then(|p| p.terminal());
    match (size, terminal) {
        (Some(_), _) if !has_terminal => error(FailedPrecondition, NO_TERMINAL),
        (Some(size), Some(terminal)) => match terminal::resize(terminal.as_fd(), size) {
            Ok(()) => Ok(b"{}".to_vec()),
            Err(errno) => error(Internal, format!("error resizing the terminal: {errno}")),
        },
        // Nobody is left to see it.
        (Some(_), None) | (None, _) => Ok(b"{}".to_vec()),
    }
}

/// A call that is answered with a stream.
pub(crate) fn stream(
    core: &mut Core,
    key: Key,
    conn: &mut Conn,
    method: Stream,
    head: &Head,
    body: &[u8],
) {
    let Some(codec) = Codec::of_stream(head) else {
        return conn.error(415, STREAM_TYPE);
    };
    conn.codec = codec;
    let body = match only_frame(head, body).and_then(|body| codec.read(body)) {
        Ok(body) => body,
        Err(error) => return conn.refuse_stream(error),
    };
    let process = match method {
        Stream::WatchDir => return watch::begin(core, key, conn, head, &body),
        Stream::Start => message(&body).and_then(|request| start::start(core, key, head, request)),
        Stream::Connect => message(&body)
            .and_then(|request: ConnectRequest| select(core, &request.process, Ended::Included)),
    };
    match process {
        Ok(process) => follow(core, key, conn, process, method, head),
        Err(error) => conn.refuse_stream(error),
    }
}

const STREAM_TYPE: &str =
    "the content type must be application/connect+json or application/connect+proto";

/// A call whose request is a stream; its body has yet to come.
#[inline(never)]
pub(crate) fn begin_stream(conn: &mut Conn, head: &Head, body: Framing) {
    let Some(codec) = Codec::of_stream(head) else {
        return conn.refuse(415, STREAM_TYPE);
    };
    conn.codec = codec;
    if !head.encoding.is_empty() {
        return conn.refuse(501, "compression is not offered");
    }
    if head.expects_continue && conn.input.is_empty() {
        conn.out.extend_from_slice(http::CONTINUE);
    }
    input::begin(conn, head, body);
}

/// A call that is not offered.
pub(crate) fn unknown(conn: &mut Conn, head: &Head) {
    let what = format!("{} is not offered", head.path.trim_start_matches('/'));
    let error = ConnectError::new(Unimplemented, what);
    if codec::is_stream(&head.content_type) {
        http::push_chunked_head(&mut conn.out, &head.content_type, conn.after);
        events::push_end_stream(&mut conn.out, Some(error));
        return conn.end_request(Rest::Read);
    }
    answer_error(conn, &error);
}

/// The message of a request with exactly one.
fn only_frame<'a>(head: &Head, body: &'a [u8]) -> Result<&'a [u8], ConnectError> {
    if !head.encoding.is_empty() {
        return error(Unimplemented, "compression is not offered");
    }
    match frame::decode(body, u32::MAX) {
        Ok(Some((frame, used))) if frame.flags == 0 && used == body.len() => Ok(frame.body),
        Ok(_) => error(InvalidArgument, "the request must be exactly one message"),
        Err(e) => error(InvalidArgument, e.to_string()),
    }
}

/// Lets a connection follow a process: its start now, everything else as it happens.
fn follow(
    core: &mut Core,
    key: Key,
    conn: &mut Conn,
    process_key: Key,
    method: Stream,
    head: &Head,
) {
    let Some(process) = core.processes.get_mut(process_key) else {
        return;
    };
    let now = Instant::now();
    let keepalive = head.keepalive.unwrap_or(KEEPALIVE);
    conn.follow(Follow {
        process: process_key,
        deadline: match method {
            // There it is the process's.
            Stream::Start | Stream::WatchDir => None,
            Stream::Connect => head.timeout.and_then(|timeout| now.checked_add(timeout)),
        },
        keepalive,
        next_keepalive: now + keepalive,
    });
    events::push_start(&mut conn.out, conn.codec, process.pid.unsigned_abs());
    if process.is_running() {
        process.followers.push(key)
    } else {
        let end = process.status.clone().unwrap_or_default();
        events::push_end(&mut conn.out, conn.codec, &end);
        conn.end_request(super::conn::Rest::Read);
    }
}
