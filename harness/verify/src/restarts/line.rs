//! Connections of the clients. None waits longer than [`IDLE`] for a byte, and slow ones transfer little at a time.

use std::{
    io::{self, Read, Write},
    thread,
    time::Duration,
};

use envd::{ClientError, EnvdClient, Transport};
use model::chain;
use testbed::{
    api::Api,
    endpoint::{DialError, Endpoint, Wire},
};

use super::event::{Cause, Seen};

/// Maximum wait for the next byte. A stream that is silent for longer has hung.
pub(super) const IDLE: Duration = Duration::from_secs(20);

/// A connection with a limit on its silence.
#[derive(Debug)]
pub(super) struct Line {
    wire: Wire,
    pace: Pace,
}

/// How fast a client transfers data.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pace {
    Full,
    /// At most this many bytes, each after this pause.
    Slow(usize, Duration),
}

impl Pace {
    fn step(self, len: usize) -> usize {
        match self {
            Self::Full => len,
            Self::Slow(bytes, pause) => {
                thread::sleep(pause);
                len.min(bytes)
            }
        }
    }
}

impl Read for Line {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let most = self.pace.step(buf.len());
        self.wire.read(buf.get_mut(..most).unwrap_or_default())
    }
}

impl Write for Line {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let most = self.pace.step(buf.len());
        self.wire.write(buf.get(..most).unwrap_or_default())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.wire.flush()
    }
}

impl Transport for Line {
    fn bound_reads(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.wire
            .bound_reads(Some(timeout.map_or(IDLE, |t| t.min(IDLE))))
    }

    fn bound_writes(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.wire
            .bound_writes(Some(timeout.map_or(IDLE, |t| t.min(IDLE))))
    }
}

/// A failed request or stream.
#[derive(Clone, Debug)]
pub(super) struct Trouble {
    pub(super) cause: Cause,
    pub(super) text: String,
}

impl Trouble {
    /// A response with an unexpected status. A sandbox that does not exist is 404 on the control plane and 502 on
    /// the data plane.
    pub(super) fn status(status: u16, body: &str) -> Self {
        let is_missing = status == 404 || body.contains("not found");
        Self {
            cause: if is_missing {
                Cause::NotFound
            } else {
                Cause::Status
            },
            text: format!("status {status}: {body}"),
        }
    }

    pub(super) fn failed(self) -> Seen {
        Seen::Failed(self.cause, self.text)
    }

    pub(super) fn cut(self) -> Seen {
        Seen::Cut(self.cause, self.text)
    }
}

impl From<DialError> for Trouble {
    fn from(error: DialError) -> Self {
        let cause = match &error {
            DialError::Connect { source, .. } => match source.kind() {
                io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => Cause::Timeout,
                io::ErrorKind::ConnectionReset => Cause::Reset,
                _ => Cause::Refused,
            },
            DialError::Tls { .. } => Cause::Malformed,
        };
        Self {
            cause,
            text: chain(&error),
        }
    }
}

impl From<ClientError> for Trouble {
    fn from(error: ClientError) -> Self {
        let text = chain(&error);
        let cause = match error {
            // These requests have no files, so only the connection can fail.
            ClientError::NotReachable { .. } | ClientError::Local { .. } => Cause::Reset,
            ClientError::Timeout(_) => Cause::Timeout,
            ClientError::Refused {
                status, message, ..
            } => return Self::status(status, &message),
            ClientError::Protocol(_) => Cause::Malformed,
        };
        Self { cause, text }
    }
}

/// Opens a connection to the API.
pub(super) fn connect(api: &Api, to: &Endpoint, pace: Pace) -> Result<EnvdClient<Line>, Trouble> {
    let wire = to.dial(api.timeout)?;
    Ok(EnvdClient::over(Line { wire, pace }, api.timeout))
}
