//! The parsers of both ends of the data plane: request heads, chunked bodies, Connect envelopes and the JSON in them.
//! The result must not depend on the sizes of the pieces in which bytes arrive.
#![no_main]

use envd::{BadRequest, Blob, ChunkError, ChunkedDecoder, ConnectError, Decoded, EndStream, EventResponse, Framing, FramingHeaders, MAX_HEAD, MAX_HEADERS, StreamInputRequest, Timestamp, frame, header_text, parse_head};

/// Limit of an envelope's body, in bytes.
const LIMIT: u32 = 1 << 12;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let [choice, piece, bytes @ ..] = bytes else {
        return;
    };
    let piece = usize::from(piece % 64) + 1;
    match choice % 4 {
        0 => envelopes(bytes, piece),
        1 => chunks(bytes, piece),
        2 => head(bytes, piece),
        _ => messages(bytes),
    }
});

/// Decodes the envelopes of a stream. Returns their flags and bodies, and the error that ended the stream, if any.
fn read_envelopes(
    pieces: impl Iterator<Item = Vec<u8>>,
) -> (Vec<(u8, Vec<u8>)>, Option<frame::FrameError>) {
    let (mut held, mut read) = (Vec::new(), Vec::new());
    for piece in pieces {
        held.extend(piece);
        loop {
            match frame::decode(&held, LIMIT) {
                Ok(None) => break,
                Err(error) => return (read, Some(error)),
                Ok(Some((frame, used))) => {
                    assert_eq!(used, frame.body.len() + frame::HEADER);
                    read.push((frame.flags, frame.body.to_vec()));
                    held.drain(..used);
                }
            }
        }
        let most = usize::try_from(LIMIT).unwrap_or(0) + frame::HEADER;
        assert!(
            held.len() < most,
            "the decoder buffers more than one envelope"
        );
    }
    (read, None)
}

fn envelopes(bytes: &[u8], piece: usize) {
    let cut = read_envelopes(bytes.chunks(piece).map(<[u8]>::to_vec));
    assert_eq!(cut, read_envelopes(bytes.chunks(1).map(<[u8]>::to_vec)));
    let mut again = Vec::new();
    for (flags, body) in &cut.0 {
        frame::encode(*flags, body, &mut again).expect("a length that was read");
    }
    assert!(bytes.starts_with(&again));
}

/// Decodes a chunked body. Returns its bytes, whether it is complete, and the number of input bytes used.
fn read_chunks(bytes: &[u8], piece: usize) -> Result<(Vec<u8>, bool, usize), ChunkError> {
    let (mut decoder, mut body, mut used) = (ChunkedDecoder::default(), Vec::new(), 0);
    for piece in bytes.chunks(piece) {
        let mut input = piece;
        loop {
            match decoder.step(&mut input)? {
                Decoded::Data(data) => {
                    assert!(!data.is_empty());
                    body.extend_from_slice(data);
                }
                Decoded::More => break,
                Decoded::End => {
                    assert!(decoder.is_done());
                    used += piece.len() - input.len();
                    return Ok((body, true, used));
                }
            }
        }
        assert!(input.is_empty());
        used += piece.len();
    }
    Ok((body, false, used))
}

fn chunks(bytes: &[u8], piece: usize) {
    let cut = read_chunks(bytes, piece);
    assert_eq!(cut, read_chunks(bytes, bytes.len().max(1)));
    if let Ok((body, _, used)) = cut {
        assert!(body.len() <= used && used <= bytes.len());
    }
}

/// Parses a request head. Returns its length and the framing of its body, or `None` if the head is incomplete.
fn read_head(bytes: &[u8]) -> Result<Option<(usize, Framing)>, BadRequest> {
    let mut space = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut space);
    let Some(len) = parse_head(&mut request, bytes)? else {
        return Ok(None);
    };
    let mut framing = FramingHeaders::default();
    for header in request.headers.iter() {
        framing.take(header.name, header_text(header)?)?;
    }
    Ok(Some((len, framing.framing()?)))
}

fn head(bytes: &[u8], piece: usize) {
    let Ok(Some((len, mut framing))) = read_head(bytes) else {
        return;
    };
    assert!(len <= MAX_HEAD && len <= bytes.len());
    // A prefix of a head must not be a head: two parsers would disagree about where the body begins.
    for end in (0..len).step_by(piece) {
        assert!(matches!(read_head(&bytes[..end]), Ok(None)), "at {end}");
    }
    let mut input = &bytes[len..];
    while let Ok(Decoded::Data(data)) = framing.next(&mut input) {
        assert!(!data.is_empty());
    }
}

fn messages(bytes: &[u8]) {
    if let Ok(end) = serde_json::from_slice::<EndStream>(bytes) {
        let again = serde_json::to_vec(&end).expect("JSON");
        assert_eq!(serde_json::from_slice::<EndStream>(&again).ok(), Some(end));
    }
    let _event = serde_json::from_slice::<EventResponse>(bytes);
    let _input = serde_json::from_slice::<StreamInputRequest>(bytes);
    let _error = serde_json::from_slice::<ConnectError>(bytes);
    if let Some(blob) = Blob::decode(bytes) {
        let mut text = Vec::new();
        Blob::encode_into(&blob, &mut text);
        assert_eq!(Blob::decode(&text), Some(blob));
    }
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    if let Ok(time) = Timestamp::parse(text) {
        let again = time.to_string();
        assert_eq!(Timestamp::parse(&again).ok(), Some(time), "{again}");
    }
}
