//! Runs the request parsers on arbitrary bytes.

use envd::{
    BadRequest, CloseStdinRequest, ConnectRequest, Decoded, Framing, InitRequest, ListDirRequest,
    MAX_HEAD, MoveRequest, PathRequest, SendInputRequest, SendSignalRequest, StartRequest,
    UpdateRequest, WatchDirRequest,
};

use transport::http;

use super::{
    codec::{self, Codec},
    files,
    head::{FILES, Head},
    message, route,
};

/// Chooses a parser by the first byte and runs it on the others.
///
/// # Panics
/// Panics if the result of a parser violates an assertion.
pub(crate) fn agent(bytes: &[u8]) {
    let [choice, piece, bytes @ ..] = bytes else {
        return;
    };
    let piece = usize::from(piece % 64) + 1;
    match choice % 4 {
        0 | 1 => request(bytes, piece),
        2 => files::fuzz::form(bytes, piece),
        _ => files::fuzz::texts(&String::from_utf8_lossy(bytes)),
    }
}

/// Reads a head, its route, and the body as its handler reads it.
fn request(bytes: &[u8], piece: usize) {
    let Ok(Some((head, mut framing, used))) = parse(bytes) else {
        return;
    };
    assert!(used <= MAX_HEAD && used <= bytes.len());
    for cut in (0..used).step_by(piece) {
        assert!(matches!(parse(&bytes[..cut]), Ok(None)), "at {cut}");
    }
    assert!(head.fields.file.is_some() == (head.path == FILES));
    for name in ["path", "username", "signature"] {
        let _value = http::query_value(&head.query, name);
    }
    let mut rest = bytes.get(used..).unwrap_or_default();
    let body = collect(&mut framing, &mut rest);
    if route::find(&head.method, &head.path).is_err() {
        return;
    }
    let _streams = codec::is_stream(&head.fields.content_type);
    let codecs = [Codec::of_unary(&head), Codec::of_stream(&head)];
    for codec in codecs.into_iter().flatten() {
        read_message(codec, &body);
    }
}

fn parse(bytes: &[u8]) -> Result<Option<(Head, Framing, usize)>, BadRequest> {
    http::parse(bytes)
}

fn collect(framing: &mut Framing, rest: &mut &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Ok(Decoded::Data(data)) = framing.next(rest) {
        body.extend_from_slice(data);
    }
    body
}

/// Reads a message as each handler does.
fn read_message(codec: Codec, body: &[u8]) {
    let Ok(json) = codec.read(body) else {
        return;
    };
    let _read = (
        message::read::<StartRequest>(&json),
        message::read::<ConnectRequest>(&json),
        message::read::<SendInputRequest>(&json),
        message::read::<SendSignalRequest>(&json),
        message::read::<CloseStdinRequest>(&json),
        message::read::<UpdateRequest>(&json),
        message::read::<InitRequest>(&json),
    );
    let _read = (
        message::read::<ListDirRequest>(&json),
        message::read::<MoveRequest>(&json),
        message::read::<PathRequest>(&json),
        message::read::<WatchDirRequest>(&json),
    );
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    /// Seeds, which include inputs that once failed.
    #[test]
    fn the_fuzz_seeds_pass() {
        let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dev/fuzz/seeds/agent");
        let mut read = 0;
        for seed in fs::read_dir(seeds).unwrap() {
            super::agent(&fs::read(seed.unwrap().path()).unwrap());
            read += 1;
        }
        assert!(read > 0);
    }
}
