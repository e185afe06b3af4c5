//! Request heads and answers. Pure: bytes in, bytes out.

use std::time::Duration;

use api_types::envd::{
    BadRequest, Blob, ErrorBody, Framing, FramingHeaders, MAX_HEADERS, asks_to_close, header_text,
    parse_head,
};

use super::files::FileHead;

/// The path of files.
pub(crate) const FILES: &str = "/files";

/// What matters of a request's head.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) method: String,
    /// Before any `?`, as sent.
    pub(crate) path: String,
    /// After the `?`, as sent; empty when there is none.
    pub(crate) query: String,
    pub(crate) content_type: String,
    /// `Content-Encoding` or `Connect-Content-Encoding`; empty means identity.
    pub(crate) encoding: String,
    pub(crate) access_token: String,
    /// The user of `Authorization: Basic`, when there is one.
    pub(crate) user: Option<String>,
    /// `Connect-Timeout-Ms`, when it is there and not zero.
    pub(crate) timeout: Option<Duration>,
    /// `Keepalive-Ping-Interval`, when it is there and not zero.
    pub(crate) keepalive: Option<Duration>,
    pub(crate) expects_continue: bool,
    pub(crate) close: bool,
    /// What only `/files` asks about; there for that path alone.
    pub(crate) file: Option<Box<FileHead>>,
}

/// Reads a head from the front of `bytes`: the head, its body, and how many bytes it took. `None` when it
/// is not whole yet.
pub(crate) fn parse(bytes: &[u8]) -> Result<Option<(Head, Framing, usize)>, BadRequest> {
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
        close: request.version == Some(0),
        ..Head::default()
    };
    let mut framing = FramingHeaders::default();
    for header in request.headers.iter() {
        read_header(&mut head, &mut framing, header)?;
    }
    if path == FILES {
        head.file = Some(Box::new(FileHead::read(request.headers)));
    }
    Ok(Some((head, framing.framing()?, len)))
}

fn read_header(
    head: &mut Head,
    framing: &mut FramingHeaders,
    header: &httparse::Header<'_>,
) -> Result<(), BadRequest> {
    let is = |name: &str| header.name.eq_ignore_ascii_case(name);
    let value = header_text(header)?;
    if framing.take(header.name, value)? {
        return Ok(());
    }
    if is("content-type") {
        value.clone_into(&mut head.content_type);
    } else if is("content-encoding") || is("connect-content-encoding") {
        if !value.eq_ignore_ascii_case("identity") {
            value.clone_into(&mut head.encoding);
        }
    } else if is("x-access-token") {
        value.clone_into(&mut head.access_token);
    } else if is("authorization") {
        head.user = basic_user(value);
    } else if is("connect-timeout-ms") {
        let ms = value
            .parse()
            .map_err(|_| BadRequest::new("bad connect-timeout-ms"))?;
        head.timeout = Some(Duration::from_millis(ms)).filter(|t| !t.is_zero());
    } else if is("keepalive-ping-interval") {
        let seconds = value.parse::<u32>().unwrap_or(0);
        head.keepalive = Some(Duration::from_secs(seconds.into())).filter(|t| !t.is_zero());
    } else if is("expect") {
        head.expects_continue = value.eq_ignore_ascii_case("100-continue");
    } else if is("connection") {
        head.close |= asks_to_close(value);
    }
    Ok(())
}

/// The user name of `Basic base64("user:password")`; the password means nothing here.
fn basic_user(value: &str) -> Option<String> {
    let (scheme, credentials) = value.split_once(' ')?;
    let credentials = Blob::decode(credentials.trim().as_bytes())?;
    let credentials = String::from_utf8(credentials).ok()?;
    let user = credentials.split(':').next().unwrap_or_default();
    (scheme.eq_ignore_ascii_case("basic") && !user.is_empty()).then(|| user.to_owned())
}

/// The first value of a query parameter, decoded; `None` when it is absent or not UTF-8.
pub(crate) fn query_value(query: &str, name: &str) -> Option<String> {
    let mut pairs = query
        .split('&')
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let (_, value) = pairs.find(|(key, _)| decode_form(key).as_deref() == Some(name))?;
    decode_form(value)
}

fn decode_form(text: &str) -> Option<String> {
    percent_decode(&text.replace('+', " "))
}

/// Text without its percent signs; `None` when one is not followed by two digits, or it is not UTF-8.
pub(crate) fn percent_decode(text: &str) -> Option<String> {
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

/// Whether the connection goes on after an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum After {
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

/// An interim answer that asks for the body.
pub(crate) const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// A whole answer. With status 204 the body must be empty and no length is written.
pub(crate) fn push_answer(
    out: &mut Vec<u8>,
    status: u16,
    content_type: &str,
    body: &[u8],
    after: After,
) {
    push_sized_head(
        out,
        status,
        content_type,
        u64::try_from(body.len()).unwrap_or(0),
        after,
    );
    out.extend_from_slice(body);
}

/// The head of an answer whose body of known length follows.
pub(crate) fn push_sized_head(
    out: &mut Vec<u8>,
    status: u16,
    content_type: &str,
    length: u64,
    after: After,
) {
    push_head(out, status, content_type, after);
    if status != 204 {
        out.extend_from_slice(b"content-length: ");
        push_number(out, length);
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(b"\r\n");
}

/// The head of an answer with further header lines, each ended by CRLF. Its body has that length, or follows
/// in chunks.
pub(crate) fn push_head_with(
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

/// The head of an answer whose body follows in chunks.
pub(crate) fn push_chunked_head(out: &mut Vec<u8>, content_type: &str, after: After) {
    push_head(out, 200, content_type, after);
    out.extend_from_slice(b"transfer-encoding: chunked\r\n\r\n");
}

/// The size line of a chunk; `\r\n` must follow its `len` > 0 bytes.
pub(crate) fn push_chunk_size(out: &mut Vec<u8>, len: usize) {
    let digits = (usize::BITS - len.leading_zeros()).div_ceil(4).max(1);
    for place in (0..digits).rev() {
        let nibble = u32::try_from(len >> (place * 4) & 15).unwrap_or_default();
        out.extend(char::from_digit(nibble, 16).and_then(|c| u8::try_from(c).ok()));
    }
    out.extend_from_slice(b"\r\n");
}

/// The end of a chunked body.
pub(crate) const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// An error of a plain route.
pub(crate) fn push_error(out: &mut Vec<u8>, status: u16, message: &str, after: After) {
    let body = ErrorBody {
        code: status,
        message: message.to_owned(),
    };
    let body = serde_json::to_vec(&body).unwrap_or_default();
    push_answer(out, status, JSON, &body, after);
}

/// Exactly this: clients compare it as text.
pub(crate) const JSON: &str = "application/json";
/// Exactly this: clients compare it as text.
pub(crate) const CONNECT_JSON: &str = "application/connect+json";
/// Binary messages, answered once and in streams.
pub(crate) const PROTO: &str = "application/proto";
pub(crate) const CONNECT_PROTO: &str = "application/connect+proto";

#[cfg(test)]
mod tests {
    use super::*;
    use api_types::envd::MAX_HEAD;
    use proptest::prelude::*;

    fn head(text: &str) -> Result<Option<(Head, Framing, usize)>, BadRequest> {
        parse(text.as_bytes())
    }

    #[test]
    fn what_matters_is_read() {
        let text = "POST /p?x=1 HTTP/1.1\r\nCONTENT-length: 3\r\nAuthorization: Basic dXNlcjo=\r\n\
                    Connect-Timeout-Ms: 0\r\nKeepalive-Ping-Interval: 50\r\nX-Access-Token:  t \r\n\r\nabc";
        let (head, body, used) = head(text).unwrap().unwrap();
        assert_eq!((head.path.as_str(), head.query.as_str()), ("/p", "x=1"));
        assert_eq!(
            (head.user.as_deref(), head.access_token.as_str()),
            (Some("user"), "t")
        );
        assert_eq!(
            (head.timeout, head.keepalive),
            (None, Some(Duration::from_secs(50)))
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
    fn numbers_are_written() {
        let mut out = Vec::new();
        push_number(&mut out, 0);
        push_number(&mut out, 4096);
        push_chunk_size(&mut out, 0x1f0);
        assert_eq!(out, b"040961f0\r\n");
    }

    proptest! {
        #[test]
        fn hostile_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), query in ".{0,30}") {
            let _ = parse(&bytes);
            let _ = query_value(&query, "path");
        }
    }
}
