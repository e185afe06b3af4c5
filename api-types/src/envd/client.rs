//! A small blocking client: one connection, requests one after another, no runtime.
//!
//! Every call has a deadline that covers all of it. After an error the connection is in an unknown state:
//! drop the client and connect again.

mod input;

use std::{
    collections::BTreeMap,
    io,
    os::unix::net::UnixStream,
    path::Path,
    time::{Duration, Instant},
};

use serde::{Serialize, de::DeserializeOwned};

pub use input::InputStream;

use super::{
    Blob, ChunkedDecoder, ConnectError, Decoded, EndEvent, EndStream, ErrorBody, EventResponse,
    InitRequest, Metrics, ProcessConfig, ProcessEvent, StartRequest, Transport, WriteInfo, frame,
};

/// Longest answer head in bytes.
const MAX_HEAD: usize = 16 << 10;
/// Longest answer body that is collected, and longest file that is read.
const MAX_BODY: usize = 256 << 20;
/// Longest message in a stream.
const MAX_FRAME: u32 = 8 << 20;
/// Output that [`EnvdClient::exec`] collects at most, both streams together.
pub const MAX_EXEC_OUTPUT: usize = 256 << 20;
const READ_SIZE: usize = 64 << 10;

/// Why a call failed, by what the caller can do.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody is there (any more): the VMM's socket, the guest's port or the connection is gone. A guest
    /// that is still booting looks like this too.
    #[error("the agent cannot be reached ({doing})")]
    NotReachable {
        /// What was tried.
        doing: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The agent said no.
    #[error("the agent refused: {status} {code}: {message}")]
    Refused {
        /// HTTP status; 200 when the refusal came inside a stream.
        status: u16,
        /// The code of the body: a number on plain routes, a Connect name on RPC routes.
        code: String,
        /// For a person.
        message: String,
    },
    /// The deadline passed.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// The peer does not speak this protocol, or one side has a bug.
    #[error("unexpected answer: {0}")]
    Protocol(String),
}

/// A command for [`EnvdClient::exec`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExecRequest {
    /// Program, see [`ProcessConfig::cmd`].
    pub cmd: String,
    /// Arguments after the program's own name.
    pub args: Vec<String>,
    /// Added to the environment.
    pub envs: BTreeMap<String, String>,
    /// Working directory; absent means the sandbox's default.
    pub cwd: Option<String>,
    /// Who runs it; absent means the sandbox's default user.
    pub user: Option<String>,
    /// A name to select it by.
    pub tag: Option<String>,
    /// Whether it gets a pipe as standard input; `None` leaves the key out of the message.
    pub stdin: Option<bool>,
    /// The agent kills it after this long; absent means never.
    pub kill_after: Option<Duration>,
}

impl ExecRequest {
    /// A command without standard input and with everything else left to the sandbox's defaults.
    #[must_use]
    pub fn new(cmd: impl Into<String>, args: &[&str]) -> Self {
        Self {
            cmd: cmd.into(),
            args: args.iter().map(ToString::to_string).collect(),
            stdin: Some(false),
            ..Self::default()
        }
    }
}

/// What a command left behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecOutput {
    /// Process id inside the guest.
    pub pid: u32,
    /// All of standard output.
    pub stdout: Vec<u8>,
    /// All of standard error.
    pub stderr: Vec<u8>,
    /// -1 when a signal ended it.
    pub exit_code: i32,
    /// Whether it ended by itself.
    pub exited: bool,
    /// `exit status N` or `signal: killed`.
    pub status: String,
    /// When its first output arrived; absent when it wrote nothing.
    pub first_byte: Option<Instant>,
}

/// A whole HTTP answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpAnswer {
    /// HTTP status.
    pub status: u16,
    /// Names in lower case, in the order of the wire.
    pub headers: Vec<(String, String)>,
    /// With transfer coding removed.
    pub body: Vec<u8>,
}

impl HttpAnswer {
    /// The first header of that lower-case name.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(n, _)| n == name);
        found.map(|(_, value)| value.as_str())
    }
}

/// One connection to an agent, straight or through whatever forwards to it.
#[derive(Debug)]
pub struct EnvdClient<S = UnixStream> {
    stream: S,
    /// Bytes received and not yet used: those from `at` on.
    held: Vec<u8>,
    at: usize,
    timeout: Duration,
    token: Option<String>,
    /// Value of `Host`.
    authority: String,
    /// Sent with every request.
    headers: Vec<(String, String)>,
}

/// A moment, and the duration it came from for the error text.
#[derive(Clone, Copy, Debug)]
struct Deadline {
    at: Instant,
    timeout: Duration,
}

impl Deadline {
    fn after(timeout: Duration) -> Self {
        let now = Instant::now();
        let at = now.checked_add(timeout);
        Self {
            at: at.unwrap_or_else(|| now + Duration::from_secs(86_400)),
            timeout,
        }
    }

    fn left(self) -> Result<Duration, ClientError> {
        let left = self.at.saturating_duration_since(Instant::now());
        match left.is_zero() {
            true => Err(ClientError::Timeout(self.timeout)),
            false => Ok(left),
        }
    }

    fn failed(self, doing: &'static str, source: io::Error) -> ClientError {
        match source.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                ClientError::Timeout(self.timeout)
            }
            _ => ClientError::NotReachable { doing, source },
        }
    }
}

/// How the body of an answer ends.
enum Body {
    Length(u64),
    Chunked(ChunkedDecoder),
    UntilClose,
}

struct Head {
    status: u16,
    headers: Vec<(String, String)>,
    body: Body,
}

fn protocol(what: impl std::fmt::Display) -> ClientError {
    ClientError::Protocol(what.to_string())
}

impl EnvdClient {
    /// Connects to a guest port through the VMM's vsock unix socket: writes `CONNECT <port>` and expects
    /// `OK <n>`. `timeout` bounds this and every later call that names none.
    ///
    /// # Errors
    /// [`ClientError::NotReachable`] when the VMM or the guest's port is not there.
    pub fn connect(vsock: &Path, port: u16, timeout: Duration) -> Result<Self, ClientError> {
        let mut client = Self::connect_unix(vsock, timeout)?;
        let deadline = Deadline::after(timeout);
        client.send(&[format!("CONNECT {port}\n").as_bytes()], deadline)?;
        let end = loop {
            if let Some(end) = client.unused().iter().position(|b| *b == b'\n') {
                break end;
            }
            if client.unused().len() > 64 {
                return Err(protocol("the vsock socket does not say OK"));
            }
            client.receive("connecting to the guest's port", deadline)?;
        };
        if !client.unused().starts_with(b"OK ") {
            return Err(protocol("the vsock socket does not say OK"));
        }
        client.at += end + 1;
        Ok(client)
    }

    /// Connects to an agent that listens on a unix socket itself.
    ///
    /// # Errors
    /// [`ClientError::NotReachable`].
    pub fn connect_unix(path: &Path, timeout: Duration) -> Result<Self, ClientError> {
        let stream = UnixStream::connect(path).map_err(|source| ClientError::NotReachable {
            doing: "connecting to the socket",
            source,
        })?;
        Ok(Self::over(stream, timeout))
    }
}

impl<S: Transport> EnvdClient<S> {
    /// Speaks over a stream that is connected to the agent already.
    #[must_use]
    pub fn over(stream: S, timeout: Duration) -> Self {
        Self {
            stream,
            held: Vec::new(),
            at: 0,
            timeout,
            token: None,
            authority: "guest".to_owned(),
            headers: Vec::new(),
        }
    }

    /// From now on requests name this `Host` and carry these headers as well: what a proxy between here and
    /// the agent goes by. The caller keeps line ends out of them.
    pub fn set_route(&mut self, authority: &str, headers: &[(&str, &str)]) {
        self.authority = authority.to_owned();
        self.headers = headers
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
    }

    /// Sends this `X-Access-Token` from now on.
    pub fn set_access_token(&mut self, token: Option<String>) {
        self.token = token;
    }

    /// The bound of calls that name none.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// `GET /health`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn health(&mut self) -> Result<(), ClientError> {
        let answer = self.request("GET", "/health", &[], b"")?;
        accept(&answer)
    }

    /// `GET /metrics`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn metrics(&mut self) -> Result<Metrics, ClientError> {
        let answer = self.request("GET", "/metrics", &[], b"")?;
        accept(&answer)?;
        serde_json::from_slice(&answer.body).map_err(protocol)
    }

    /// `POST /init`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn init(&mut self, init: &InitRequest) -> Result<(), ClientError> {
        let body = serde_json::to_vec(init).map_err(protocol)?;
        let json = [("content-type", "application/json")];
        let answer = self.request("POST", "/init", &json, &body)?;
        accept(&answer)
    }

    /// A unary RPC, `process.Process/List` for example.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn call<Q: Serialize, A: DeserializeOwned>(
        &mut self,
        method: &str,
        message: &Q,
    ) -> Result<A, ClientError> {
        let body = serde_json::to_vec(message).map_err(protocol)?;
        let headers = [
            ("content-type", "application/json"),
            ("connect-protocol-version", "1"),
        ];
        let answer = self.request("POST", &format!("/{method}"), &headers, &body)?;
        accept(&answer)?;
        serde_json::from_slice(&answer.body).map_err(protocol)
    }

    /// Runs a command to its end and collects its output.
    ///
    /// # Errors
    /// See [`ClientError`]; a command that fails is no error. On [`ClientError::Timeout`] the command goes
    /// on unless [`ExecRequest::kill_after`] says otherwise.
    pub fn exec(
        &mut self,
        request: &ExecRequest,
        timeout: Duration,
    ) -> Result<ExecOutput, ClientError> {
        let mut stream = self.start(request, timeout)?;
        let mut output = ExecOutput {
            pid: stream.pid(),
            stdout: Vec::new(),
            stderr: Vec::new(),
            exit_code: -1,
            exited: false,
            status: String::new(),
            first_byte: None,
        };
        let mut end = None;
        while let Some(event) = stream.next_event()? {
            if let Some(data) = event.data {
                output.first_byte.get_or_insert_with(Instant::now);
                output.stdout.extend(data.stdout.unwrap_or_default().0);
                output.stderr.extend(data.stderr.unwrap_or_default().0);
            }
            if output.stdout.len() + output.stderr.len() > MAX_EXEC_OUTPUT {
                return Err(protocol("the command writes more than is collected"));
            }
            end = event.end.or(end);
        }
        let end: EndEvent = end.ok_or_else(|| protocol("a stream without an end event"))?;
        output.exit_code = end.exit_code;
        output.exited = end.exited;
        output.status = end.status;
        Ok(output)
    }

    /// Starts a command and returns once the agent has said that it runs. `timeout` bounds the whole stream.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn start(
        &mut self,
        request: &ExecRequest,
        timeout: Duration,
    ) -> Result<ExecStream<'_, S>, ClientError> {
        let message = StartRequest {
            process: Some(ProcessConfig {
                cmd: request.cmd.clone(),
                args: request.args.clone(),
                envs: request.envs.clone(),
                cwd: request.cwd.clone(),
            }),
            pty: None,
            tag: request.tag.clone(),
            stdin: request.stdin,
        };
        let user = request.user.as_deref();
        let kill_after = request.kill_after;
        self.stream("process.Process/Start", &message, user, kill_after, timeout)
    }

    /// A server stream of process events: `process.Process/Start` or `process.Process/Connect`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn stream<Q: Serialize>(
        &mut self,
        method: &str,
        message: &Q,
        user: Option<&str>,
        connect_timeout: Option<Duration>,
        timeout: Duration,
    ) -> Result<ExecStream<'_, S>, ClientError> {
        let message = serde_json::to_vec(message).map_err(protocol)?;
        let mut body = Vec::with_capacity(message.len() + frame::HEADER);
        frame::encode(0, &message, &mut body).map_err(protocol)?;
        let mut headers = vec![
            ("content-type", "application/connect+json".to_owned()),
            ("connect-protocol-version", "1".to_owned()),
        ];
        if let Some(after) = connect_timeout {
            headers.push(("connect-timeout-ms", after.as_millis().max(1).to_string()));
        }
        if let Some(user) = user {
            headers.push(("authorization", basic(user)));
        }
        let headers: Vec<_> = headers.iter().map(|(n, v)| (*n, v.as_str())).collect();
        let deadline = Deadline::after(timeout);
        self.send_request("POST", &format!("/{method}"), &headers, &body, deadline)?;
        let head = self.read_head(deadline)?;
        if head.status != 200 {
            return Err(refused(&self.collect(head, deadline)?));
        }
        let mut stream = ExecStream {
            client: self,
            body: head.body,
            message: Vec::new(),
            deadline,
            pid: 0,
        };
        let first = stream.next_event()?.and_then(|event| event.start);
        let start = first.ok_or_else(|| protocol("a stream without a start event"))?;
        stream.pid = start.pid;
        Ok(stream)
    }

    /// `GET /files`: the bytes of a file of at most 256 MiB.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn read_file(&mut self, path: &str, user: Option<&str>) -> Result<Vec<u8>, ClientError> {
        let answer = self.request("GET", &files_target(path, user), &[], b"")?;
        accept(&answer)?;
        Ok(answer.body)
    }

    /// `POST /files`: replaces a file's content, making its parents.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn write_file(
        &mut self,
        path: &str,
        bytes: &[u8],
        user: Option<&str>,
    ) -> Result<(), ClientError> {
        let raw = [("content-type", "application/octet-stream")];
        let answer = self.request("POST", &files_target(path, user), &raw, bytes)?;
        accept(&answer)?;
        let _: Vec<WriteInfo> = serde_json::from_slice(&answer.body).map_err(protocol)?;
        Ok(())
    }

    /// Turns the connection into a stream to a TCP port of the guest's loopback.
    ///
    /// # Errors
    /// [`ClientError::Refused`] with status 502 when nobody listens there; see [`ClientError`].
    pub fn tunnel(mut self, port: u16) -> Result<Tunnel<S>, ClientError> {
        let deadline = Deadline::after(self.timeout);
        let head = format!("CONNECT 127.0.0.1:{port} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n");
        self.send(&[head.as_bytes()], deadline)?;
        let head = self.read_head(deadline)?;
        if head.status != 200 {
            return Err(refused(&self.collect(head, deadline)?));
        }
        let early = self.unused().to_vec();
        let unlimited = self.stream.bound_reads(None);
        unlimited
            .and_then(|()| self.stream.bound_writes(None))
            .map_err(|source| deadline.failed("opening a tunnel", source))?;
        Ok(Tunnel {
            stream: self.stream,
            early,
        })
    }

    /// Any request with a `Content-Length` body, answered in whole, whatever its status.
    ///
    /// # Errors
    /// All but [`ClientError::Refused`].
    pub fn request(
        &mut self,
        method: &str,
        target: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Result<HttpAnswer, ClientError> {
        let deadline = Deadline::after(self.timeout);
        self.send_request(method, target, headers, body, deadline)?;
        let head = self.read_head(deadline)?;
        self.collect(head, deadline)
    }

    /// Sends bytes as they are and reads one answer; for tests of bad requests.
    ///
    /// # Errors
    /// All but [`ClientError::Refused`].
    pub fn raw(&mut self, bytes: &[u8]) -> Result<HttpAnswer, ClientError> {
        let deadline = Deadline::after(self.timeout);
        self.send(&[bytes], deadline)?;
        let head = self.read_head(deadline)?;
        self.collect(head, deadline)
    }

    fn send_request(
        &mut self,
        method: &str,
        target: &str,
        headers: &[(&str, &str)],
        body: &[u8],
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        let mut head = format!("{method} {target} HTTP/1.1\r\nhost: {}\r\n", self.authority);
        let token = self.token.as_deref().map(|token| ("x-access-token", token));
        let route = self.headers.iter().map(|(n, v)| (n.as_str(), v.as_str()));
        for (name, value) in headers.iter().copied().chain(route).chain(token) {
            head.extend([name, ": ", value, "\r\n"]);
        }
        if method != "GET" {
            head.extend(["content-length: ", &body.len().to_string(), "\r\n"]);
        }
        head.push_str("\r\n");
        self.send(&[head.as_bytes(), body], deadline)
    }

    /// Writes the parts, small ones in one system call.
    fn send(&mut self, parts: &[&[u8]], deadline: Deadline) -> Result<(), ClientError> {
        let failed = |source| deadline.failed("sending", source);
        let together;
        let small = parts.iter().map(|p| p.len()).sum::<usize>() <= READ_SIZE;
        let parts = match small {
            true => {
                together = parts.concat();
                &[together.as_slice()]
            }
            false => parts,
        };
        for part in parts {
            let mut rest = *part;
            while !rest.is_empty() {
                let left = deadline.left()?;
                self.stream.bound_writes(Some(left)).map_err(failed)?;
                match self.stream.write(rest) {
                    Ok(n) => rest = rest.get(n..).unwrap_or_default(),
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    // A server that refuses early answers and closes; the answer can still be read.
                    Err(e) if e.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
                    Err(e) => return Err(failed(e)),
                }
            }
        }
        Ok(())
    }

    fn unused(&self) -> &[u8] {
        self.held.get(self.at..).unwrap_or_default()
    }

    /// Reads once, at least one byte.
    fn receive(&mut self, doing: &'static str, deadline: Deadline) -> Result<(), ClientError> {
        match self.receive_or_end(doing, deadline)? {
            0 => Err(ClientError::NotReachable {
                doing,
                source: io::ErrorKind::UnexpectedEof.into(),
            }),
            _ => Ok(()),
        }
    }

    /// Reads once; zero bytes mean that the peer has closed.
    fn receive_or_end(
        &mut self,
        doing: &'static str,
        deadline: Deadline,
    ) -> Result<usize, ClientError> {
        if self.at == self.held.len() {
            self.held.clear();
            self.at = 0;
        }
        let failed = |source| deadline.failed(doing, source);
        let old = self.held.len();
        self.held.resize(old + READ_SIZE, 0);
        let read = loop {
            let left = deadline.left()?;
            self.stream.bound_reads(Some(left)).map_err(failed)?;
            match self
                .stream
                .read(self.held.get_mut(old..).unwrap_or_default())
            {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                other => break other.map_err(failed),
            }
        };
        self.held.truncate(old + read.as_ref().map_or(0, |n| *n));
        read
    }

    /// Reads the head of the next answer that is not an interim one.
    fn read_head(&mut self, deadline: Deadline) -> Result<Head, ClientError> {
        loop {
            let mut space = [httparse::EMPTY_HEADER; 64];
            let mut parsed = httparse::Response::new(&mut space);
            let bytes = self.held.get(self.at..).unwrap_or_default();
            match parsed.parse(bytes).map_err(protocol)? {
                httparse::Status::Complete(len) => {
                    let head = understand(&parsed)?;
                    self.at += len;
                    if head.status >= 200 {
                        return Ok(head);
                    }
                }
                httparse::Status::Partial if bytes.len() > MAX_HEAD => {
                    return Err(protocol("an answer head without end"));
                }
                httparse::Status::Partial => self.receive("waiting for an answer", deadline)?,
            }
        }
    }

    fn collect(&mut self, mut head: Head, deadline: Deadline) -> Result<HttpAnswer, ClientError> {
        let mut body = Vec::new();
        while self.read_body(&mut head.body, &mut body, deadline)? {
            if body.len() > MAX_BODY {
                return Err(protocol("an answer above 256 MiB"));
            }
        }
        Ok(HttpAnswer {
            status: head.status,
            headers: head.headers,
            body,
        })
    }

    /// Moves what is there of a body to `out`, after waiting for some if there is none; false at its end.
    fn read_body(
        &mut self,
        body: &mut Body,
        out: &mut Vec<u8>,
        deadline: Deadline,
    ) -> Result<bool, ClientError> {
        const DOING: &str = "reading an answer";
        match body {
            Body::Length(0) => Ok(false),
            Body::Length(left) => {
                if self.unused().is_empty() {
                    self.receive(DOING, deadline)?;
                }
                let there = self.unused();
                let n = usize::try_from(*left).map_or(there.len(), |left| left.min(there.len()));
                out.extend_from_slice(there.get(..n).unwrap_or_default());
                self.at += n;
                *left -= u64::try_from(n).unwrap_or(*left);
                Ok(true)
            }
            Body::UntilClose => {
                let read = match self.unused().is_empty() {
                    true => self.receive_or_end(DOING, deadline)?,
                    false => 1,
                };
                out.extend_from_slice(self.held.get(self.at..).unwrap_or_default());
                self.at = self.held.len();
                Ok(read > 0)
            }
            Body::Chunked(decoder) => loop {
                let mut input = self.held.get(self.at..).unwrap_or_default();
                let step = decoder.step(&mut input).map_err(protocol)?;
                self.at = self.held.len() - input.len();
                match step {
                    Decoded::Data(data) => {
                        out.extend_from_slice(data);
                        return Ok(true);
                    }
                    Decoded::End => return Ok(false),
                    Decoded::More => self.receive(DOING, deadline)?,
                }
            },
        }
    }
}

/// A stream to a port of the guest.
#[derive(Debug)]
pub struct Tunnel<S = UnixStream> {
    /// The connection; both directions end independently. Without timeouts.
    pub stream: S,
    /// What the port has sent already, to be read before the stream.
    pub early: Vec<u8>,
}

/// A running command's events. Dropping it half-way leaves the connection unusable; the command goes on.
#[derive(Debug)]
pub struct ExecStream<'a, S = UnixStream> {
    client: &'a mut EnvdClient<S>,
    body: Body,
    /// Bytes of frames not yet whole.
    message: Vec<u8>,
    deadline: Deadline,
    pid: u32,
}

impl std::fmt::Debug for Body {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Length(left) => write!(f, "Length({left})"),
            Self::Chunked(_) => f.write_str("Chunked"),
            Self::UntilClose => f.write_str("UntilClose"),
        }
    }
}

impl<S: Transport> ExecStream<'_, S> {
    /// The command's process id inside the guest.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits for the next event; `None` after the stream has ended well.
    ///
    /// # Errors
    /// [`ClientError::Refused`] with status 200 when the stream ends with an error; all others.
    pub fn next_event(&mut self) -> Result<Option<ProcessEvent>, ClientError> {
        loop {
            if let Some((frame, used)) =
                frame::decode(&self.message, MAX_FRAME).map_err(protocol)?
            {
                if frame.flags & frame::END_STREAM != 0 {
                    let end: EndStream = serde_json::from_slice(frame.body).map_err(protocol)?;
                    self.message.clear();
                    return self.finish(end);
                }
                let event: EventResponse = serde_json::from_slice(frame.body).map_err(protocol)?;
                self.message.drain(..used);
                return Ok(Some(event.event));
            }
            let more = self
                .client
                .read_body(&mut self.body, &mut self.message, self.deadline)?;
            if !more {
                return Err(protocol("a stream without an end-of-stream frame"));
            }
        }
    }

    /// Reads what follows the last frame, so that the connection can be used again.
    fn finish(&mut self, end: EndStream) -> Result<Option<ProcessEvent>, ClientError> {
        while self
            .client
            .read_body(&mut self.body, &mut self.message, self.deadline)?
        {}
        match end.error {
            None => Ok(None),
            Some(error) => Err(refusal(200, &error)),
        }
    }
}

/// What matters of a parsed answer head.
fn understand(parsed: &httparse::Response<'_, '_>) -> Result<Head, ClientError> {
    let status = parsed.code.unwrap_or_default();
    let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
    let headers = parsed.headers.iter();
    let headers: Vec<_> = headers
        .map(|h| (h.name.to_ascii_lowercase(), text(h.value)))
        .collect();
    let find = |name| headers.iter().find(|(n, _)| n == name).map(|(_, v)| v);
    let body = match (find("transfer-encoding"), find("content-length")) {
        (Some(coding), _) if coding.eq_ignore_ascii_case("chunked") => {
            Body::Chunked(ChunkedDecoder::default())
        }
        (Some(coding), _) => return Err(protocol(format!("transfer coding {coding}"))),
        (None, Some(len)) => Body::Length(len.parse().map_err(protocol)?),
        (None, None) if status < 200 || status == 204 || status == 304 => Body::Length(0),
        (None, None) => Body::UntilClose,
    };
    Ok(Head {
        status,
        headers,
        body,
    })
}

fn accept(answer: &HttpAnswer) -> Result<(), ClientError> {
    match answer.status {
        200..300 => Ok(()),
        _ => Err(refused(answer)),
    }
}

/// Looks for an error at the end of a stream that was collected in whole.
fn accept_stream(mut body: &[u8]) -> Result<(), ClientError> {
    while let Some((frame, used)) = frame::decode(body, MAX_FRAME).map_err(protocol)? {
        if frame.flags & frame::END_STREAM != 0 {
            let end: EndStream = serde_json::from_slice(frame.body).map_err(protocol)?;
            return match end.error {
                None => Ok(()),
                Some(error) => Err(refusal(200, &error)),
            };
        }
        body = body.get(used..).unwrap_or_default();
    }
    Err(protocol("a stream without an end-of-stream frame"))
}

/// The refusal in a failed answer, whichever of the two error bodies it has.
fn refused(answer: &HttpAnswer) -> ClientError {
    let status = answer.status;
    if let Ok(error) = serde_json::from_slice::<ErrorBody>(&answer.body) {
        return ClientError::Refused {
            status,
            code: error.code.to_string(),
            message: error.message,
        };
    }
    match serde_json::from_slice::<ConnectError>(&answer.body) {
        Ok(error) => refusal(status, &error),
        Err(_) => protocol(format!("status {status} without an error body")),
    }
}

fn refusal(status: u16, error: &ConnectError) -> ClientError {
    let code = serde_json::to_string(&error.code).unwrap_or_default();
    ClientError::Refused {
        status,
        code: code.trim_matches('"').to_owned(),
        message: error.message.clone(),
    }
}

fn basic(user: &str) -> String {
    let mut value = b"Basic ".to_vec();
    Blob::encode_into(format!("{user}:").as_bytes(), &mut value);
    String::from_utf8(value).unwrap_or_default()
}

fn files_target(path: &str, user: Option<&str>) -> String {
    let mut target = String::from("/files?path=");
    percent_encode(path, &mut target);
    if let Some(user) = user {
        target.push_str("&username=");
        percent_encode(user, &mut target);
    }
    target
}

fn percent_encode(text: &str, out: &mut String) {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'-' | b'_' | b'.' | b'~' => {
                out.push(char::from(byte));
            }
            _ => {
                out.push('%');
                out.extend([byte >> 4, byte & 15].map(|n| char::from(HEX[usize::from(n)])));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::{Read, Write},
        os::unix::net::UnixListener,
    };

    const PATIENCE: Duration = Duration::from_secs(10);

    /// Connects to a peer that reads one line and then says `answer`, whatever it was asked.
    fn connect_to(answer: &'static [u8]) -> (Result<EnvdClient, ClientError>, String) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vsock");
        let listener = UnixListener::bind(&path).unwrap();
        let peer = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut line = Vec::new();
            while !line.ends_with(b"\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                line.extend(byte);
            }
            stream.write_all(answer).unwrap();
            (String::from_utf8(line).unwrap(), stream)
        });
        let client = EnvdClient::connect(&path, 49_983, PATIENCE);
        let (line, _stream) = peer.join().unwrap();
        (client, line)
    }

    #[test]
    fn the_handshake_leaves_what_follows_it() {
        let (client, line) = connect_to(b"OK 1073741824\nHTTP/1.1 204 No Content\r\n\r\n");
        assert_eq!(line, "CONNECT 49983\n");
        client.unwrap().health().unwrap();
    }

    #[test]
    fn a_closed_port_is_not_reachable() {
        let nobody = EnvdClient::connect(Path::new("/nowhere/vsock"), 1, PATIENCE);
        assert!(matches!(nobody, Err(ClientError::NotReachable { .. })));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vsock");
        let listener = UnixListener::bind(&path).unwrap();
        let peer = std::thread::spawn(move || drop(listener.accept()));
        let closed = EnvdClient::connect(&path, 1, PATIENCE);
        peer.join().unwrap();
        assert!(
            matches!(closed, Err(ClientError::NotReachable { .. })),
            "{closed:?}"
        );
    }

    #[test]
    fn another_protocol_is_told_apart() {
        let (client, _) = connect_to(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        assert!(
            matches!(client, Err(ClientError::Protocol(_))),
            "{client:?}"
        );
    }

    #[test]
    fn silence_ends_at_the_deadline() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut client = EnvdClient::over(ours, Duration::from_millis(50));
        assert!(matches!(client.health(), Err(ClientError::Timeout(_))));
    }
}
