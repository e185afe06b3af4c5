//! From bytes on a connection to a handler, and back.

use std::time::{Duration, Instant};

use api_types::envd::{ConnectCode, ConnectError, Decoded, InitRequest};

use super::{
    Core, ROUNDS, Work,
    conn::{Conn, Gone, HIGH_WATER, Phase, Rest},
    files::{self, Download, FileError, Upload},
    http::{self, After, Body, Head},
    route::{self, NoRoute, Route},
    rpc,
    slots::Key,
};
use crate::{console, identity::IdentityError, users::User};

/// Largest body that a handler takes in whole.
const MAX_BODY: usize = 4 << 20;
/// How long the next bytes of a request may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes of a refused request that are read before its connection is dropped.
const DRAIN: usize = 1 << 20;

/// Whether there is more to do at once.
enum Step {
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
    match conn.writable || conn.watches_room {
        true => Ok(()),
        false => core.watch_room(key, conn).map_err(|_| Gone),
    }
}

fn step(core: &mut Core, key: Key, conn: &mut Conn) -> Result<Step, Gone> {
    let backlog = conn.backlog();
    match &mut conn.phase {
        // Who does not read answers may not ask further.
        Phase::Head | Phase::Collect { .. } | Phase::Upload { .. } if backlog > 0 => Ok(Step::Wait),
        Phase::Head => read_head(core, key, conn),
        Phase::Collect { .. } | Phase::Upload { .. } => read_body(core, key, conn),
        Phase::Download(_) => send_file(core, conn),
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
        Phase::Input => gone_or_wait(conn),
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
    match conn.hangup {
        true => Err(Gone),
        false => Ok(Step::Wait),
    }
}

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
    let parsed = match conn.input.is_empty() {
        true => Ok(None),
        false => http::parse(&conn.input),
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
fn begin(core: &mut Core, key: Key, conn: &mut Conn, head: Head, body: Body) {
    let empty = matches!(body, Body::Length(0));
    let refuse = |conn: &mut Conn, status, message: &str| match skip_body(conn, &body) {
        true => conn.error(status, message),
        false => conn.refuse(status, message),
    };
    let route = match route::find(&head.method, &head.path) {
        Ok(route) => route,
        Err(NoRoute::NotFound) => return refuse(conn, 404, "no such route"),
        Err(NoRoute::MethodNotAllowed) => return refuse(conn, 405, "method not allowed"),
    };
    if !route.is_open() && !core.settings.initialised {
        return refuse(conn, 503, "the sandbox has not been given its identity yet");
    }
    if !route.is_open() && !is_same_secret(&core.settings.access_token, &head.access_token) {
        return refuse(conn, 401, UNAUTHORIZED);
    }
    if matches!(body, Body::Length(len) if route != Route::WriteFile && len > MAX_BODY_U64) {
        return refuse(conn, 413, "the request's body is too large");
    }
    if route == Route::WriteFile {
        match open_upload(core, &head) {
            Ok(upload) => {
                conn.phase = Phase::Upload {
                    upload: Box::new(upload),
                    body,
                }
            }
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
fn skip_body(conn: &mut Conn, body: &Body) -> bool {
    match body {
        Body::Chunked(_) => false,
        Body::Length(len) => match usize::try_from(*len) {
            Ok(len) if len <= conn.input.len() => {
                conn.consume(len);
                true
            }
            Ok(_) | Err(_) => false,
        },
    }
}

/// Compares without telling by its duration where the first difference is. No secret set: anything will do.
fn is_same_secret(wanted: &str, given: &str) -> bool {
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
    let mut body = std::mem::replace(body, Body::Length(0));
    let input = std::mem::take(&mut conn.input);
    let mut rest = input.as_slice();
    let taken = loop {
        match body.next(&mut rest) {
            Err(message) => break Taken::Refused(400, message),
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

impl Body {
    /// The next bytes at the front of `input`.
    fn next<'a>(&mut self, input: &mut &'a [u8]) -> Result<Decoded<'a>, String> {
        match self {
            Self::Chunked(decoder) => decoder.step(input).map_err(|error| error.to_string()),
            Self::Length(0) => Ok(Decoded::End),
            Self::Length(_) if input.is_empty() => Ok(Decoded::More),
            Self::Length(left) => {
                let n = usize::try_from(*left).map_or(input.len(), |left| left.min(input.len()));
                let (data, rest) = input.split_at(n);
                *input = rest;
                *left -= u64::try_from(n).unwrap_or(*left);
                Ok(Decoded::Data(data))
            }
        }
    }
}

fn finish_body(core: &mut Core, key: Key, conn: &mut Conn) {
    conn.wake = None;
    match std::mem::replace(&mut conn.phase, Phase::Head) {
        Phase::Collect { head, bytes, .. } => match route::find(&head.method, &head.path) {
            Ok(route) => handle(core, key, conn, route, &head, &bytes),
            Err(_) => conn.error(404, "no such route"),
        },
        Phase::Upload { upload, .. } => {
            let written = serde_json::to_vec(&[upload.finish()]).unwrap_or_default();
            conn.answer(200, http::JSON, &written);
        }
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
        Route::ReadFile => match open_download(core, head) {
            Ok(download) => begin_download(conn, download),
            Err(error) => conn.error(error.status, &error.message),
        },
        // Its body never comes here.
        Route::WriteFile => conn.error(500, "a file's content went astray"),
        Route::Stream(method) => rpc::stream(core, key, conn, method, head, body),
        Route::Unary(method) => rpc::unary(core, key, conn, method, head, body),
        Route::UnknownRpc => {
            let what = format!("{} is not offered", head.path.trim_start_matches('/'));
            let error = ConnectError::new(ConnectCode::Unimplemented, what);
            match head.content_type == http::CONNECT_JSON {
                true => conn.refuse_stream(error),
                false => rpc::answer_error(conn, &error),
            }
        }
    }
}

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
        return conn.error(status, &console::chain(&error));
    }
    let settings = &mut core.settings;
    if !request.env_vars.is_empty() {
        settings.env_vars = request.env_vars;
    }
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

/// The path and user of a request for a file.
fn file_target(core: &mut Core, head: &Head) -> Result<(std::path::PathBuf, User), FileError> {
    let value = |name| http::query_value(&head.query, name).filter(|value| !value.is_empty());
    let name = value("username").unwrap_or_else(|| core.settings.default_user.clone());
    let user = core.users.find(&name).ok_or_else(|| FileError {
        status: 401,
        message: format!("invalid username: '{name}'"),
    })?;
    let path = value("path").unwrap_or_default();
    let path = files::resolve(&path, &user.home, &user.home)?;
    Ok((path, user))
}

fn open_upload(core: &mut Core, head: &Head) -> Result<Upload, FileError> {
    let refused = |status, message: &str| FileError {
        status,
        message: message.into(),
    };
    if head.content_type.starts_with("multipart/") {
        return Err(refused(
            501,
            "multipart uploads are not offered, send application/octet-stream",
        ));
    }
    if !head.encoding.is_empty() {
        return Err(refused(501, "encoded uploads are not offered"));
    }
    let (path, user) = file_target(core, head)?;
    Upload::open(&path, &user)
}

fn open_download(core: &mut Core, head: &Head) -> Result<Download, FileError> {
    let (path, _) = file_target(core, head)?;
    Download::open(&path)
}

fn begin_download(conn: &mut Conn, download: Download) {
    const RAW: &str = "application/octet-stream";
    match download.left {
        Some(len) => http::push_sized_head(&mut conn.out, 200, RAW, len, conn.after),
        None => http::push_chunked_head(&mut conn.out, RAW, conn.after),
    }
    conn.phase = Phase::Download(download);
}

fn send_file(core: &mut Core, conn: &mut Conn) -> Result<Step, Gone> {
    if conn.backlog() >= HIGH_WATER {
        return Ok(Step::Wait);
    }
    let Phase::Download(download) = &mut conn.phase else {
        return Ok(Step::Wait);
    };
    let chunked = download.left.is_none();
    let len = match download.read(&mut core.scratch) {
        Ok(len) => len,
        // Such files say "not now" for "nothing".
        Err(error) if chunked && error.kind() == std::io::ErrorKind::WouldBlock => 0,
        Err(_) => return Err(Gone),
    };
    let over = download.left.map_or(len == 0, |left| left == 0);
    let bytes = core.scratch.get(..len).unwrap_or_default();
    if chunked && len > 0 {
        http::push_chunk_size(&mut conn.out, len);
    }
    conn.out.extend_from_slice(bytes);
    if chunked {
        let end: &[u8] = if over { http::LAST_CHUNK } else { b"\r\n" };
        conn.out.extend_from_slice(end);
    }
    if over {
        conn.end_request(Rest::Read);
    }
    Ok(Step::Again)
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
