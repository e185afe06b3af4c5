//! Connections to ports of a sandbox: through its vsock socket to the agent, and from there, for ports other
//! than the agent's own, through a tunnel that the agent opens in the guest.
//!
//! ```text
//! "CONNECT 49983\n"                          ─► VMM     "OK <n>\n"
//! "CONNECT 127.0.0.1:<port> HTTP/1.1" …      ─► agent   "HTTP/1.1 200 …"      (other ports only)
//! HTTP/1.1                                   ─► agent, or the server at the port
//! ```
//! The guest is hostile: what it says before it is asked ends the connection, and every wait has an end.

use std::io;
use std::path::Path;
use std::time::Duration;

use api_types::envd::ENVD_PORT;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::upload::Upload;

/// The code interpreter's, whose server listens on vsock too: a request saves the way through the agent.
pub(super) const INTERPRETER_PORT: u16 = 49_999;
/// How long until a connection to a port of a sandbox is open.
const DIAL_LIMIT: Duration = Duration::from_secs(10);
/// The longest greeting of VMM and agent together.
const GREETING_MAX: usize = 2048;
/// The longest head of a response.
pub(super) const HEAD_MAX: usize = 64 << 10;
/// The most fields of a response.
pub(super) const FIELDS_MAX: usize = 128;
/// What is read ahead of a response; while nobody takes it, a few times as much is held.
const BUFFER: usize = 64 << 10;

/// A connection to write one request after the other to.
pub(super) type Sender = SendRequest<Upload>;

/// There is no connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum DialError {
    /// Nobody serves the socket of the vsock device: the VMM has ended.
    #[error("the sandbox's socket cannot be reached")]
    Gone(#[source] io::Error),
    /// The guest has refused or dropped the connection.
    #[error("the connection broke off")]
    Broken(#[source] io::Error),
    /// The agent says that nobody listens at the port.
    #[error("the agent answered {0}")]
    Refused(u16),
    /// The guest speaks out of turn.
    #[error("the guest does not keep to the protocol")]
    Protocol,
    /// It took too long.
    #[error("no connection within {DIAL_LIMIT:?}")]
    TimedOut,
    /// The connection was lost before it could be used.
    #[error("the connection cannot be used")]
    Unusable(#[source] hyper::Error),
}

impl DialError {
    /// Whether only a VM that has ended explains it.
    pub(super) fn means_gone(&self) -> bool {
        matches!(self, Self::Gone(_))
    }
}

/// Connects to a port of the guest behind a vsock socket.
///
/// # Errors
/// See [`DialError`].
pub(super) async fn dial(vsock: &Path, port: u16) -> Result<Sender, DialError> {
    let open = tokio::time::timeout(DIAL_LIMIT, open(vsock, port));
    let stream = open.await.map_err(|_| DialError::TimedOut)??;
    let (sender, connection) = http1::Builder::new()
        .max_headers(FIELDS_MAX)
        .max_header_size(HEAD_MAX)
        .max_buf_size(BUFFER)
        // `Host`, as proxies in Go write it: some programs compare names as they stand.
        .title_case_headers(true)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(DialError::Unusable)?;
    tokio::spawn(async move {
        // What goes wrong is also told to the request that it happens to.
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "a connection to a sandbox ended badly");
        }
    });
    Ok(sender)
}

/// How a port is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Its server listens on vsock.
    Direct,
    /// Its server listens on TCP, where the agent connects to it.
    Agent,
}

async fn open(vsock: &Path, port: u16) -> Result<UnixStream, DialError> {
    match port {
        ENVD_PORT => open_by(Way::Direct, vsock, port).await,
        INTERPRETER_PORT => match open_by(Way::Direct, vsock, port).await {
            Ok(stream) => Ok(stream),
            // Another program may serve the port, which listens on TCP alone.
            Err(_) => open_by(Way::Agent, vsock, port).await,
        },
        _ => open_by(Way::Agent, vsock, port).await,
    }
}

async fn open_by(way: Way, vsock: &Path, port: u16) -> Result<UnixStream, DialError> {
    let mut stream = UnixStream::connect(vsock).await.map_err(DialError::Gone)?;
    let asked = match way {
        Way::Direct => format!("CONNECT {port}\n"),
        Way::Agent => format!(
            "CONNECT {ENVD_PORT}\nCONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"
        ),
    };
    let written = stream.write_all(asked.as_bytes()).await;
    written.map_err(DialError::Broken)?;
    let mut said = Vec::with_capacity(256);
    let greeted = loop {
        if let Some(greeted) = greeting(&said, way)? {
            break greeted;
        }
        if said.len() >= GREETING_MAX {
            return Err(DialError::Protocol);
        }
        let read = stream.read_buf(&mut said).await;
        if read.map_err(DialError::Broken)? == 0 {
            return Err(DialError::Broken(io::ErrorKind::UnexpectedEof.into()));
        }
    };
    if greeted == said.len() {
        Ok(stream)
    } else {
        Err(DialError::Protocol)
    }
}

/// Length of a complete greeting; `None` when more must be read.
fn greeting(said: &[u8], way: Way) -> Result<Option<usize>, DialError> {
    let Some(line_end) = said.iter().position(|byte| *byte == b'\n') else {
        let is_start = said.starts_with(b"OK ") || b"OK ".starts_with(said);
        return if is_start {
            Ok(None)
        } else {
            Err(DialError::Protocol)
        };
    };
    let (line, rest) = said.split_at(line_end + 1);
    if !line.starts_with(b"OK ") {
        return Err(DialError::Protocol);
    }
    if way == Way::Direct {
        return Ok(Some(line.len()));
    }
    let status = status(rest)?;
    match status {
        // The rest of a refusal does not matter.
        Some(status) if status != 200 => Err(DialError::Refused(status)),
        _ => {
            let end = rest.windows(4).position(|bytes| bytes == b"\r\n\r\n");
            Ok(end.map(|at| line.len() + at + 4))
        }
    }
}

/// Status of a response whose first bytes are `head`.
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
    use super::Way;

    /// Whatever a guest greets with, its end is found where it is, and not before it is there.
    ///
    /// # Panics
    /// It is otherwise.
    pub(crate) fn greeting(said: &[u8]) {
        for way in [Way::Direct, Way::Agent] {
            let Ok(Some(end)) = super::greeting(said, way) else {
                continue;
            };
            assert!(end <= said.len());
            for cut in 0..end {
                let part = super::greeting(&said[..cut], way);
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
    fn greetings_end_where_they_end() {
        assert_eq!(greeting(b"OK 7\n", Way::Direct).unwrap(), Some(5));
        assert_eq!(greeting(b"OK 7\nHTTP", Way::Direct).unwrap(), Some(5));
        for cut in 0..TUNNEL.len() {
            assert_eq!(greeting(&TUNNEL[..cut], Way::Agent).unwrap(), None, "{cut}");
        }
        assert_eq!(greeting(TUNNEL, Way::Agent).unwrap(), Some(TUNNEL.len()));
        let refused = greeting(b"OK 7\nHTTP/1.1 502 Bad", Way::Agent);
        assert!(matches!(refused, Err(DialError::Refused(502))));
    }

    #[test]
    fn who_speaks_otherwise_is_dropped() {
        for said in [
            &b"NO"[..],
            b"OKAY\n",
            b"HTTP/1.1 200 OK\r\n\r\n",
            b"OK 1\nSSH-2.0",
        ] {
            assert!(matches!(
                greeting(said, Way::Agent),
                Err(DialError::Protocol)
            ));
        }
    }

    proptest! {
        #[test]
        fn any_greeting_is_decided(said: Vec<u8>, direct: bool) {
            let way = if direct { Way::Direct } else { Way::Agent };
            if let Ok(Some(end)) = greeting(&said, way) {
                prop_assert!(end <= said.len());
            }
        }
    }
}
