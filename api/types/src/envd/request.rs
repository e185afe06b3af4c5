//! What every reader of requests must agree on: how large a head may be, and which bytes are the body.
//!
//! Two readers that disagree here is how requests are smuggled, so the servers of a guest share this.

use super::{ChunkedDecoder, Decoded};

/// Longest head of a request in bytes; more is answered with 431.
pub const MAX_HEAD: usize = 16 << 10;
/// Most headers of a request; more is answered with 431.
pub const MAX_HEADERS: usize = 64;

/// A request that cannot be read; the connection ends after the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadRequest {
    /// Of the answer.
    pub status: u16,
    /// For a person.
    pub message: &'static str,
}

impl BadRequest {
    /// One of status 400.
    #[must_use]
    pub fn new(message: &'static str) -> Self {
        Self {
            status: 400,
            message,
        }
    }
}

/// Reads a head from the front of `bytes` into `request`, which has room for [`MAX_HEADERS`]; how many bytes it
/// took, or `None` when it is not whole yet.
///
/// # Errors
/// It is too large, or no HTTP/1.1.
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

/// The text of a header's value, without blanks around it.
///
/// # Errors
/// It is not UTF-8.
pub fn header_text<'b>(header: &httparse::Header<'b>) -> Result<&'b str, BadRequest> {
    let text = std::str::from_utf8(header.value);
    let text = text.map_err(|_| BadRequest::new("a header is not text"))?;
    Ok(text.trim_matches([' ', '\t']))
}

/// Whether a value of `Connection` asks for the connection's end.
#[must_use]
pub fn asks_to_close(connection: &str) -> bool {
    let mut options = connection.split(',').map(str::trim);
    options.any(|option| option.eq_ignore_ascii_case("close"))
}

/// The two headers that delimit a body, as they are met. Both at once, or one twice, is refused.
#[derive(Debug, Default)]
pub struct FramingHeaders {
    length: Option<u64>,
    chunked: bool,
}

impl FramingHeaders {
    /// Takes a header if it is one of the two; whether it was.
    ///
    /// # Errors
    /// A length that is no number or comes twice, a coding other than chunked.
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

    /// How the body is delimited; without either header it is empty.
    ///
    /// # Errors
    /// Both headers were there.
    pub fn framing(self) -> Result<Framing, BadRequest> {
        match (self.chunked, self.length) {
            (true, Some(_)) => Err(BadRequest::new("both content-length and transfer-encoding")),
            (true, None) => Ok(Framing::Chunked(ChunkedDecoder::default())),
            (false, length) => Ok(Framing::Length(length.unwrap_or(0))),
        }
    }
}

/// How a body is delimited, and how much of it is still to come.
#[derive(Clone, Debug)]
pub enum Framing {
    /// So many bytes.
    Length(u64),
    /// Until the last chunk.
    Chunked(ChunkedDecoder),
}

impl Framing {
    /// The next bytes at the front of `input`.
    ///
    /// # Errors
    /// They are no chunks.
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
