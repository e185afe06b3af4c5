//! Opens connections to ports of a sandbox. The ports of the agent and of the interpreter are reached through the vsock
//! socket. For all other ports, and for the interpreter's port if nothing listens on vsock, the agent opens a tunnel to
//! the TCP port in the guest.
//!
//! ```text
//! "CONNECT 49983\n"                          ─► VMM     "OK <n>\n"
//! "CONNECT 127.0.0.1:<port> HTTP/1.1" …      ─► agent   "HTTP/1.1 200 …"      (other ports only)
//! TLS                                        ─► the server at the port        (ports in `httpsPorts` only)
//! HTTP/1.1                                   ─► agent, or the server at the port
//! ```
//! The guest is not trusted: if it sends data before the first request, the connection is closed, and every wait is
//! bounded.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use envd::ENVD_PORT;
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

use super::line::{GuestStream, Line, LineStream};
use super::tls;
use super::upload::Upload;
use crate::registry::Route;

/// Port of the code interpreter. Its server also listens on vsock, which avoids the tunnel through the agent.
pub(super) const INTERPRETER_PORT: u16 = 49_999;
/// Time limit for opening a connection.
const DIAL_LIMIT: Duration = Duration::from_secs(10);
/// Length limit of the greeting: the VMM's line and the agent's response head together.
const GREETING_MAX: usize = 2048;
/// Length limit of a response head.
pub(super) const HEAD_MAX: usize = 64 << 10;
/// Maximum number of header fields in a response.
pub(super) const FIELDS_MAX: usize = 128;
/// Size of a connection's read buffer. If the client reads slowly, a few times this size may be held.
const BUFFER: usize = 64 << 10;

/// How long a failed connection may take to return its request.
const END_LIMIT: Duration = Duration::from_millis(100);

/// The handle for sending requests on a connection, one after another.
#[derive(Debug)]
pub(super) struct Sender {
    http: SendRequest<Upload>,
    line: Arc<Line>,
    connection: JoinHandle<()>,
}

impl Sender {
    pub(super) fn line(&self) -> &Arc<Line> {
        &self.line
    }

    pub(super) fn is_closed(&self) -> bool {
        self.http.is_closed()
    }

    pub(super) async fn ready(&mut self) -> hyper::Result<()> {
        self.http.ready().await
    }

    pub(super) async fn send(
        &mut self,
        request: Request<Upload>,
    ) -> Result<Response<Incoming>, TrySendError<Request<Upload>>> {
        self.http.try_send_request(request).await
    }

    /// Waits until the connection has dropped its request.
    pub(super) async fn end(self) {
        drop(self.http);
        let _late = tokio::time::timeout(END_LIMIT, self.connection).await;
    }
}

/// Why a connection could not be opened.
#[derive(Debug, thiserror::Error)]
pub(super) enum DialError {
    /// The VMM's vsock socket does not accept connections.
    #[error("cannot connect to the sandbox's vsock socket")]
    Gone(#[source] io::Error),
    /// The guest closed the connection during the greeting.
    #[error("the guest closed the connection")]
    Broken(#[source] io::Error),
    /// The agent refused to open a tunnel to the port, usually because nothing listens there. Contains the status of
    /// the agent's response.
    #[error("the agent refused the tunnel with status {0}")]
    Refused(u16),
    /// The guest sent data that violates the protocol.
    #[error("the guest violated the connect protocol")]
    Protocol,
    /// [`DIAL_LIMIT`] passed.
    #[error("no connection within {DIAL_LIMIT:?}")]
    TimedOut,
    /// The server at a port in `httpsPorts` does not speak TLS.
    #[error("cannot set up TLS with the server in the sandbox")]
    Tls(#[source] io::Error),
    /// The HTTP handshake failed.
    #[error("cannot start HTTP on the connection")]
    Unusable(#[source] hyper::Error),
}

impl DialError {
    /// Whether the error shows that the VM has ended. A socket whose queue is full only has too many callers.
    pub(super) fn means_gone(&self) -> bool {
        matches!(self, Self::Gone(error) if error.kind() != io::ErrorKind::WouldBlock)
    }
}

/// Connects to a port of the sandbox.
///
/// # Errors
/// Returns [`DialError`] with the step that failed.
pub(super) async fn dial(route: &Route, port: u16) -> Result<Sender, DialError> {
    let limited = tokio::time::timeout(DIAL_LIMIT, open(&route.vsock, port));
    let stream = limited.await.map_err(|_| DialError::TimedOut)??;
    if !route.https_ports.contains(&port) {
        return over(Box::new(stream)).await;
    }
    let secured = tokio::time::timeout(DIAL_LIMIT, tls::connect(stream)).await;
    let secured = secured.map_err(|_| DialError::TimedOut)?;
    over(Box::new(secured.map_err(DialError::Tls)?)).await
}

/// Starts HTTP on a connection.
async fn over(stream: Box<dyn GuestStream>) -> Result<Sender, DialError> {
    let (stream, line) = LineStream::new(stream);
    let (http, connection) = http1::Builder::new()
        .max_headers(FIELDS_MAX)
        .max_header_size(HEAD_MAX)
        .max_buf_size(BUFFER)
        // Writes `Host`, not `host`, as Go's proxies do: some programs compare header names case-sensitively.
        .title_case_headers(true)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(DialError::Unusable)?;
    let connection = tasks::spawn(async move {
        // The error is logged only: the caller of the in-flight request gets it as well.
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "a connection to a sandbox failed");
        }
    });
    Ok(Sender {
        http,
        line,
        connection,
    })
}

/// How a port is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reach {
    /// The server in the guest listens on vsock.
    Vsock,
    /// The server in the guest listens on TCP, and the agent connects to it.
    AgentTunnel,
}

async fn open(vsock: &Path, port: u16) -> Result<UnixStream, DialError> {
    match port {
        ENVD_PORT => open_via(Reach::Vsock, vsock, port).await,
        INTERPRETER_PORT => match open_via(Reach::Vsock, vsock, port).await {
            Ok(stream) => Ok(stream),
            // A different program may serve this port over TCP only.
            Err(_) => open_via(Reach::AgentTunnel, vsock, port).await,
        },
        _ => open_via(Reach::AgentTunnel, vsock, port).await,
    }
}

async fn open_via(reach: Reach, vsock: &Path, port: u16) -> Result<UnixStream, DialError> {
    let mut stream = UnixStream::connect(vsock).await.map_err(DialError::Gone)?;
    let asked = match reach {
        Reach::Vsock => format!("CONNECT {port}\n"),
        Reach::AgentTunnel => format!(
            "CONNECT {ENVD_PORT}\nCONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"
        ),
    };
    let written = stream.write_all(asked.as_bytes()).await;
    written.map_err(DialError::Broken)?;
    let mut received = Vec::with_capacity(256);
    let greeted = loop {
        if let Some(greeted) = greeting(&received, reach)? {
            break greeted;
        }
        if received.len() >= GREETING_MAX {
            return Err(DialError::Protocol);
        }
        let read = stream.read_buf(&mut received).await;
        if read.map_err(DialError::Broken)? == 0 {
            return Err(DialError::Broken(io::ErrorKind::UnexpectedEof.into()));
        }
    };
    if greeted == received.len() {
        Ok(stream)
    } else {
        Err(DialError::Protocol)
    }
}

/// The length of the greeting at the start of `received`. `None`: the greeting is not complete yet.
fn greeting(received: &[u8], reach: Reach) -> Result<Option<usize>, DialError> {
    let Some(line_end) = received.iter().position(|byte| *byte == b'\n') else {
        let is_start = received.starts_with(b"OK ") || b"OK ".starts_with(received);
        return if is_start {
            Ok(None)
        } else {
            Err(DialError::Protocol)
        };
    };
    let (line, rest) = received.split_at(line_end + 1);
    if !line.starts_with(b"OK ") {
        return Err(DialError::Protocol);
    }
    if reach == Reach::Vsock {
        return Ok(Some(line.len()));
    }
    let status = status(rest)?;
    match status {
        // The body of a refusal is not read.
        Some(status) if status != 200 => Err(DialError::Refused(status)),
        _ => {
            let end = rest.windows(4).position(|bytes| bytes == b"\r\n\r\n");
            Ok(end.map(|at| line.len() + at + 4))
        }
    }
}

/// The status of a response that starts with `head`. `None`: more data is needed.
fn status(head: &[u8]) -> Result<Option<u16>, DialError> {
    const START: &[u8] = b"HTTP/1.1 ";
    let known = head.len().min(START.len());
    if head[..known] != START[..known] {
        return Err(DialError::Protocol);
    }
    let Some(digits) = head.get(START.len()..START.len() + 3) else {
        return Ok(None);
    };
    let text = std::str::from_utf8(digits).map_err(|_| DialError::Protocol)?;
    text.parse().map(Some).map_err(|_| DialError::Protocol)
}

/// Part of the fuzz target `proxy`.
#[cfg(any(test, fuzzing))]
pub(super) mod fuzz {
    use super::Reach;

    /// A complete greeting must be recognized at its end and not earlier.
    ///
    /// # Panics
    /// Panics if the invariant is violated.
    pub(crate) fn greeting(received: &[u8]) {
        for reach in [Reach::Vsock, Reach::AgentTunnel] {
            let Ok(Some(end)) = super::greeting(received, reach) else {
                continue;
            };
            assert!(end <= received.len());
            for cut in 0..end {
                let part = super::greeting(&received[..cut], reach);
                assert!(matches!(part, Ok(None)), "{cut} of {end}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TUNNEL: &[u8] = b"OK 1073741824\nHTTP/1.1 200 Connection established\r\n\r\n";

    #[test]
    fn a_greeting_is_complete_at_its_end_and_not_before() {
        assert_eq!(greeting(b"OK 7\n", Reach::Vsock).unwrap(), Some(5));
        assert_eq!(greeting(b"OK 7\nHTTP", Reach::Vsock).unwrap(), Some(5));
        for cut in 0..TUNNEL.len() {
            assert_eq!(
                greeting(&TUNNEL[..cut], Reach::AgentTunnel).unwrap(),
                None,
                "{cut}"
            );
        }
        assert_eq!(
            greeting(TUNNEL, Reach::AgentTunnel).unwrap(),
            Some(TUNNEL.len())
        );
        let refused = greeting(b"OK 7\nHTTP/1.1 502 Bad", Reach::AgentTunnel);
        assert!(matches!(refused, Err(DialError::Refused(502))));
    }

    #[test]
    fn other_greetings_violate_the_protocol() {
        for received in [
            &b"NO"[..],
            b"OKAY\n",
            b"HTTP/1.1 200 OK\r\n\r\n",
            b"OK 1\nSSH-2.0",
        ] {
            assert!(matches!(
                greeting(received, Reach::AgentTunnel),
                Err(DialError::Protocol)
            ));
        }
    }

    proptest! {
        #[test]
        fn no_greeting_panics(received: Vec<u8>, direct: bool) {
            let reach = if direct { Reach::Vsock } else { Reach::AgentTunnel };
            if let Ok(Some(end)) = greeting(&received, reach) {
                prop_assert!(end <= received.len());
            }
        }
    }
}
