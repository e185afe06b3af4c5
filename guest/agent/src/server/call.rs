//! The parts that all calls of the Connect protocol share: content type, compression, envelopes.

use std::borrow::Cow;

use envd::{
    ConnectCode::{InvalidArgument, Unimplemented},
    ConnectError, frame,
};
use transport::{Rest, http};

use super::{
    answer,
    codec::{self, Codec},
    core::Conn,
    envelope,
    head::Head,
    message::error,
};

const COMPRESSED: &str = "compression is not offered";
const STREAM_TYPE: &str =
    "the content type must be application/connect+json or application/connect+proto";

/// Converts the request message of a unary call to JSON. Returns `None` after answering with an error.
pub(crate) fn begin_unary<'a>(
    conn: &mut Conn,
    head: &Head,
    body: &'a [u8],
) -> Option<Cow<'a, [u8]>> {
    let Some(codec) = Codec::of_unary(head) else {
        let types = "the content type must be application/json or application/proto";
        conn.error(415, types);
        return None;
    };
    conn.call = codec;
    let read = codec.read(body).and_then(|body| {
        if head.fields.encoding.is_empty() {
            Ok(body)
        } else {
            error(Unimplemented, COMPRESSED)
        }
    });
    read.map_err(|error| answer::failure(conn, &error)).ok()
}

/// Answers a unary call. `Ok(None)` leaves the response to an exchange that has begun.
pub(crate) fn end_unary(conn: &mut Conn, answered: Result<Option<Vec<u8>>, ConnectError>) {
    match answered {
        Ok(Some(message)) => answer::success(conn, &message),
        Ok(None) => {}
        Err(error) => answer::failure(conn, &error),
    }
}

/// Converts the request message of a call with a streamed response to JSON; it must be the only one. Returns `None`
/// after answering with an error.
pub(crate) fn begin_stream<'a>(
    conn: &mut Conn,
    head: &Head,
    body: &'a [u8],
) -> Option<Cow<'a, [u8]>> {
    let Some(codec) = Codec::of_stream(head) else {
        conn.error(415, STREAM_TYPE);
        return None;
    };
    conn.call = codec;
    let read = only_frame(head, body).and_then(|body| codec.read(body));
    read.map_err(|error| answer::refuse_stream(conn, error))
        .ok()
}

/// Accepts a call whose request is a stream, before that stream is read. Returns false after refusing the call.
pub(crate) fn begin_request_stream(conn: &mut Conn, head: &Head) -> bool {
    let Some(codec) = Codec::of_stream(head) else {
        conn.refuse(415, STREAM_TYPE);
        return false;
    };
    conn.call = codec;
    if !head.fields.encoding.is_empty() {
        conn.refuse(501, COMPRESSED);
        return false;
    }
    conn.invite_body(head);
    true
}

/// Answers a call that the agent does not offer.
pub(crate) fn unknown(conn: &mut Conn, head: &Head) {
    let what = format!("{} is not offered", head.path.trim_start_matches('/'));
    let error = ConnectError::new(Unimplemented, what);
    let content_type = &head.fields.content_type;
    if codec::is_stream(content_type) {
        http::push_chunked_head(&mut conn.out, content_type, conn.after);
        envelope::push_end_stream(&mut conn.out, Some(error));
        return conn.end_request(Rest::Read);
    }
    answer::failure(conn, &error);
}

/// The message of a request that must consist of exactly one message.
fn only_frame<'a>(head: &Head, body: &'a [u8]) -> Result<&'a [u8], ConnectError> {
    if !head.fields.encoding.is_empty() {
        return error(Unimplemented, COMPRESSED);
    }
    match frame::decode(body, u32::MAX) {
        Ok(Some((frame, used))) if frame.flags == 0 && used == body.len() => Ok(frame.body),
        Ok(_) => error(InvalidArgument, "the request must be exactly one message"),
        Err(e) => error(InvalidArgument, e.to_string()),
    }
}
