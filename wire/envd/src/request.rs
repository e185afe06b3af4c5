//! Limits and body framing of HTTP requests in the guest.
//!
//! All servers in the guest share this module: if two of them disagreed about where a request ends, requests could be
//! smuggled.

use super::{ChunkedDecoder, Decoded};

/// Length limit of a request head in bytes. A longer head is rejected with 431.
pub const MAX_HEAD: usize = 16 << 10;
/// Maximum number of headers in a request. A request with more headers is rejected with 431.
pub const MAX_HEADERS: usize = 64;

/// A request that cannot be parsed. The connection is closed after the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadRequest {
    /// HTTP status of the response.
    pub status: u16,
    /// Message of the response.
    pub message: &'static str,
}

impl BadRequest {
    /// An error with status 400.
    #[must_use]
    pub fn new(message: &'static str) -> Self {
        Self {
            status: 400,
            message,
        }
    }
}

/// Parses a request head at the start of `bytes` into `request`, which must have room for [`MAX_HEADERS`] headers.
/// Returns the length of the head, or `None` if the head is incomplete.
///
/// # Errors
/// Returns an error with status 431 if a limit is exceeded, and with status 400 if the bytes are not an HTTP/1 request.
pub fn parse_head<'b>(
    request: &mut httparse::Request<'_, 'b>,
    bytes: &'b [u8],
) -> Result<Option<usize>, BadRequest> {
    match request.parse(bytes) {
        Ok(httparse::Status::Complete(len)) if len <= MAX_HEAD => Ok(Some(len)),
        Ok(httparse::Status::Partial) if bytes.len() < MAX_HEAD => Ok(None),
        Ok(_) | Err(httparse::Error::TooManyHeaders) => Err(BadRequest {
            status: 431,
            message: "the request's head is too large",
        }),
        Err(_) => Err(BadRequest::new("not an HTTP/1.1 request")),
    }
}

/// The value of a header as text, without surrounding blanks.
///
/// # Errors
/// Returns an error with status 400 if the value is not UTF-8.
pub fn header_text<'b>(header: &httparse::Header<'b>) -> Result<&'b str, BadRequest> {
    let text = std::str::from_utf8(header.value);
    let text = text.map_err(|_| BadRequest::new("a header is not text"))?;
    Ok(text.trim_matches([' ', '\t']))
}

/// Whether the value of a `Connection` header contains the option `close`.
#[must_use]
pub fn asks_to_close(connection: &str) -> bool {
    let mut options = connection.split(',').map(str::trim);
    options.any(|option| option.eq_ignore_ascii_case("close"))
}

/// Collects the headers that determine the body length. Repeated or contradictory headers are rejected.
#[derive(Debug, Default)]
pub struct FramingHeaders {
    length: Option<u64>,
    chunked: bool,
}

impl FramingHeaders {
    /// Evaluates one header. Returns whether it determines the body length.
    ///
    /// # Errors
    /// Returns an error with status 400 for an invalid or repeated `Content-Length`, and with status 501 for a transfer
    /// coding other than a single `chunked`.
    pub fn take(&mut self, name: &str, value: &str) -> Result<bool, BadRequest> {
        if name.eq_ignore_ascii_case("content-length") {
            let digits = !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit());
            let first = self.length.is_none();
            let length = value.parse().ok().filter(|_| digits && first);
            self.length = Some(length.ok_or(BadRequest::new("bad content-length"))?);
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            if self.chunked || !value.eq_ignore_ascii_case("chunked") {
                return Err(BadRequest {
                    status: 501,
                    message: "only chunked transfer coding is read",
                });
            }
            self.chunked = true;
        } else {
            return Ok(false);
        }
        Ok(true)
    }

    /// The framing of the body. If neither header is present, the body is empty.
    ///
    /// # Errors
    /// Returns an error with status 400 if both headers are present.
    pub fn framing(self) -> Result<Framing, BadRequest> {
        match (self.chunked, self.length) {
            (true, Some(_)) => Err(BadRequest::new("both content-length and transfer-encoding")),
            (true, None) => Ok(Framing::Chunked(ChunkedDecoder::default())),
            (false, length) => Ok(Framing::Length(length.unwrap_or(0))),
        }
    }
}

/// The framing of a body, and how much of the body remains.
#[derive(Clone, Debug)]
pub enum Framing {
    /// The body ends after this many more bytes.
    Length(u64),
    /// The body ends with its last chunk.
    Chunked(ChunkedDecoder),
}

impl Framing {
    /// Takes the next body bytes from the front of `input`.
    ///
    /// # Errors
    /// Returns [`ChunkError`](super::ChunkError) if the body is chunked and malformed.
    pub fn next<'a>(&mut self, input: &mut &'a [u8]) -> Result<Decoded<'a>, super::ChunkError> {
        match self {
            Self::Chunked(decoder) => decoder.step(input),
            Self::Length(0) => Ok(Decoded::End),
            Self::Length(_) if input.is_empty() => Ok(Decoded::More),
            Self::Length(left) => {
                let n = usize::try_from(*left).map_or(input.len(), |left| left.min(input.len()));
                let (data, rest) = input.split_at(n);
                *input = rest;
                *left -= u64::try_from(n).unwrap_or(*left);
                Ok(Decoded::Data(data))
            }
        }
    }
}
