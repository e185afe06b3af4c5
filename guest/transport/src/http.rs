//! Request heads, responses and query strings. Pure: bytes in, bytes out.
//!
//! Percent-decoding is implemented here because the crate `percent-encoding` passes malformed escapes through
//! unchanged. The official servers, which are written in Go, treat a value with such an escape as absent, and this
//! crate must behave like them.

use envd::{
    BadRequest, Framing, FramingHeaders, MAX_HEADERS, asks_to_close, header_text, parse_head,
};

/// The head of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Head<F> {
    pub method: String,
    /// The part before `?`, as sent.
    pub path: String,
    /// The part after `?`, as sent; empty if there is none.
    pub query: String,
    /// The request has `Expect: 100-continue`.
    pub expects_continue: bool,
    /// The request is HTTP/1.0 or has `Connection: close`.
    pub close: bool,
    /// Headers that the service reads.
    pub fields: F,
}

/// Headers that a service reads. The transport itself reads the framing headers, `Expect` and `Connection`.
pub trait Fields: Sized {
    /// The fields of a request without headers.
    fn new(path: &str) -> Self;

    /// Takes one header. Blanks around `value` have been removed.
    ///
    /// # Errors
    /// Returns the error response if the value makes the request invalid.
    fn take(&mut self, name: &str, value: &str) -> Result<(), BadRequest>;
}

/// For a service that reads no headers.
impl Fields for () {
    fn new(_path: &str) -> Self {}

    fn take(&mut self, _name: &str, _value: &str) -> Result<(), BadRequest> {
        Ok(())
    }
}

/// Parses the head at the front of `bytes`. Returns the head, the framing of the body, and the length of the head in
/// bytes; `None` if the head is incomplete.
///
/// # Errors
/// Returns the error response if the bytes are not an HTTP/1 head, the head is too large, its framing is ambiguous,
/// or [`Fields::take`] rejects a header.
pub fn parse<F: Fields>(bytes: &[u8]) -> Result<Option<(Head<F>, Framing, usize)>, BadRequest> {
    let mut space = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut space);
    let Some(len) = parse_head(&mut request, bytes)? else {
        return Ok(None);
    };
    let target = request.path.unwrap_or_default();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let mut head = Head {
        method: request.method.unwrap_or_default().to_owned(),
        path: path.to_owned(),
        query: query.to_owned(),
        expects_continue: false,
        close: request.version == Some(0),
        fields: F::new(path),
    };
    let mut framing = FramingHeaders::default();
    for header in request.headers.iter() {
        read_header(&mut head, &mut framing, header)?;
    }
    Ok(Some((head, framing.framing()?, len)))
}

fn read_header<F: Fields>(
    head: &mut Head<F>,
    framing: &mut FramingHeaders,
    header: &httparse::Header<'_>,
) -> Result<(), BadRequest> {
    let value = header_text(header)?;
    if framing.take(header.name, value)? {
        return Ok(());
    }
    if header.name.eq_ignore_ascii_case("expect") {
        head.expects_continue = value.eq_ignore_ascii_case("100-continue");
    } else if header.name.eq_ignore_ascii_case("connection") {
        head.close |= asks_to_close(value);
    } else {
        head.fields.take(header.name, value)?;
    }
    Ok(())
}

/// The first value of a query parameter, decoded; `None` if it is absent, malformed or not UTF-8.
#[must_use]
pub fn query_value(query: &str, name: &str) -> Option<String> {
    let mut pairs = query
        .split('&')
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let (_, value) = pairs.find(|(key, _)| decode_form(key).as_deref() == Some(name))?;
    decode_form(value)
}

fn decode_form(text: &str) -> Option<String> {
    percent_decode(&text.replace('+', " "))
}

/// Decodes percent escapes; `None` if one is malformed or the result is not UTF-8.
#[must_use]
pub fn percent_decode(text: &str) -> Option<String> {
    let digit = |b: Option<u8>| {
        char::from(b?)
            .to_digit(16)
            .and_then(|d| u8::try_from(d).ok())
    };
    let mut decoded = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        decoded.push(match byte {
            b'%' => digit(bytes.next())? << 4 | digit(bytes.next())?,
            byte => byte,
        });
    }
    String::from_utf8(decoded).ok()
}

fn reason(status: u16) -> &'static str {
    match status {
        100 => "Continue",
        200 => "OK",
        204 => "No Content",
        206 => "Partial Content",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        406 => "Not Acceptable",
        408 => "Request Timeout",
        409 => "Conflict",
        413 => "Content Too Large",
        415 => "Unsupported Media Type",
        416 => "Range Not Satisfiable",
        422 => "Unprocessable Content",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        507 => "Insufficient Storage",
        _ => "Unknown",
    }
}

/// Whether a connection is kept open after the current response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    KeepAlive,
    Close,
}

fn push_head(out: &mut Vec<u8>, status: u16, content_type: &str, after: After) {
    out.extend_from_slice(b"HTTP/1.1 ");
    push_number(out, u64::from(status));
    for part in [" ", reason(status), "\r\n"] {
        out.extend_from_slice(part.as_bytes());
    }
    if !content_type.is_empty() {
        for part in ["content-type: ", content_type, "\r\n"] {
            out.extend_from_slice(part.as_bytes());
        }
    }
    if after == After::Close {
        out.extend_from_slice(b"connection: close\r\n");
    }
}

fn push_number(out: &mut Vec<u8>, number: u64) {
    let start = out.len();
    let mut left = number;
    loop {
        out.push(b'0' + u8::try_from(left % 10).unwrap_or_default());
        left /= 10;
        if left == 0 {
            break;
        }
    }
    if let Some(digits) = out.get_mut(start..) {
        digits.reverse();
    }
}

/// The interim response to `Expect: 100-continue`.
pub const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// Appends a complete response. With status 204 the body must be empty, and no length is written.
pub fn push_answer(out: &mut Vec<u8>, status: u16, content_type: &str, body: &[u8], after: After) {
    push_head(out, status, content_type, after);
    if status != 204 {
        out.extend_from_slice(b"content-length: ");
        push_number(out, u64::try_from(body.len()).unwrap_or(0));
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(body);
}

/// Appends the head of a response. `lines` are further header lines, each of which must end with CRLF. The body
/// that follows has `length` bytes, or is chunked if `length` is `None`.
pub fn push_head_with(
    out: &mut Vec<u8>,
    status: u16,
    content_type: &str,
    lines: &str,
    length: Option<u64>,
    after: After,
) {
    push_head(out, status, content_type, after);
    out.extend_from_slice(lines.as_bytes());
    match length {
        Some(length) => {
            out.extend_from_slice(b"content-length: ");
            push_number(out, length);
            out.extend_from_slice(b"\r\n\r\n");
        }
        None => out.extend_from_slice(b"transfer-encoding: chunked\r\n\r\n"),
    }
}

/// Appends the head of a 200 response with a chunked body.
pub fn push_chunked_head(out: &mut Vec<u8>, content_type: &str, after: After) {
    push_head(out, 200, content_type, after);
    out.extend_from_slice(b"transfer-encoding: chunked\r\n\r\n");
}

/// Appends the size line of a chunk. The caller must then append `len` bytes and `\r\n`. `len` must be above 0: an
/// empty chunk would end the body.
pub fn push_chunk_size(out: &mut Vec<u8>, len: usize) {
    let digits = (usize::BITS - len.leading_zeros()).div_ceil(4).max(1);
    for place in (0..digits).rev() {
        let nibble = u32::try_from(len >> (place * 4) & 15).unwrap_or_default();
        out.extend(char::from_digit(nibble, 16).and_then(|c| u8::try_from(c).ok()));
    }
    out.extend_from_slice(b"\r\n");
}

/// Appends one chunk; nothing if `bytes` is empty, because an empty chunk ends the body.
pub fn push_chunk(out: &mut Vec<u8>, bytes: &[u8]) {
    if bytes.is_empty() {
        return;
    }
    push_chunk_size(out, bytes.len());
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
}

/// The end of a chunked body.
pub const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// Clients compare this content type byte for byte.
pub const JSON: &str = "application/json";

#[cfg(test)]
mod tests {
    use super::*;
    use envd::MAX_HEAD;
    use proptest::prelude::*;

    fn head(text: &str) -> Result<Option<(Head<Recorded>, Framing, usize)>, BadRequest> {
        parse(text.as_bytes())
    }

    /// Fields that record their arguments.
    #[derive(Debug, Default)]
    struct Recorded(Vec<(String, String)>);

    impl Fields for Recorded {
        fn new(path: &str) -> Self {
            Self(vec![("path".to_owned(), path.to_owned())])
        }

        fn take(&mut self, name: &str, value: &str) -> Result<(), BadRequest> {
            self.0.push((name.to_owned(), value.to_owned()));
            Ok(())
        }
    }

    #[test]
    fn head_framing_and_remaining_headers_are_read() {
        let text = "POST /p?x=1 HTTP/1.1\r\nCONTENT-length: 3\r\nX-Access-Token:  t \r\n\
                    Expect: 100-Continue\r\nConnection: te, Close\r\n\r\nabc";
        let (head, body, used) = head(text).unwrap().unwrap();
        assert_eq!(
            (
                head.method.as_str(),
                head.path.as_str(),
                head.query.as_str()
            ),
            ("POST", "/p", "x=1")
        );
        assert!(head.expects_continue && head.close);
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(
            head.fields.0,
            [pair("path", "/p"), pair("X-Access-Token", "t")]
        );
        assert!(matches!(body, Framing::Length(3)));
        assert_eq!(used, text.len() - 3);
    }

    #[test]
    fn ambiguous_bodies_are_refused() {
        for framing in [
            "content-length: 1\r\ncontent-length: 1",
            "content-length: 1\r\ntransfer-encoding: chunked",
            "transfer-encoding: gzip, chunked",
            "transfer-encoding: chunked\r\ntransfer-encoding: chunked",
            "content-length: +1",
            "content-length: 1, 1",
            "content-length: 99999999999999999999",
        ] {
            let text = format!("POST / HTTP/1.1\r\n{framing}\r\n\r\n");
            assert!(head(&text).is_err(), "{framing}");
        }
    }

    #[test]
    fn large_heads_are_refused_before_they_end() {
        let long = format!("GET /{} HTTP/1.1\r\n", "x".repeat(MAX_HEAD));
        assert_eq!(head(&long).unwrap_err().status, 431);
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(65));
        assert_eq!(head(&many).unwrap_err().status, 431);
        assert!(head("GET / HTTP/1.1\r\na: b").unwrap().is_none());
    }

    #[test]
    fn query_values_are_decoded() {
        let value = |query| query_value(query, "path");
        assert_eq!(value("a=1&path=%2Ftmp%2Fa+b").as_deref(), Some("/tmp/a b"));
        assert_eq!(value("path"), Some(String::new()));
        assert_eq!(value("path=%zz"), None);
        assert_eq!(value("other=1"), None);
    }

    #[test]
    fn numbers_are_written_in_decimal_and_chunk_sizes_in_hex() {
        let mut out = Vec::new();
        push_number(&mut out, 0);
        push_number(&mut out, 4096);
        push_chunk_size(&mut out, 0x1f0);
        assert_eq!(out, b"040961f0\r\n");
    }

    #[test]
    fn an_empty_chunk_is_not_written() {
        let mut out = Vec::new();
        push_chunk(&mut out, b"");
        push_chunk(&mut out, b"0123456789abcdef");
        assert_eq!(out, b"10\r\n0123456789abcdef\r\n");
    }

    proptest! {
        #[test]
        fn hostile_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), query in ".{0,30}") {
            let _ = parse::<()>(&bytes);
            let _ = query_value(&query, "path");
        }
    }
}
