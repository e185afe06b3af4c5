//! The boundaries of a guest's HTTP/1 requests, parsed independently of the HTTP server and more strictly: any input
//! that two parsers could read differently is a [`Violation`], after which the proxy serves no further request of the
//! connection.

use std::mem;

/// Limit for the head of a request, its trailers, or a line of a chunk's size, in bytes.
pub const MAX_HEAD: usize = 64 << 10;
const MAX_SIZE_LINE: usize = 1 << 10;

/// Reasons for which requests are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    #[error("the head of the request is longer than {MAX_HEAD} bytes")]
    TooLong,
    #[error("a line ends without a carriage return, or has one inside")]
    Line,
    #[error("a header line is folded, or has no name before its colon")]
    Header,
    #[error("Content-Length is repeated or not a number")]
    Length,
    #[error("Transfer-Encoding is repeated or not \"chunked\"")]
    Encoding,
    #[error("Content-Length and Transfer-Encoding are both given")]
    Both,
    #[error("the size of a chunk is not a number, or a chunk has another length")]
    Chunk,
}

/// Follows the requests of one connection.
#[derive(Debug, Default)]
pub struct Framing {
    state: State,
    /// The head, trailers or size line that is incomplete.
    line: Vec<u8>,
    requests: u64,
    violation: Option<Violation>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Head,
    Body(u64),
    ChunkSize,
    Chunk(u64),
    /// The CRLF after a chunk.
    ChunkEnd,
    Trailers,
}

impl Framing {
    /// Continues with the next bytes. After a violation it ignores them.
    pub fn read(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && self.violation.is_none() {
            match self.step(bytes) {
                Ok(used) => bytes = bytes.get(used..).unwrap_or_default(),
                Err(violation) => self.violation = Some(violation),
            }
        }
    }

    #[must_use]
    pub fn violation(&self) -> Option<Violation> {
        self.violation
    }

    /// Number of requests whose head is complete.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.requests
    }

    /// Whether a head has begun and is incomplete.
    #[must_use]
    pub fn is_in_head(&self) -> bool {
        self.state == State::Head && !self.line.is_empty()
    }

    /// Returns the number of bytes used, at least one.
    fn step(&mut self, bytes: &[u8]) -> Result<usize, Violation> {
        match self.state {
            State::Body(left) | State::Chunk(left) => {
                let used = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                let rest = left.saturating_sub(used as u64);
                self.state = match (self.state, rest) {
                    (State::Body(_), 0) => State::Head,
                    (State::Body(_), _) => State::Body(rest),
                    (_, 0) => State::ChunkEnd,
                    (_, _) => State::Chunk(rest),
                };
                Ok(used)
            }
            State::Head | State::Trailers | State::ChunkSize | State::ChunkEnd => {
                let end = bytes.iter().position(|byte| *byte == b'\n');
                let used = end.map_or(bytes.len(), |end| end + 1);
                self.line.extend_from_slice(&bytes[..used]);
                let limit = match self.state {
                    State::Head | State::Trailers => MAX_HEAD,
                    _ => MAX_SIZE_LINE,
                };
                if self.line.len() > limit {
                    return Err(Violation::TooLong);
                }
                if end.is_some() {
                    self.end_of_line()?;
                }
                Ok(used)
            }
        }
    }

    /// Handles the end of a line, which is the last byte of `self.line`.
    fn end_of_line(&mut self) -> Result<(), Violation> {
        if !self.line.ends_with(b"\r\n") {
            return Err(Violation::Line);
        }
        match self.state {
            // Empty lines before a request are ignored (RFC 9112, section 2.2).
            State::Head if self.line == b"\r\n" => self.line.clear(),
            State::Head if self.line.ends_with(b"\r\n\r\n") => {
                let head = mem::take(&mut self.line);
                self.state = after_head(&head)?;
                self.requests = self.requests.saturating_add(1);
            }
            State::Trailers if self.line == b"\r\n" || self.line.ends_with(b"\r\n\r\n") => {
                self.line = Vec::new();
                self.state = State::Head;
            }
            State::ChunkSize => {
                let line = mem::take(&mut self.line);
                self.state = match chunk_size(&line)? {
                    0 => State::Trailers,
                    size => State::Chunk(size),
                };
            }
            State::ChunkEnd => {
                let line = mem::take(&mut self.line);
                if line != b"\r\n" {
                    return Err(Violation::Chunk);
                }
                self.state = State::ChunkSize;
            }
            State::Head | State::Trailers | State::Body(_) | State::Chunk(_) => {}
        }
        Ok(())
    }
}

/// The state after the head of a request: how its body begins.
fn after_head(head: &[u8]) -> Result<State, Violation> {
    let lines = head.split(|byte| *byte == b'\n').skip(1);
    let mut length = None;
    let mut chunked = false;
    for line in lines {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            continue;
        }
        if line.contains(&b'\r') || line.contains(&0) {
            return Err(Violation::Line);
        }
        let colon = line.iter().position(|byte| *byte == b':');
        let (name, value) = line.split_at(colon.ok_or(Violation::Header)?);
        if name.is_empty() || name.iter().any(u8::is_ascii_whitespace) {
            return Err(Violation::Header);
        }
        let value = value.get(1..).unwrap_or_default().trim_ascii();
        if name.eq_ignore_ascii_case(b"content-length") {
            let number = decimal(value).ok_or(Violation::Length)?;
            if length.replace(number).is_some() {
                return Err(Violation::Length);
            }
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            if chunked || !value.eq_ignore_ascii_case(b"chunked") {
                return Err(Violation::Encoding);
            }
            chunked = true;
        }
    }
    match (length, chunked) {
        (Some(_), true) => Err(Violation::Both),
        (None, true) => Ok(State::ChunkSize),
        (None | Some(0), false) => Ok(State::Head),
        (Some(length), false) => Ok(State::Body(length)),
    }
}

fn decimal(digits: &[u8]) -> Option<u64> {
    let is_number = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    let text = std::str::from_utf8(digits).ok().filter(|_| is_number)?;
    text.parse().ok()
}

/// The size in a line such as `1f;name=value` and CRLF.
fn chunk_size(line: &[u8]) -> Result<u64, Violation> {
    let line = line.strip_suffix(b"\r\n").unwrap_or(line);
    let end = line.iter().position(|byte| *byte == b';');
    let digits = end.map_or(line, |end| &line[..end]).trim_ascii_end();
    let is_number = (1..=16).contains(&digits.len()) && digits.iter().all(u8::is_ascii_hexdigit);
    let text = std::str::from_utf8(digits)
        .ok()
        .filter(|_| is_number && !line.contains(&b'\r'));
    let size = text.and_then(|text| u64::from_str_radix(text, 16).ok());
    size.ok_or(Violation::Chunk)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8], size: usize) -> Framing {
        let mut framing = Framing::default();
        bytes.chunks(size).for_each(|part| framing.read(part));
        framing
    }

    #[test]
    fn requests_are_counted_in_any_fragments() {
        let bytes = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n\r\nPOST / HTTP/1.1\r\nContent-Length: 20\r\n\r\nGET / HTTP/1.1\r\n\r\n..\
            PUT / HTTP/1.1\r\ntransfer-encoding: Chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nx: y\r\n\r\nGET / HTTP/1.1\r\n\r\nGET";
        for size in 1..bytes.len() {
            let framing = read(bytes, size);
            assert_eq!(
                (framing.requests(), framing.violation()),
                (4, None),
                "{size}"
            );
            assert!(framing.is_in_head());
        }
    }

    #[test]
    fn ambiguous_requests_are_violations() {
        let cases: [(&[u8], Violation); 17] = [
            (b"GET / HTTP/1.1\nHost: a\r\n\r\n", Violation::Line),
            (b"GET / HTTP/1.1\r\nA: b\rC: d\r\n\r\n", Violation::Line),
            (b"GET / HTTP/1.1\r\nA: b\0\r\n\r\n", Violation::Line),
            (b"GET / HTTP/1.1\r\nA: b\r\n c\r\n\r\n", Violation::Header),
            (b"GET / HTTP/1.1\r\nA : b\r\n\r\n", Violation::Header),
            (b"GET / HTTP/1.1\r\n: b\r\n\r\n", Violation::Header),
            (
                b"GET / HTTP/1.1\r\nContent-Length: +1\r\n\r\n",
                Violation::Length,
            ),
            (
                b"GET / HTTP/1.1\r\nContent-Length: 1, 1\r\n\r\n",
                Violation::Length,
            ),
            (
                b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n",
                Violation::Length,
            ),
            (
                b"GET / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
                Violation::Length,
            ),
            (
                b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n",
                Violation::Both,
            ),
            (
                b"GET / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
                Violation::Both,
            ),
            (
                b"GET / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
                Violation::Encoding,
            ),
            (
                b"GET / HTTP/1.1\r\nTransfer-Encoding: \x0bchunked\r\n\r\n",
                Violation::Encoding,
            ),
            (
                b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\n",
                Violation::Chunk,
            ),
            (
                b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n",
                Violation::Chunk,
            ),
            (
                b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\n",
                Violation::Line,
            ),
        ];
        for (bytes, violation) in cases {
            for size in [1, 3, bytes.len()] {
                let text = String::from_utf8_lossy(bytes);
                assert_eq!(read(bytes, size).violation(), Some(violation), "{text}");
            }
        }
    }

    #[test]
    fn heads_are_limited() {
        let mut bytes = b"GET / HTTP/1.1\r\nA: ".to_vec();
        bytes.resize(MAX_HEAD + 1, b'a');
        assert_eq!(read(&bytes, 1000).violation(), Some(Violation::TooLong));
        let mut bytes = b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;".to_vec();
        bytes.resize(bytes.len() + MAX_SIZE_LINE, b'a');
        assert_eq!(read(&bytes, 1000).violation(), Some(Violation::TooLong));
    }
}
