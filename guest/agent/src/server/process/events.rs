//! Events of a process, appended to a connection's output. Output of the process is encoded as base64 without an
//! intermediate copy.

use envd::{
    Blob, EndEvent, EventResponse, ProcessEvent,
    proto::{self, DataField},
};

use super::super::{
    codec::Codec,
    envelope::{push_frame, push_json},
};

/// An output stream of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pipe {
    Stdout,
    Stderr,
    /// The terminal: both streams, and the echo of input.
    Pty,
}

/// Largest piece in bytes in which output is read and sent.
pub(crate) const PIECE: usize = 32 << 10;
/// Like [`PIECE`], for a terminal.
pub(crate) const PTY_PIECE: usize = 16 << 10;

/// Appends a data event with at most [`PIECE`] bytes.
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

pub(crate) fn push_start(out: &mut Vec<u8>, codec: Codec, pid: u32) {
    let json = format!(r#"{{"event":{{"start":{{"pid":{pid}}}}}}}"#);
    push_json(out, codec, json.as_bytes());
}

pub(crate) fn push_keepalive(out: &mut Vec<u8>, codec: Codec) {
    push_json(out, codec, br#"{"event":{"keepalive":{}}}"#);
}

/// Appends the end event. The end of the stream follows it.
pub(crate) fn push_end(out: &mut Vec<u8>, codec: Codec, end: &EndEvent) {
    let event = ProcessEvent {
        end: Some(end.clone()),
        ..ProcessEvent::default()
    };
    let json = serde_json::to_vec(&EventResponse { event }).unwrap_or_default();
    push_json(out, codec, &json);
}

#[cfg(test)]
mod tests {
    use super::*;
    use envd::{ChunkedDecoder, DataEvent, Decoded, StartEvent, frame};

    #[test]
    fn the_wire_types_read_the_events_written_here() {
        let mut out = Vec::new();
        push_start(&mut out, Codec::Json, 7);
        push_keepalive(&mut out, Codec::Json);
        push_data(&mut out, Codec::Json, Pipe::Stderr, b"hi");
        push_end(&mut out, Codec::Json, &EndEvent::default());
        super::super::super::envelope::push_end_stream(&mut out, None);
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
