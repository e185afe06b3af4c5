//! A small blocking client: one connection, sequential requests, no async runtime.
//!
//! Every call has a deadline for its total duration, and receives no more than its [`AnswerLimits`] allow. After an
//! error, the state of the connection is unknown: drop the client and connect again.

mod answer;
mod calls;
mod connection;
mod deadline;
mod exec;
mod frames;
mod input;
mod limits;
mod response;
mod watch;

use std::{io, os::unix::net::UnixStream, path::Path, time::Duration};

pub use answer::{CutAnswer, HttpAnswer};
pub use calls::Tunnel;
use connection::Connection;
use deadline::Deadline;
pub use exec::{ExecOutput, ExecRequest, ExecStream, MAX_EXEC_OUTPUT};
pub use input::InputStream;
pub use limits::AnswerLimits;
pub use watch::WatchStream;

use super::Transport;
use crate::guest_text;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The VMM's socket or the guest's port does not accept the connection, or the connection was lost. Also returned
    /// while the guest is still booting.
    #[error("cannot reach the agent: {doing} failed")]
    NotReachable {
        /// The step that failed.
        doing: &'static str,
        #[source]
        source: io::Error,
    },
    /// A local file that the call sends or receives cannot be read or written. The peer is not at fault.
    #[error("cannot {doing}")]
    Local {
        /// The step that failed.
        doing: &'static str,
        #[source]
        source: io::Error,
    },
    /// The agent responded with an error.
    #[error("the agent refused the request: {status} {code}: {message}")]
    Refused {
        /// HTTP status; 200 if the error came at the end of a stream.
        status: u16,
        /// `code` of the error body: a number on plain routes, a Connect error code on RPC routes.
        code: String,
        /// Description, sanitized by [`guest_text`].
        message: String,
    },
    #[error("the agent did not answer within {0:?}")]
    Timeout(Duration),
    /// The peer violated the protocol or exceeded a limit. The text may quote the peer and is sanitized by
    /// [`guest_text`].
    #[error("unexpected response: {0}")]
    Protocol(String),
}

/// One connection to an agent, direct or through proxies.
#[derive(Debug)]
pub struct EnvdClient<S = UnixStream> {
    connection: Connection<S>,
    timeout: Duration,
    token: Option<String>,
    /// Value of the `Host` header.
    authority: String,
    /// Additional headers of every request.
    headers: Vec<(String, String)>,
}

fn protocol(what: impl std::fmt::Display) -> ClientError {
    ClientError::Protocol(guest_text(&what.to_string()))
}

impl EnvdClient {
    /// Connects to a guest port through the VMM's vsock unix socket: sends `CONNECT <port>` and expects `OK <n>`.
    /// `timeout` limits this call and each later call without a timeout parameter. It does not limit `connect(2)`,
    /// which blocks if the VMM does not accept connections and its backlog is full.
    ///
    /// # Errors
    /// Returns [`ClientError::NotReachable`] if the VMM's socket or the guest's port is closed,
    /// [`ClientError::Timeout`] if the VMM does not respond in time, and [`ClientError::Protocol`] if it does not
    /// respond with `OK`.
    pub fn connect(vsock: &Path, port: u16, timeout: Duration) -> Result<Self, ClientError> {
        Self::connect_unix(vsock, timeout)?.greeted(port)
    }

    /// Like [`EnvdClient::connect`], but over an existing connection to the VMM's vsock unix socket.
    ///
    /// # Errors
    /// Returns the errors of [`EnvdClient::connect`].
    pub fn connect_over(
        vsock: UnixStream,
        port: u16,
        timeout: Duration,
    ) -> Result<Self, ClientError> {
        Self::over(vsock, timeout).greeted(port)
    }

    fn greeted(mut self, port: u16) -> Result<Self, ClientError> {
        let deadline = Deadline::after(self.timeout);
        let connection = &mut self.connection;
        connection.send(&[format!("CONNECT {port}\n").as_bytes()], deadline)?;
        let answer = connection.read_line(64, "connecting to the guest's port", deadline)?;
        if !answer.starts_with("OK ") {
            return Err(protocol("the vsock socket did not answer OK"));
        }
        Ok(self)
    }

    /// Connects to an agent that listens on a unix socket.
    ///
    /// # Errors
    /// Returns [`ClientError::NotReachable`] if the socket does not accept the connection.
    pub fn connect_unix(path: &Path, timeout: Duration) -> Result<Self, ClientError> {
        let stream = UnixStream::connect(path).map_err(|source| ClientError::NotReachable {
            doing: "connecting to the socket",
            source,
        })?;
        Ok(Self::over(stream, timeout))
    }
}

impl<S: Transport> EnvdClient<S> {
    /// Uses an existing connection to the agent.
    #[must_use]
    pub fn over(stream: S, timeout: Duration) -> Self {
        Self {
            connection: Connection::over(stream),
            timeout,
            token: None,
            authority: "guest".to_owned(),
            headers: Vec::new(),
        }
    }

    /// Sets the `Host` header and additional headers of later requests, for proxies that route by these headers. The
    /// values must not contain line ends. Tunnels do not send these headers.
    pub fn set_route(&mut self, authority: &str, headers: &[(&str, &str)]) {
        self.authority = authority.to_owned();
        self.headers = headers
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
    }

    /// Sets the `X-Access-Token` header of later requests. Tunnels do not send it.
    pub fn set_access_token(&mut self, token: Option<String>) {
        self.token = token;
    }

    /// Sets the timeout of all later calls without a timeout parameter.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Sets the limits of all later calls. The default is [`AnswerLimits::DATA`].
    pub fn set_limits(&mut self, limits: AnswerLimits) {
        self.connection.limits = limits;
    }

    /// Whether the last response announced that the peer closes the connection: later calls need a new one.
    #[must_use]
    pub fn is_closing(&self) -> bool {
        self.connection.is_closing
    }

    /// Returns the underlying stream. All responses must have been read completely. The stream keeps the read and
    /// write timeouts that the last call set.
    ///
    /// # Errors
    /// Returns [`ClientError::Protocol`] if the agent has sent data after its last response.
    pub fn into_stream(self) -> Result<S, ClientError> {
        if self.connection.unused().is_empty() {
            Ok(self.connection.stream)
        } else {
            Err(protocol("bytes after the end of an answer"))
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

    /// Connects to a peer that reads one line and then sends `answer`.
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
    fn an_answer_before_its_request_is_refused() {
        let (client, line) = connect_to(b"OK 1073741824\nHTTP/1.1 204 No Content\r\n\r\n");
        assert_eq!(line, "CONNECT 49983\n");
        let early = client.unwrap().health().unwrap_err();
        assert!(matches!(early, ClientError::Protocol(_)), "{early}");
    }

    #[test]
    fn a_closed_port_is_not_reachable() {
        let refused = EnvdClient::connect(Path::new("/nowhere/vsock"), 1, PATIENCE);
        assert!(matches!(refused, Err(ClientError::NotReachable { .. })));
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
    fn a_peer_with_another_protocol_is_recognized() {
        let (client, _) = connect_to(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        assert!(
            matches!(client, Err(ClientError::Protocol(_))),
            "{client:?}"
        );
    }

    #[test]
    fn a_silent_agent_is_given_up_at_the_deadline() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut client = EnvdClient::over(ours, Duration::from_millis(50));
        assert!(matches!(client.health(), Err(ClientError::Timeout(_))));
    }

    #[test]
    fn an_answer_that_is_cut_has_its_length_as_the_cause() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let peer = std::thread::spawn(move || {
            let read = theirs.read(&mut [0; 4096]).unwrap();
            let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nab";
            theirs.write_all(answer).unwrap();
            read
        });
        let mut file = Vec::new();
        let cut = EnvdClient::over(ours, PATIENCE).download("/x", &mut file, None);
        assert!(peer.join().unwrap() > 0);
        let Err(ClientError::NotReachable { source, .. }) = cut else {
            panic!("{cut:?}");
        };
        assert_eq!(source.to_string(), "the answer ended after 2 of 9 bytes");
        assert_eq!(file, b"ab");
    }
    /// The client of a peer that sends this response to its first request and then ends.
    fn answered_with(answer: &'static [u8]) -> EnvdClient<UnixStream> {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || {
            let _request = theirs.read(&mut [0; 4096]).unwrap();
            theirs.write_all(answer).unwrap();
        });
        EnvdClient::over(ours, PATIENCE)
    }

    fn cut_of<T: std::fmt::Debug>(result: Result<T, ClientError>) -> Option<CutAnswer> {
        let Err(ClientError::NotReachable { source, .. }) = result else {
            panic!("{result:?}");
        };
        source.get_ref()?.downcast_ref().copied()
    }

    #[test]
    fn every_reader_of_a_body_counts_what_came_before_a_cut() {
        let of = |received, expected| Some(CutAnswer { received, expected });
        let whole = |answer| cut_of(answered_with(answer).request("GET", "/x", &[], b""));
        let fixed = whole(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc");
        assert_eq!(fixed, of(3, Some(9)));
        let chunked =
            whole(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nabcd\r\n4\r\ne");
        assert_eq!(chunked, of(5, None));
        // A stream with a truncated second frame.
        let mut client = answered_with(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/connect+json\r\ntransfer-encoding: chunked\r\n\r\n\
              22\r\n\x00\x00\x00\x00\x1d{\"event\":{\"start\":{\"pid\":1}}}\r\n3\r\n\x00\x00\x00\r\n",
        );
        let request = ExecRequest::new("true", &[]);
        let cut = cut_of(client.exec(&request, PATIENCE));
        assert_eq!(cut, of(0x22 + 3, None));
    }

    #[test]
    fn a_file_that_cannot_be_written_is_not_the_fault_of_the_peer() {
        struct Full;
        impl Write for Full {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::StorageFull.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut client = answered_with(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab");
        let got = client.download("/x", &mut Full, None);
        let Err(ClientError::Local { source, .. }) = got else {
            panic!("{got:?}");
        };
        assert_eq!(source.kind(), io::ErrorKind::StorageFull);
    }
}
