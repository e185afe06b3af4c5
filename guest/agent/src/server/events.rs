//! Messages of a process stream, written straight into a connection's output: envelope, chunk and JSON in
//! one pass, output as base64 without a copy in between.

use api_types::envd::{
    Blob, ConnectError, EndEvent, EndStream, EventResponse, ProcessEvent, frame,
    proto::{self, DataField},
};

use super::{codec::Codec, http};

/// Which stream of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pipe {
    Stdout,
    Stderr,
    /// Both, and the echo of what is typed.
    Pty,
}

/// Output is read and sent in pieces of at most this many bytes.
pub(crate) const PIECE: usize = 32 << 10;
/// The same for a terminal's.
pub(crate) const PTY_PIECE: usize = 16 << 10;

/// A chunk with one frame around `len` bytes that `body` appends.
fn push_frame(out: &mut Vec<u8>, flags: u8, len: usize, body: impl FnOnce(&mut Vec<u8>)) {
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

/// Output of at most [`PIECE`] bytes.
pub(crate) fn push_data(out: &mut Vec<u8>, codec: Codec, pipe: Pipe, bytes: &[u8]) {
    if let Codec::Binary(_) = codec {
        let message = proto::data_event(pipe.field(), bytes);
        return push_frame(out, 0, message.len(), |out| out.extend_from_slice(&message));
    }
    let before: &[u8] = match pipe {
        Pipe::Stdout => br#"{"event":{"data":{"stdout":""#,
        Pipe::Stderr => br#"{"event":{"data":{"stderr":""#,
        Pipe::Pty => br#"{"event":{"data":{"pty":""#,
    };
    let after: &[u8] = br#""}}}"#;
    let len = before.len() + bytes.len().div_ceil(3) * 4 + after.len();
    out.reserve(len + 32);
    push_frame(out, 0, len, |out| {
        out.extend_from_slice(before);
        Blob::encode_into(bytes, out);
        out.extend_from_slice(after);
    });
}

impl Pipe {
    fn field(self) -> DataField {
        match self {
            Self::Stdout => DataField::Stdout,
            Self::Stderr => DataField::Stderr,
            Self::Pty => DataField::Pty,
        }
    }
}

/// A message as the codec writes it.
pub(crate) fn push_json(out: &mut Vec<u8>, codec: Codec, json: &[u8]) {
    let message = codec.write(json);
    debug_assert!(message.is_ok(), "{}", String::from_utf8_lossy(json));
    let message = message.unwrap_or_default();
    push_frame(out, 0, message.len(), |out| out.extend_from_slice(&message));
}

pub(crate) fn push_start(out: &mut Vec<u8>, codec: Codec, pid: u32) {
    let json = format!(r#"{{"event":{{"start":{{"pid":{pid}}}}}}}"#);
    push_json(out, codec, json.as_bytes());
}

pub(crate) fn push_keepalive(out: &mut Vec<u8>, codec: Codec) {
    push_json(out, codec, br#"{"event":{"keepalive":{}}}"#);
}

/// The end event, the end of the stream and the end of the body.
pub(crate) fn push_end(out: &mut Vec<u8>, codec: Codec, end: &EndEvent) {
    let event = ProcessEvent {
        end: Some(end.clone()),
        ..ProcessEvent::default()
    };
    let json = serde_json::to_vec(&EventResponse { event }).unwrap_or_default();
    push_json(out, codec, &json);
    push_end_stream(out, None);
}

/// The end of the stream, well or with an error, and the end of the body.
pub(crate) fn push_end_stream(out: &mut Vec<u8>, error: Option<ConnectError>) {
    let json = serde_json::to_vec(&EndStream { error }).unwrap_or_default();
    push_frame(out, frame::END_STREAM, json.len(), |out| {
        out.extend_from_slice(&json)
    });
    out.extend_from_slice(http::LAST_CHUNK);
}

#[cfg(test)]
mod tests {
    use super::*;
    use api_types::envd::{ChunkedDecoder, DataEvent, Decoded, StartEvent};

    #[test]
    fn what_is_written_is_what_the_types_read() {
        let mut out = Vec::new();
        push_start(&mut out, Codec::Json, 7);
        push_keepalive(&mut out, Codec::Json);
        push_data(&mut out, Codec::Json, Pipe::Stderr, b"hi");
        push_end(&mut out, Codec::Json, &EndEvent::default());
        let (mut input, mut body) = (out.as_slice(), Vec::new());
        let mut decoder = ChunkedDecoder::default();
        while let Decoded::Data(data) = decoder.step(&mut input).unwrap() {
            body.extend_from_slice(data);
        }
        assert!(decoder.is_done() && input.is_empty());
        let mut events = Vec::new();
        let mut rest = body.as_slice();
        while let Some((frame, used)) = frame::decode(rest, 1 << 20).unwrap() {
            if frame.flags == 0 {
                let event: EventResponse = serde_json::from_slice(frame.body).unwrap();
                events.push(event.event);
            }
            rest = &rest[used..];
        }
        let stderr = Some(Blob(b"hi".to_vec()));
        let wanted = [
            ProcessEvent {
                start: Some(StartEvent { pid: 7 }),
                ..Default::default()
            },
            ProcessEvent {
                keepalive: Some(Default::default()),
                ..Default::default()
            },
            ProcessEvent {
                data: Some(DataEvent {
                    stderr,
                    ..Default::default()
                }),
                ..Default::default()
            },
            ProcessEvent {
                end: Some(EndEvent::default()),
                ..Default::default()
            },
        ];
        assert_eq!(events, wanted);
    }
}
