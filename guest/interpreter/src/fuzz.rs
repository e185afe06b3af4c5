//! The fuzz target `interpreter`: parsers of requests and of messages of hosts and kernels, without the code that acts
//! on them.

use std::path::Path;

use envd::{BadRequest, ChunkError, Decoded, Framing, MAX_HEAD};
use transport::{Head, http};

use crate::{
    api::{self, CreateContextRequest, ExecuteRequest},
    clone_state::Variables,
    kernel,
    language::Language,
    message::{self, Dialect, Line, Run},
};

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| interpreter(bytes));

/// Chooses a parser by the first byte and runs it on the others.
///
/// # Panics
/// Panics if the result of a parser violates an assertion.
pub(crate) fn interpreter(bytes: &[u8]) {
    let [choice, piece, bytes @ ..] = bytes else {
        return;
    };
    match choice % 4 {
        0 | 1 => request(bytes, usize::from(piece % 64) + 1),
        2 => line(bytes),
        _ => kernel::fuzz::kernel(bytes),
    }
}

/// Reads a request as the server does.
fn request(bytes: &[u8], piece: usize) {
    let Ok(Some((head, framing, used))) = parse(bytes) else {
        return;
    };
    assert!(used <= MAX_HEAD && used <= bytes.len());
    for cut in (0..used).step_by(piece) {
        assert!(matches!(parse(&bytes[..cut]), Ok(None)), "at {cut}");
    }
    let rest = bytes.get(used..).unwrap_or_default();
    let body = take(framing.clone(), rest, piece);
    assert_eq!(body, take(framing, rest, rest.len().max(1)));
    let Ok(Some(body)) = body else {
        return;
    };
    assert!(body.len() <= rest.len());
    let _route = api::route(&head.method, &head.path);
    let _created = serde_json::from_slice::<CreateContextRequest>(&body);
    if let Ok(execute) = serde_json::from_slice::<ExecuteRequest>(&body) {
        let _language =
            (execute.language.as_deref()).map(|name| Language::parse(name, Path::new("/nowhere")));
        cell(&execute.code, &execute.env_vars.unwrap_or_default());
    }
}

fn parse(bytes: &[u8]) -> Result<Option<(Head<()>, Framing, usize)>, BadRequest> {
    http::parse(bytes)
}

/// The body, if it is complete.
fn take(mut framing: Framing, bytes: &[u8], piece: usize) -> Result<Option<Vec<u8>>, ChunkError> {
    let mut body = Vec::new();
    // The empty piece completes an empty body.
    for mut piece in bytes.chunks(piece).chain([&[][..]]) {
        loop {
            match framing.next(&mut piece)? {
                Decoded::Data(data) => body.extend_from_slice(data),
                Decoded::More => break,
                Decoded::End => return Ok(Some(body)),
            }
        }
    }
    Ok(None)
}

/// Encodes a cell in both dialects. The JSON must be one line; the number of fields must match the counts of variables
/// in them.
fn cell(code: &str, env: &Variables) {
    let run = Run {
        n: 1,
        code,
        env,
        base: Some(env),
        seed: true,
        unstored: false,
    };
    let line = run.encode(Dialect::Json);
    assert_eq!(line.iter().position(|b| *b == b'\n'), Some(line.len() - 1));
    serde_json::from_slice::<message::Request>(&line).expect("a request is read as it was written");
    let fields = run.encode(Dialect::Fields);
    let named = env.keys().filter(|name| message::is_name(name)).count();
    let ends = fields.iter().filter(|byte| **byte == 0).count();
    assert_eq!(ends, 1 + 2 * (1 + named) + 1);
}

/// Classifies a line of a host. Only lines that begin and end with a brace may be passed on to clients.
fn line(bytes: &[u8]) {
    let first = bytes.split(|byte| *byte == b'\n').next();
    let line = first.unwrap_or_default();
    if message::classify(line) == Line::Event {
        assert!(line.starts_with(b"{") && line.ends_with(b"}"));
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    /// Seeds, which include inputs that once failed.
    #[test]
    fn the_fuzz_seeds_pass() {
        let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dev/fuzz/seeds/interpreter");
        let mut read = 0;
        for seed in fs::read_dir(seeds).unwrap() {
            super::interpreter(&fs::read(seed.unwrap().path()).unwrap());
            read += 1;
        }
        assert!(read > 0);
    }
}
