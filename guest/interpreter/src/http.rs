//! Request heads and answers of HTTP/1.1. Pure: bytes in, bytes out.

use api_types::envd::{
    BadRequest, Framing, FramingHeaders, MAX_HEADERS, asks_to_close, header_text, parse_head,
};

/// What matters of a request's head.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) method: String,
    /// Without the query.
    pub(crate) path: String,
    pub(crate) expects_continue: bool,
    pub(crate) close: bool,
}

/// Reads a head from the front of `bytes`: the head, how its body is delimited, and how many bytes it took.
/// `None` when it is not whole yet.
pub(crate) fn parse(bytes: &[u8]) -> Result<Option<(Head, Framing, usize)>, BadRequest> {
    let mut space = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut space);
    let Some(len) = parse_head(&mut request, bytes)? else {
        return Ok(None);
    };
    let target = request.path.unwrap_or_default();
    let mut head = Head {
        method: request.method.unwrap_or_default().to_owned(),
        path: target.split('?').next().unwrap_or_default().to_owned(),
        close: request.version == Some(0),
        ..Head::default()
    };
    let mut framing = FramingHeaders::default();
    for header in request.headers.iter() {
        let is = |name: &str| header.name.eq_ignore_ascii_case(name);
        let text = header_text(header)?;
        if framing.take(header.name, text)? {
            continue;
        }
        if is("expect") {
            head.expects_continue = text.eq_ignore_ascii_case("100-continue");
        } else if is("connection") {
            head.close |= asks_to_close(text);
        }
    }
    Ok(Some((head, framing.framing()?, len)))
}

/// Whether the connection goes on after an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum After {
    KeepAlive,
    Close,
}

/// An interim answer that asks for the body.
pub(crate) const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
/// The end of a chunked body.
pub(crate) const LAST_CHUNK: &[u8] = b"0\r\n\r\n";
pub(crate) const JSON: &str = "application/json";
pub(crate) const TEXT: &str = "text/plain; charset=utf-8";

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        413 => "Content Too Large",
        422 => "Unprocessable Content",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        503 => "Service Unavailable",
        _ => "Unknown",
    }
}

fn push_head(out: &mut Vec<u8>, status: u16, content_type: &str, after: After, framing: &str) {
    let number = status.to_string();
    let connection = match after {
        After::KeepAlive => "",
        After::Close => "connection: close\r\n",
    };
    for part in [
        "HTTP/1.1 ",
        &number,
        " ",
        reason(status),
        "\r\ncontent-type: ",
        content_type,
        "\r\n",
        connection,
        framing,
        "\r\n\r\n",
    ] {
        out.extend_from_slice(part.as_bytes());
    }
}

/// A whole answer.
pub(crate) fn push_answer(
    out: &mut Vec<u8>,
    status: u16,
    content_type: &str,
    body: &[u8],
    after: After,
) {
    let length = format!("content-length: {}", body.len());
    push_head(out, status, content_type, after, &length);
    out.extend_from_slice(body);
}

/// The head of an answer whose body follows in chunks.
pub(crate) fn push_stream_head(out: &mut Vec<u8>, after: After) {
    push_head(out, 200, JSON, after, "transfer-encoding: chunked");
}

/// One chunk of an answer; nothing when it is empty, since an empty chunk ends the body.
pub(crate) fn push_chunk(out: &mut Vec<u8>, bytes: &[u8]) {
    if !bytes.is_empty() {
        out.extend_from_slice(format!("{:x}\r\n", bytes.len()).as_bytes());
        out.extend_from_slice(bytes);
        out.extend_from_slice(b"\r\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use api_types::envd::MAX_HEAD;
    use proptest::prelude::*;

    #[test]
    fn what_matters_is_read() {
        let text =
            b"POST /execute?x HTTP/1.1\r\nCONTENT-length: 3\r\nExpect: 100-continue\r\n\r\nabc";
        let (head, framing, used) = parse(text).unwrap().unwrap();
        assert_eq!(
            (head.method.as_str(), head.path.as_str()),
            ("POST", "/execute")
        );
        assert!(head.expects_continue && !head.close);
        assert!(matches!(framing, Framing::Length(3)));
        assert_eq!(used, text.len() - 3);
    }

    #[test]
    fn ambiguous_bodies_are_refused() {
        for framing in [
            "content-length: 1\r\ncontent-length: 1",
            "content-length: 1\r\ntransfer-encoding: chunked",
            "transfer-encoding: gzip, chunked",
            "content-length: +1",
            "content-length: 99999999999999999999",
        ] {
            let text = format!("POST / HTTP/1.1\r\n{framing}\r\n\r\n");
            assert!(parse(text.as_bytes()).is_err(), "{framing}");
        }
        let long = format!("GET /{} HTTP/1.1\r\n", "x".repeat(MAX_HEAD));
        assert_eq!(parse(long.as_bytes()).unwrap_err().status, 431);
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
        fn hostile_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
        }
    }
}
