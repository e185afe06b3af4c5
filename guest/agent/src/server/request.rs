//! From bytes on a connection to a handler, and back.

use std::time::{Duration, Instant};

use api_types::envd::{Decoded, Framing, InitRequest};

use super::{
    Core, ROUNDS, Work,
    conn::{Conn, Gone, HIGH_WATER, Phase, Rest},
    files::{self, FileError},
    filesystem,
    http::{self, After, Head},
    input,
    route::{self, NoRoute, Route},
    rpc,
    slots::Key,
    tunnel, watch,
};
use crate::identity::IdentityError;

/// Largest body that a handler takes in whole.
const MAX_BODY: usize = 4 << 20;
/// How long the next bytes of a request may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes of a refused request that are read before its connection is dropped.
const DRAIN: usize = 1 << 20;

/// Whether there is more to do at once.
pub(crate) enum Step {
    Again,
    Wait,
}

/// Does what can be done on a connection without waiting.
///
/// # Errors
/// The peer is gone: drop the connection.
pub(crate) fn pump(core: &mut Core, key: Key, conn: &mut Conn) -> Result<(), Gone> {
    let mut rounds = 0;
    loop {
        conn.flush()?;
        match step(core, key, conn)? {
            Step::Again if rounds == ROUNDS => {
                core.enqueue(Work::Conn(key));
                break;
            }
            Step::Again => rounds += 1,
            Step::Wait => break,
        }
    }
    conn.flush()?;
    if conn.writable || conn.watches_room {
        Ok(())
    } else {
        core.watch_room(key, conn).map_err(|_| Gone)
    }
}

fn step(core: &mut Core, key: Key, conn: &mut Conn) -> Result<Step, Gone> {
    let backlog = conn.backlog();
    match &mut conn.phase {
        // Who does not read answers may not ask further.
        Phase::Head | Phase::Collect { .. } | Phase::Upload { .. } if backlog > 0 => Ok(Step::Wait),
        Phase::Head => read_head(core, key, conn),
        Phase::Collect { .. } | Phase::Upload { .. } => read_body(core, key, conn),
        Phase::Download(_) => files::send_file(core, conn),
        Phase::Watch(stream) => {
            let watcher = stream.watcher;
            if conn.out.len() < HIGH_WATER && watch::has_news(core, watcher) {
                core.enqueue(Work::Watch(watcher));
            }
            gone_or_wait(conn)
        }
        Phase::Task(_) => filesystem::step(core, conn),
        Phase::Tunnel(_) => tunnel::step(core, key, conn),
        Phase::Follow(follow) => {
            if conn.out.len() < HIGH_WATER {
                let process = follow.process;
                let waiting = core.processes.get_mut(process);
                if waiting.is_some_and(|p| p.outputs.iter().any(|o| o.readable && o.fd.is_some())) {
                    core.enqueue(Work::Process(process));
                }
            }
            gone_or_wait(conn)
        }
        Phase::Input(_) => gone_or_wait(conn),
        Phase::StreamInput(_) => input::step(core, key, conn),
        Phase::Closing(_) if backlog > 0 => Ok(Step::Wait),
        Phase::Closing(Rest::Read) => Err(Gone),
        Phase::Closing(Rest::Unread) => {
            conn.shut_down();
            conn.input = Vec::new();
            conn.wake = Some(Instant::now() + PATIENCE);
            conn.phase = Phase::Draining { left: DRAIN };
            Ok(Step::Again)
        }
        Phase::Draining { .. } => drain(core, conn),
    }
}

/// Who has hung up does not wait for events; an answer under way is sent all the same.
fn gone_or_wait(conn: &Conn) -> Result<Step, Gone> {
    if conn.hangup {
        Err(Gone)
    } else {
        Ok(Step::Wait)
    }
}

#[inline(never)]
fn drain(core: &mut Core, conn: &mut Conn) -> Result<Step, Gone> {
    if !conn.fill(&mut core.scratch)? {
        return Ok(Step::Wait);
    }
    let received = conn.input.len();
    conn.consume(received);
    match &mut conn.phase {
        Phase::Draining { left } if *left > received => *left -= received,
        _ => return Err(Gone),
    }
    Ok(Step::Again)
}

fn read_head(core: &mut Core, key: Key, conn: &mut Conn) -> Result<Step, Gone> {
    let parsed = if conn.input.is_empty() {
        Ok(None)
    } else {
        http::parse(&conn.input)
    };
    match parsed {
        Ok(Some((head, body, used))) => {
            conn.consume(used);
            conn.wake = None;
            conn.after = if head.close {
                After::Close
            } else {
                After::KeepAlive
            };
            begin(core, key, conn, head, body);
            Ok(Step::Again)
        }
        Ok(None) => {
            if !conn.fill(&mut core.scratch)? {
                if !conn.input.is_empty() && conn.wake.is_none() {
                    conn.wake = Some(Instant::now() + PATIENCE);
                }
                return Ok(Step::Wait);
            }
            Ok(Step::Again)
        }
        Err(bad) => {
            conn.refuse(bad.status, bad.message);
            Ok(Step::Again)
        }
    }
}

/// The text that official clients know.
const UNAUTHORIZED: &str = "unauthorized access, please provide a valid access token or method \
                            signing if supported";

/// Decides about a request once its head is there.
fn begin(core: &mut Core, key: Key, conn: &mut Conn, head: Head, body: Framing) {
    let empty = matches!(body, Framing::Length(0));
    let refuse = |conn: &mut Conn, status, message: &str| {
        if skip_body(conn, &body) {
            conn.error(status, message)
        } else {
            conn.refuse(status, message)
        }
    };
    let route = match route::find(&head.method, &head.path) {
        Ok(route) => route,
        Err(NoRoute::NotFound) => return refuse(conn, 404, "no such route"),
        Err(NoRoute::MethodNotAllowed) => return refuse(conn, 405, "method not allowed"),
    };
    if !route.is_open() && !core.settings.initialised {
        return refuse(conn, 503, "the sandbox has not been given its identity yet");
    }
    let admitted = match route {
        Route::ReadFile | Route::WriteFile => files::admit(core, &head),
        _ if !route.needs_token() => Ok(()),
        _ if is_same_secret(&core.settings.access_token, &head.access_token) => Ok(()),
        _ => Err(UNAUTHORIZED),
    };
    if let Err(message) = admitted {
        return refuse(conn, 401, message);
    }
    if route == Route::StreamInput {
        return rpc::begin_stream(conn, &head, body);
    }
    if matches!(body, Framing::Length(len) if route != Route::WriteFile && len > MAX_BODY_U64) {
        return refuse(conn, 413, "the request's body is too large");
    }
    if route == Route::Tunnel {
        return tunnel::begin(core, key, conn, &head.path);
    }
    if route == Route::WriteFile {
        match files::write(core, &head) {
            Ok(upload) => conn.phase = Phase::Upload { upload, body },
            Err(error) => return refuse(conn, error.status, &error.message),
        }
    } else if empty {
        return handle(core, key, conn, route, &head, &[]);
    } else {
        let head = Box::new(head.clone());
        conn.phase = Phase::Collect {
            head,
            body,
            bytes: Vec::new(),
        };
    }
    if head.expects_continue && conn.input.is_empty() {
        conn.out.extend_from_slice(http::CONTINUE);
    }
}

const MAX_BODY_U64: u64 = 4 << 20;

/// Drops a body that has arrived in whole; whether it had, so that the connection can go on.
fn skip_body(conn: &mut Conn, body: &Framing) -> bool {
    match body {
        Framing::Chunked(_) => false,
        Framing::Length(len) => match usize::try_from(*len) {
            Ok(len) if len <= conn.input.len() => {
                conn.consume(len);
                true
            }
            Ok(_) | Err(_) => false,
        },
    }
}

/// Compares without telling by its duration where the first difference is. No secret set: anything will do.
pub(crate) fn is_same_secret(wanted: &str, given: &str) -> bool {
    if wanted.is_empty() {
        return true;
    }
    let differences = wanted
        .bytes()
        .zip(given.bytes())
        .fold(0, |sum, (a, b)| sum | (a ^ b));
    std::hint::black_box(differences) == 0 && wanted.len() == given.len()
}

/// What a piece of a body led to.
enum Taken {
    More,
    Whole,
    Refused(u16, String),
}

fn read_body(core: &mut Core, key: Key, conn: &mut Conn) -> Result<Step, Gone> {
    let (taken, used) = take_body(conn);
    conn.consume(used);
    match taken {
        Taken::Whole => finish_body(core, key, conn),
        Taken::Refused(status, message) => conn.refuse(status, &message),
        Taken::More => {
            conn.wake = Some(Instant::now() + PATIENCE);
            if !conn.fill(&mut core.scratch)? {
                return Ok(Step::Wait);
            }
        }
    }
    Ok(Step::Again)
}

/// Moves what is there of a body to where it belongs; and how much of the input that used.
fn take_body(conn: &mut Conn) -> (Taken, usize) {
    let (Phase::Collect { body, .. } | Phase::Upload { body, .. }) = &mut conn.phase else {
        return (Taken::More, 0);
    };
    let mut body = std::mem::replace(body, Framing::Length(0));
    let input = std::mem::take(&mut conn.input);
    let mut rest = input.as_slice();
    let taken = loop {
        match body.next(&mut rest) {
            Err(error) => break Taken::Refused(400, error.to_string()),
            Ok(Decoded::More) => break Taken::More,
            Ok(Decoded::End) => break Taken::Whole,
            Ok(Decoded::Data(data)) => {
                if let Err(error) = store(&mut conn.phase, data) {
                    break Taken::Refused(error.status, error.message);
                }
            }
        }
    };
    let used = input.len() - rest.len();
    conn.input = input;
    if let Phase::Collect { body: place, .. } | Phase::Upload { body: place, .. } = &mut conn.phase
    {
        *place = body;
    }
    (taken, used)
}

fn store(phase: &mut Phase, data: &[u8]) -> Result<(), FileError> {
    match phase {
        Phase::Upload { upload, .. } => upload.write(data),
        Phase::Collect { bytes, .. } if bytes.len() + data.len() > MAX_BODY => Err(FileError {
            status: 413,
            message: "the request's body is too large".into(),
        }),
        Phase::Collect { bytes, .. } => {
            bytes.extend_from_slice(data);
            Ok(())
        }
        _ => Ok(()),
    }
}

fn finish_body(core: &mut Core, key: Key, conn: &mut Conn) {
    conn.wake = None;
    match std::mem::replace(&mut conn.phase, Phase::Head) {
        Phase::Collect { head, bytes, .. } => match route::find(&head.method, &head.path) {
            Ok(route) => handle(core, key, conn, route, &head, &bytes),
            Err(_) => conn.error(404, "no such route"),
        },
        Phase::Upload { upload, .. } => match upload.finish() {
            Ok(written) => {
                let written = serde_json::to_vec(&written).unwrap_or_default();
                conn.answer(200, http::JSON, &written);
            }
            Err(error) => conn.error(error.status, &error.message),
        },
        other => conn.phase = other,
    }
}

/// Calls the handler. The body is whole.
fn handle(core: &mut Core, key: Key, conn: &mut Conn, route: Route, head: &Head, body: &[u8]) {
    match route {
        Route::Health => conn.answer(204, "", b""),
        Route::Init => init(core, conn, body),
        Route::Envs => {
            let json = serde_json::to_vec(&core.settings.env_vars).unwrap_or_default();
            conn.answer(200, http::JSON, &json);
        }
        Route::Metrics => match core.meter.read() {
            Ok(metrics) => {
                let json = serde_json::to_vec(&metrics).unwrap_or_default();
                conn.answer(200, http::JSON, &json);
            }
            Err(error) => conn.error(500, &format!("cannot read what is used: {error}")),
        },
        Route::ReadFile => files::read(core, conn, head),
        // Their bodies never come here.
        Route::WriteFile | Route::Tunnel | Route::StreamInput => {
            conn.error(500, "a body went astray")
        }
        Route::Stream(method) => rpc::stream(core, key, conn, method, head, body),
        Route::Unary(method) => rpc::unary(core, key, conn, method, head, body),
        Route::UnknownRpc => rpc::unknown(conn, head),
    }
}

#[inline(never)]
fn init(core: &mut Core, conn: &mut Conn, body: &[u8]) {
    let request: InitRequest =
        match serde_json::from_slice(if body.is_empty() { b"{}" } else { body }) {
            Ok(request) => request,
            Err(error) => return conn.error(400, &format!("bad init request: {error}")),
        };
    if let Err(error) = core.duties.apply(&request) {
        let status = match error {
            IdentityError::Invalid(_) => 400,
            IdentityError::System { .. } => 500,
        };
        return conn.error(status, &model::chain(&error));
    }
    if !request.env_vars.is_empty() {
        let json = serde_json::to_vec(&request.env_vars).unwrap_or_default();
        if let Err(error) = core.duties.publish_environment(&json) {
            return conn.error(500, &model::chain(&error));
        }
        core.settings.env_vars = request.env_vars;
    }
    let settings = &mut core.settings;
    settings.access_token = request
        .access_token
        .unwrap_or(std::mem::take(&mut settings.access_token));
    settings.default_user = request
        .default_user
        .unwrap_or(std::mem::take(&mut settings.default_user));
    settings.default_workdir = request
        .default_workdir
        .unwrap_or(std::mem::take(&mut settings.default_workdir));
    settings.initialised = true;
    conn.answer(204, "", b"");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_compared_whole() {
        assert!(is_same_secret("", "anything"));
        assert!(is_same_secret("abc", "abc"));
        for wrong in ["", "ab", "abd", "abcd"] {
            assert!(!is_same_secret("abc", wrong), "{wrong}");
        }
    }
}
