//! Messages of a stream, appended to a connection's output: HTTP chunk, Connect envelope and message in one pass.

use envd::{ConnectError, EndStream, frame};
use transport::http;

use super::codec::Codec;

/// Appends a chunk that contains one envelope. `body` must append its content, which must have exactly `len` bytes.
pub(crate) fn push_frame(
    out: &mut Vec<u8>,
    flags: u8,
    len: usize,
    body: impl FnOnce(&mut Vec<u8>),
) {
    http::push_chunk_size(out, len + frame::HEADER);
    out.extend_from_slice(&frame::header(
        flags,
        u32::try_from(len).unwrap_or(u32::MAX),
    ));
    let start = out.len();
    body(out);
    debug_assert_eq!(out.len() - start, len);
    out.extend_from_slice(b"\r\n");
}

/// Converts a JSON message to the stream's codec and appends it.
pub(crate) fn push_json(out: &mut Vec<u8>, codec: Codec, json: &[u8]) {
    let message = codec.write(json);
    debug_assert!(message.is_ok(), "{}", String::from_utf8_lossy(json));
    let message = message.unwrap_or_default();
    push_frame(out, 0, message.len(), |out| out.extend_from_slice(&message));
}

/// Appends the end-of-stream message, with the error if one is given, and ends the chunked body.
pub(crate) fn push_end_stream(out: &mut Vec<u8>, error: Option<ConnectError>) {
    let json = serde_json::to_vec(&EndStream { error }).unwrap_or_default();
    push_frame(out, frame::END_STREAM, json.len(), |out| {
        out.extend_from_slice(&json)
    });
    out.extend_from_slice(http::LAST_CHUNK);
}
