//! Incremental parsing of HTTP/1.1 responses: heads and bodies.

use super::{
    ClientError, HttpAnswer, answer::CutAnswer, connection::Connection, deadline::Deadline,
    protocol,
};
use crate::{ChunkedDecoder, Decoded, Transport};

/// Length limit of a response head in bytes, including preceding interim responses.
const MAX_HEAD: usize = 16 << 10;
const DOING: &str = "reading an answer";

/// The body of a response, as far as it has been read.
#[derive(Debug)]
pub(super) struct Body {
    framing: Framing,
    /// The length announced by the head, if any.
    expected: Option<u64>,
    /// Received bytes, without transfer coding.
    received: u64,
}

/// Framing of a body, which determines its end.
enum Framing {
    /// Bytes that are still to come.
    Length(u64),
    Chunked(ChunkedDecoder),
    UntilClose,
}

/// The head of a response.
pub(super) struct Head {
    pub(super) status: u16,
    /// Names in lower case.
    pub(super) headers: Vec<(String, String)>,
    pub(super) body: Body,
}

impl Head {
    fn announces_close(&self) -> bool {
        let mut headers = self.headers.iter();
        headers.any(|(name, value)| name == "connection" && value.eq_ignore_ascii_case("close"))
    }
}

impl Body {
    fn of(framing: Framing) -> Self {
        let expected = match &framing {
            Framing::Length(length) => Some(*length),
            Framing::Chunked(_) | Framing::UntilClose => None,
        };
        Self {
            framing,
            expected,
            received: 0,
        }
    }
}

impl std::fmt::Debug for Framing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Length(left) => write!(f, "Length({left})"),
            Self::Chunked(_) => f.write_str("Chunked"),
            Self::UntilClose => f.write_str("UntilClose"),
        }
    }
}

impl<S: Transport> Connection<S> {
    /// Reads the head of the next response, skipping interim (1xx) responses.
    pub(super) fn read_head(&mut self, deadline: Deadline) -> Result<Head, ClientError> {
        let mut left = MAX_HEAD;
        loop {
            let mut space = [httparse::EMPTY_HEADER; 64];
            let mut parsed = httparse::Response::new(&mut space);
            let bytes = self.unused();
            match parsed.parse(bytes).map_err(protocol)? {
                httparse::Status::Complete(len) if len <= left => {
                    let head = understand(&parsed)?;
                    self.use_up(len);
                    left -= len;
                    if head.status >= 200 {
                        self.is_closing = head.announces_close();
                        return Ok(head);
                    }
                }
                httparse::Status::Partial if bytes.len() <= left => {
                    self.receive("waiting for an answer", deadline)?;
                }
                _ => return Err(protocol("an answer head exceeds its length limit")),
            }
        }
    }

    pub(super) fn collect(
        &mut self,
        mut head: Head,
        deadline: Deadline,
    ) -> Result<HttpAnswer, ClientError> {
        let most = self.limits.body;
        let too_long = || protocol(format!("the body of an answer exceeds {most} bytes"));
        if let Some(length) = head.body.expected
            && usize::try_from(length).map_or(true, |length| length > most)
        {
            return Err(too_long());
        }
        let mut body = Vec::new();
        while self.read_body(&mut head.body, &mut body, deadline)? {
            if body.len() > most {
                return Err(too_long());
            }
        }
        Ok(HttpAnswer {
            status: head.status,
            headers: head.headers,
            body,
        })
    }

    /// Appends received body data to `out`, after waiting for data if necessary. Returns `false` if the body was
    /// already complete. A connection that ends before is a [`CutAnswer`].
    pub(super) fn read_body(
        &mut self,
        body: &mut Body,
        out: &mut Vec<u8>,
        deadline: Deadline,
    ) -> Result<bool, ClientError> {
        let before = out.len();
        let more = self.read_part(&mut body.framing, out, deadline);
        body.received += (out.len() - before) as u64;
        let cut = CutAnswer {
            received: body.received,
            expected: body.expected,
        };
        more.map_err(|why| cut.error(why))
    }

    fn read_part(
        &mut self,
        framing: &mut Framing,
        out: &mut Vec<u8>,
        deadline: Deadline,
    ) -> Result<bool, ClientError> {
        match framing {
            Framing::Length(0) => Ok(false),
            Framing::Length(left) => {
                if self.unused().is_empty() {
                    self.receive(DOING, deadline)?;
                }
                let there = self.unused().len();
                let n = usize::try_from(*left).map_or(there, |left| left.min(there));
                self.move_to(out, n);
                *left -= u64::try_from(n).unwrap_or(*left);
                Ok(true)
            }
            Framing::UntilClose => {
                let read = if self.unused().is_empty() {
                    self.receive_or_end(DOING, deadline)?
                } else {
                    1
                };
                self.move_to(out, self.unused().len());
                Ok(read > 0)
            }
            Framing::Chunked(decoder) => self.read_chunk(decoder, out, deadline),
        }
    }

    fn read_chunk(
        &mut self,
        decoder: &mut ChunkedDecoder,
        out: &mut Vec<u8>,
        deadline: Deadline,
    ) -> Result<bool, ClientError> {
        loop {
            let mut input = self.unused();
            let before = input.len();
            let step = decoder.step(&mut input).map_err(protocol)?;
            let used = before - input.len();
            let is_data = match step {
                Decoded::Data(data) => {
                    out.extend_from_slice(data);
                    Some(true)
                }
                Decoded::End => Some(false),
                Decoded::More => None,
            };
            self.use_up(used);
            match is_data {
                Some(is_data) => return Ok(is_data),
                None => self.receive(DOING, deadline)?,
            }
        }
    }

    fn move_to(&mut self, out: &mut Vec<u8>, bytes: usize) {
        out.extend_from_slice(self.unused().get(..bytes).unwrap_or_default());
        self.use_up(bytes);
    }
}

/// Converts a parsed head. Rejects a response whose end is ambiguous between two readers.
fn understand(parsed: &httparse::Response<'_, '_>) -> Result<Head, ClientError> {
    let status = parsed.code.unwrap_or_default();
    let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
    let headers = parsed.headers.iter();
    let headers: Vec<_> = headers
        .map(|h| (h.name.to_ascii_lowercase(), text(h.value)))
        .collect();
    let body = Body::of(framing_of(status, &headers)?);
    Ok(Head {
        status,
        headers,
        body,
    })
}

fn framing_of(status: u16, headers: &[(String, String)]) -> Result<Framing, ClientError> {
    let all = |name: &str| -> Vec<&str> {
        let found = headers.iter().filter(|(n, _)| n == name);
        found.map(|(_, v)| v.as_str()).collect()
    };
    let (codings, lengths) = (all("transfer-encoding"), all("content-length"));
    match (codings.as_slice(), lengths.as_slice()) {
        ([coding], []) if coding.eq_ignore_ascii_case("chunked") => {
            Ok(Framing::Chunked(ChunkedDecoder::default()))
        }
        ([coding], []) => Err(protocol(format!("unsupported transfer coding {coding}"))),
        ([], [length]) if length.bytes().all(|b| b.is_ascii_digit()) => {
            length.parse().map(Framing::Length).map_err(protocol)
        }
        ([], []) if status < 200 || status == 204 || status == 304 => Ok(Framing::Length(0)),
        ([], []) => Ok(Framing::UntilClose),
        _ => Err(protocol("ambiguous length of an answer")),
    }
}
