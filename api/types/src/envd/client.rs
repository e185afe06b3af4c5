//! A small blocking client: one connection, requests one after another, no runtime.
//!
//! Every call has a deadline that covers all of it, and reads no more than its [`AnswerLimits`] allow. After an error the connection is in an unknown state:
//! drop the client and connect again.

mod answer;
mod calls;
mod connection;
mod deadline;
mod exec;
mod frames;
mod input;
mod limits;
mod response;

use std::{io, os::unix::net::UnixStream, path::Path, time::Duration};

pub use answer::HttpAnswer;
pub use calls::Tunnel;
use connection::Connection;
use deadline::Deadline;
pub use exec::{ExecOutput, ExecRequest, ExecStream, MAX_EXEC_OUTPUT};
pub use input::InputStream;
pub use limits::AnswerLimits;

use super::Transport;
use crate::guest_text;

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
        /// For a person; see [`guest_text`].
        message: String,
    },
    /// The deadline passed.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// The peer does not speak this protocol or sends too much, or one side has a bug. What is quoted of it has
    /// been through [`guest_text`].
    #[error("unexpected answer: {0}")]
    Protocol(String),
}

/// One connection to an agent, straight or through whatever forwards to it.
#[derive(Debug)]
pub struct EnvdClient<S = UnixStream> {
    connection: Connection<S>,
    timeout: Duration,
    token: Option<String>,
    /// Value of `Host`.
    authority: String,
    /// Sent with every request.
    headers: Vec<(String, String)>,
}

fn protocol(what: impl std::fmt::Display) -> ClientError {
    ClientError::Protocol(guest_text(&what.to_string()))
}

impl EnvdClient {
    /// Connects to a guest port through the VMM's vsock unix socket: writes `CONNECT <port>` and expects
    /// `OK <n>`. `timeout` bounds this and every later call that names none; but a VMM that accepts nothing and whose
    /// queue of connections is full is waited for without end.
    ///
    /// # Errors
    /// [`ClientError::NotReachable`] when the VMM or the guest's port is not there.
    pub fn connect(vsock: &Path, port: u16, timeout: Duration) -> Result<Self, ClientError> {
        Self::connect_unix(vsock, timeout)?.greeted(port)
    }

    /// The same over a stream that is connected to the VMM's vsock unix socket already.
    ///
    /// # Errors
    /// [`ClientError::NotReachable`] when the guest's port is not there.
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
            return Err(protocol("the vsock socket does not say OK"));
        }
        Ok(self)
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
            connection: Connection::over(stream),
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

    /// From now on calls read so much; [`AnswerLimits::DATA`] until this is called.
    pub fn set_limits(&mut self, limits: AnswerLimits) {
        self.connection.limits = limits;
    }

    /// The stream, after calls that were answered in whole. Its timeouts are those of the last call.
    ///
    /// # Errors
    /// [`ClientError::Protocol`]: the agent has sent more than the answers.
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
    fn an_answer_before_a_question_is_none() {
        let (client, line) = connect_to(b"OK 1073741824\nHTTP/1.1 204 No Content\r\n\r\n");
        assert_eq!(line, "CONNECT 49983\n");
        let early = client.unwrap().health().unwrap_err();
        assert!(matches!(early, ClientError::Protocol(_)), "{early}");
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
