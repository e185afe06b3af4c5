//! HTTP/1.1 over one stream: bytes out, answers in, all within a deadline.

use std::{
    io,
    time::{Duration, Instant},
};

use super::{ClientError, answer::HttpAnswer, protocol};
use crate::envd::{ChunkedDecoder, Decoded, Transport};

/// Longest answer head in bytes.
const MAX_HEAD: usize = 16 << 10;
/// Longest answer body that is collected, and longest file that is read.
const MAX_BODY: usize = 256 << 20;
const READ_SIZE: usize = 64 << 10;

/// A moment, and the duration it came from for the error text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline {
    at: Instant,
    timeout: Duration,
}

impl Deadline {
    pub(super) fn after(timeout: Duration) -> Self {
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

    pub(super) fn failed(self, doing: &'static str, source: io::Error) -> ClientError {
        match source.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                ClientError::Timeout(self.timeout)
            }
            _ => ClientError::NotReachable { doing, source },
        }
    }
}

/// The stream, and what has arrived.
#[derive(Debug)]
pub(super) struct Connection<S> {
    pub(super) stream: S,
    /// Bytes received and not yet used: those from `at` on.
    held: Vec<u8>,
    at: usize,
}

/// How the body of an answer ends.
pub(super) enum Body {
    Length(u64),
    Chunked(ChunkedDecoder),
    UntilClose,
}

/// Of an answer.
pub(super) struct Head {
    pub(super) status: u16,
    /// Names in lower case.
    pub(super) headers: Vec<(String, String)>,
    pub(super) body: Body,
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

impl<S: Transport> Connection<S> {
    pub(super) fn over(stream: S) -> Self {
        Self {
            stream,
            held: Vec::new(),
            at: 0,
        }
    }

    /// The next line without its end, of at most so many bytes.
    pub(super) fn read_line(
        &mut self,
        most: usize,
        doing: &'static str,
        deadline: Deadline,
    ) -> Result<String, ClientError> {
        loop {
            let unused = self.unused();
            if let Some(end) = unused.iter().position(|b| *b == b'\n') {
                let line = unused.get(..end).unwrap_or_default();
                let line = String::from_utf8_lossy(line).into_owned();
                self.at += end + 1;
                return Ok(line);
            }
            if unused.len() > most {
                return Err(protocol("a line without end"));
            }
            self.receive(doing, deadline)?;
        }
    }

    /// Writes the parts, small ones in one system call.
    pub(super) fn send(&mut self, parts: &[&[u8]], deadline: Deadline) -> Result<(), ClientError> {
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

    pub(super) fn unused(&self) -> &[u8] {
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
    pub(super) fn read_head(&mut self, deadline: Deadline) -> Result<Head, ClientError> {
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

    pub(super) fn collect(
        &mut self,
        mut head: Head,
        deadline: Deadline,
    ) -> Result<HttpAnswer, ClientError> {
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
    pub(super) fn read_body(
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
