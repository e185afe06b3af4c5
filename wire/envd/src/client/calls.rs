//! Requests with a single complete response, as opposed to streams.

use std::{
    fs::File,
    io::{Read, Write},
    os::unix::net::UnixStream,
};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::{Serialize, de::DeserializeOwned};

use super::{
    ClientError, EnvdClient,
    answer::{HttpAnswer, accept, refused},
    deadline::Deadline,
    exec::basic,
    protocol,
};
use crate::{InitRequest, Metrics, Transport, WriteInfo};

/// Characters that are escaped in query values: all except slashes and unreserved characters (RFC 3986, 2.3).
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'/')
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');

/// Maximum part of a file held in memory.
const PIECE: usize = 256 << 10;

impl<S: Transport> EnvdClient<S> {
    /// Sends `GET /health`.
    ///
    /// # Errors
    /// Returns [`ClientError::Refused`] if the agent responds with an error, and another [`ClientError`]
    /// if the call fails.
    pub fn health(&mut self) -> Result<(), ClientError> {
        let answer = self.request("GET", "/health", &[], b"")?;
        accept(&answer)
    }

    /// Sends `POST /fsfreeze`: the guest stops its programs, writes its layer back and changes nothing on it until
    /// [`Self::thaw`], or for 20 s. Returns `false` if this has not finished; the call must then be repeated.
    ///
    /// # Errors
    /// Returns [`ClientError::Refused`] if the agent responds with an error (404: its version cannot
    /// freeze), and another [`ClientError`] if the call fails. The layer may then be frozen.
    pub fn freeze(&mut self) -> Result<bool, ClientError> {
        let answer = self.request("POST", "/fsfreeze", &[], b"")?;
        accept(&answer)?;
        Ok(answer.status != 202)
    }

    /// Sends `POST /fsthaw`.
    ///
    /// # Errors
    /// Returns the errors of [`Self::freeze`].
    pub fn thaw(&mut self) -> Result<(), ClientError> {
        let answer = self.request("POST", "/fsthaw", &[], b"")?;
        accept(&answer)
    }

    /// Sends `GET /metrics`.
    ///
    /// # Errors
    /// Returns [`ClientError::Refused`] if the agent responds with an error, and another [`ClientError`]
    /// if the call fails.
    pub fn metrics(&mut self) -> Result<Metrics, ClientError> {
        let answer = self.request("GET", "/metrics", &[], b"")?;
        accept(&answer)?;
        serde_json::from_slice(&answer.body).map_err(protocol)
    }

    /// Sends `POST /init`.
    ///
    /// # Errors
    /// Returns [`ClientError::Refused`] if the agent responds with an error, and another [`ClientError`]
    /// if the call fails.
    pub fn init(&mut self, init: &InitRequest) -> Result<(), ClientError> {
        let body = serde_json::to_vec(init).map_err(protocol)?;
        let json = [("content-type", "application/json")];
        let answer = self.request("POST", "/init", &json, &body)?;
        accept(&answer)
    }

    /// Calls a unary RPC, for example `process.Process/List`.
    ///
    /// # Errors
    /// Returns [`ClientError::Refused`] if the agent responds with an error, and another [`ClientError`]
    /// if the call fails.
    pub fn call<Q: Serialize, A: DeserializeOwned>(
        &mut self,
        method: &str,
        message: &Q,
    ) -> Result<A, ClientError> {
        self.call_with(method, message, None)
    }

    /// Like [`Self::call`], as a user of the guest.
    ///
    /// # Errors
    /// Returns the errors of [`Self::call`].
    pub fn call_as<Q: Serialize, A: DeserializeOwned>(
        &mut self,
        user: &str,
        method: &str,
        message: &Q,
    ) -> Result<A, ClientError> {
        self.call_with(method, message, Some(basic(user)))
    }

    fn call_with<Q: Serialize, A: DeserializeOwned>(
        &mut self,
        method: &str,
        message: &Q,
        authorization: Option<String>,
    ) -> Result<A, ClientError> {
        let body = serde_json::to_vec(message).map_err(protocol)?;
        let mut headers = vec![
            ("content-type", "application/json"),
            ("connect-protocol-version", "1"),
        ];
        let user = authorization.as_deref();
        headers.extend(user.map(|user| ("authorization", user)));
        let answer = self.request("POST", &format!("/{method}"), &headers, &body)?;
        accept(&answer)?;
        serde_json::from_slice(&answer.body).map_err(protocol)
    }

    /// Sends `GET /files`: reads a file of at most [`AnswerLimits::body`](super::AnswerLimits) bytes.
    ///
    /// # Errors
    /// Returns [`ClientError::Refused`] if the agent responds with an error, and another [`ClientError`]
    /// if the call fails.
    pub fn read_file(&mut self, path: &str, user: Option<&str>) -> Result<Vec<u8>, ClientError> {
        let answer = self.request("GET", &files_target(path, user), &[], b"")?;
        accept(&answer)?;
        Ok(answer.body)
    }

    /// Sends `POST /files`: replaces the content of a file and creates missing parent directories.
    ///
    /// # Errors
    /// Returns [`ClientError::Refused`] if the agent responds with an error, and another [`ClientError`]
    /// if the call fails.
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

    /// Sends `GET /files` and writes the file to `to`, whatever its size. Returns its length.
    ///
    /// # Errors
    /// Returns [`ClientError::Refused`] if the agent responds with an error, [`ClientError::Local`] if
    /// `to` cannot be written, and another [`ClientError`] if the call fails.
    pub fn download(
        &mut self,
        path: &str,
        to: &mut impl Write,
        user: Option<&str>,
    ) -> Result<u64, ClientError> {
        let received = self.receive("GET", &files_target(path, user), &[], b"", to)?;
        received.map_err(|answer| refused(&answer))
    }

    /// Sends a request and writes the body of its response to `to` while it arrives. Returns its length, or the complete
    /// response if its status is not 200.
    ///
    /// # Errors
    /// Returns [`ClientError::Local`] if `to` cannot be written, and another [`ClientError`] except
    /// [`ClientError::Refused`] if the call fails.
    pub fn receive(
        &mut self,
        method: &str,
        target: &str,
        headers: &[(&str, &str)],
        body: &[u8],
        to: &mut impl Write,
    ) -> Result<Result<u64, HttpAnswer>, ClientError> {
        let deadline = Deadline::after(self.timeout);
        self.send_request(method, target, headers, body, deadline)?;
        let mut head = self.connection.read_head(deadline)?;
        if head.status != 200 {
            return Ok(Err(self.connection.collect(head, deadline)?));
        }
        let (mut piece, mut length) = (Vec::with_capacity(PIECE), 0);
        while self
            .connection
            .read_body(&mut head.body, &mut piece, deadline)?
        {
            to.write_all(&piece).map_err(|source| ClientError::Local {
                doing: "write the file of this host",
                source,
            })?;
            length += piece.len() as u64;
            piece.clear();
        }
        Ok(Ok(length))
    }

    /// Sends `POST /files` with the content of a file of this host, whatever its size.
    ///
    /// # Errors
    /// Returns [`ClientError::Refused`] if the agent responds with an error, [`ClientError::Local`] if the
    /// file cannot be read, and another [`ClientError`] if the call fails.
    pub fn upload_file(
        &mut self,
        path: &str,
        mut file: File,
        user: Option<&str>,
    ) -> Result<(), ClientError> {
        let length = file.metadata().map_err(unread)?.len();
        self.upload(path, &mut file, length, user)
    }

    /// Sends `POST /files` with the first `length` bytes of `from`.
    ///
    /// # Errors
    /// Returns the errors of [`Self::upload_file`].
    pub fn upload(
        &mut self,
        path: &str,
        from: &mut impl Read,
        length: u64,
        user: Option<&str>,
    ) -> Result<(), ClientError> {
        let raw = [("content-type", "application/octet-stream")];
        let target = files_target(path, user);
        accept(&self.send_stream("POST", &target, &raw, from, length)?)
    }

    /// Sends a request whose body is the first `length` bytes of `from`, and reads the complete response, whatever
    /// its status.
    ///
    /// # Errors
    /// Returns [`ClientError::Local`] if `from` cannot be read, and another [`ClientError`] except
    /// [`ClientError::Refused`] if the call fails.
    pub fn send_stream(
        &mut self,
        method: &str,
        target: &str,
        headers: &[(&str, &str)],
        from: &mut impl Read,
        length: u64,
    ) -> Result<HttpAnswer, ClientError> {
        let deadline = Deadline::after(self.timeout);
        let mut left = length;
        self.send_head(method, target, headers, left, b"", deadline)?;
        let mut piece = vec![0; PIECE];
        while left > 0 {
            let most = usize::try_from(left).map_or(PIECE, |left| left.min(PIECE));
            let part = piece.get_mut(..most).unwrap_or_default();
            from.read_exact(part).map_err(unread)?;
            self.connection.send(&[part], deadline)?;
            left -= most as u64;
        }
        let head = self.connection.read_head(deadline)?;
        self.connection.collect(head, deadline)
    }

    /// Turns the connection into a stream to a TCP port on the guest's loopback interface.
    ///
    /// # Errors
    /// Returns [`ClientError::Refused`] with status 502 if no program listens on the port, and another [`ClientError`]
    /// if the call fails.
    pub fn tunnel(mut self, port: u16) -> Result<Tunnel<S>, ClientError> {
        let deadline = Deadline::after(self.timeout);
        let head = format!("CONNECT 127.0.0.1:{port} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n");
        self.connection.begin()?;
        self.connection.send(&[head.as_bytes()], deadline)?;
        let head = self.connection.read_head(deadline)?;
        if head.status != 200 {
            return Err(refused(&self.connection.collect(head, deadline)?));
        }
        let early = self.connection.unused().to_vec();
        let unlimited = self.connection.stream.bound_reads(None);
        unlimited
            .and_then(|()| self.connection.stream.bound_writes(None))
            .map_err(|source| deadline.failed("opening a tunnel", source))?;
        Ok(Tunnel {
            stream: self.connection.stream,
            early,
        })
    }

    /// Sends a request with a `Content-Length` body and reads the complete response, whatever its status. A GET
    /// request is sent without `Content-Length`, so its body must be empty.
    ///
    /// # Errors
    /// Returns any [`ClientError`] except [`ClientError::Refused`].
    pub fn request(
        &mut self,
        method: &str,
        target: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Result<HttpAnswer, ClientError> {
        let deadline = Deadline::after(self.timeout);
        self.send_request(method, target, headers, body, deadline)?;
        let head = self.connection.read_head(deadline)?;
        self.connection.collect(head, deadline)
    }

    /// Sends `bytes` unchanged and reads one response, for tests with invalid requests.
    ///
    /// # Errors
    /// Returns any [`ClientError`] except [`ClientError::Refused`].
    pub fn raw(&mut self, bytes: &[u8]) -> Result<HttpAnswer, ClientError> {
        let deadline = Deadline::after(self.timeout);
        self.connection.send(&[bytes], deadline)?;
        let head = self.connection.read_head(deadline)?;
        self.connection.collect(head, deadline)
    }

    pub(super) fn send_request(
        &mut self,
        method: &str,
        target: &str,
        headers: &[(&str, &str)],
        body: &[u8],
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        self.send_head(method, target, headers, body.len() as u64, body, deadline)
    }

    /// Sends a head that announces a body of `len` bytes, together with the `first` part of the body.
    fn send_head(
        &mut self,
        method: &str,
        target: &str,
        headers: &[(&str, &str)],
        len: u64,
        first: &[u8],
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        let mut head = self.head(method, target, headers);
        if method != "GET" {
            head.extend(["content-length: ", &len.to_string(), "\r\n"]);
        }
        head.push_str("\r\n");
        self.connection.begin()?;
        self.connection.send(&[head.as_bytes(), first], deadline)
    }

    /// The head of a request, without the headers for the body's length and without its end.
    pub(super) fn head(&self, method: &str, target: &str, headers: &[(&str, &str)]) -> String {
        let mut head = format!("{method} {target} HTTP/1.1\r\nhost: {}\r\n", self.authority);
        let token = self.token.as_deref().map(|token| ("x-access-token", token));
        let route = self.headers.iter().map(|(n, v)| (n.as_str(), v.as_str()));
        for (name, value) in headers.iter().copied().chain(route).chain(token) {
            head.extend([name, ": ", value, "\r\n"]);
        }
        head
    }
}

fn unread(source: std::io::Error) -> ClientError {
    ClientError::Local {
        doing: "read the file of this host",
        source,
    }
}

/// A stream to a port of the guest.
#[derive(Debug)]
pub struct Tunnel<S = UnixStream> {
    /// The connection, without timeouts. Each direction ends independently.
    pub stream: S,
    /// Data from the port that the client has already read. It precedes the data of `stream`.
    pub early: Vec<u8>,
}

fn files_target(path: &str, user: Option<&str>) -> String {
    let mut target = String::from("/files?path=");
    target.extend(utf8_percent_encode(path, ESCAPED));
    if let Some(user) = user {
        target.push_str("&username=");
        target.extend(utf8_percent_encode(user, ESCAPED));
    }
    target
}
