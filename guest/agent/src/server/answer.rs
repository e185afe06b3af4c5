//! Responses of the Connect protocol on a connection.

use envd::ConnectError;
use transport::{After, Rest, http};

use super::{core::Conn, envelope};

/// Answers a unary call; `json` is the response message.
pub(crate) fn success(conn: &mut Conn, json: &[u8]) {
    match conn.call.write(json) {
        Ok(message) => conn.answer(200, conn.call.unary_type(), &message),
        Err(error) => failure(conn, &error),
    }
}

/// Answers a unary call with an error.
#[cold]
#[inline(never)]
pub(crate) fn failure(conn: &mut Conn, error: &ConnectError) {
    let body = serde_json::to_vec(error).unwrap_or_default();
    conn.answer(error.code.http_status(), http::JSON, &body);
}

/// Begins a streamed response.
pub(crate) fn begin_stream(conn: &mut Conn) {
    http::push_chunked_head(&mut conn.out, conn.call.stream_type(), conn.after);
}

/// Ends a stream that has begun.
pub(crate) fn end_stream(conn: &mut Conn, error: Option<ConnectError>) {
    envelope::push_end_stream(&mut conn.out, error);
    conn.end_request(Rest::Read);
}

/// Responds to a streaming call with an error instead of a stream.
#[cold]
#[inline(never)]
pub(crate) fn refuse_stream(conn: &mut Conn, error: ConnectError) {
    begin_stream(conn);
    end_stream(conn, Some(error));
}

/// Like [`refuse_stream`], but before the whole request has been read. The connection is closed after the response.
#[cold]
#[inline(never)]
pub(crate) fn abort_stream(conn: &mut Conn, error: ConnectError) {
    conn.after = After::Close;
    begin_stream(conn);
    envelope::push_end_stream(&mut conn.out, Some(error));
    conn.end_request(Rest::Unread);
}
