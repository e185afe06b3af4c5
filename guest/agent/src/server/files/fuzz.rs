//! Runs the parsers of file requests on arbitrary bytes.

use super::{
    media_type::{MediaType, content_disposition},
    metadata::{self, Metadata},
    multipart::{Event, Multipart, MultipartError, PartHead},
    path::resolve,
    range::{self, Wanted},
    signature::{self, Operation},
};

/// Parses a form in pieces of `piece` bytes, and in one piece. The first line of `bytes` is the boundary.
///
/// # Panics
/// Panics if the two results differ.
pub(crate) fn form(bytes: &[u8], piece: usize) {
    let end = bytes.iter().position(|byte| *byte == b'\n');
    let (boundary, body) = bytes.split_at(end.unwrap_or(0));
    let boundary = String::from_utf8_lossy(boundary);
    let body = body.get(1..).unwrap_or_default();
    let cut = read_form(&boundary, body, piece);
    assert_eq!(cut, read_form(&boundary, body, body.len().max(1)));
}

type Part = (PartHead, Vec<u8>);

/// The parts that were read, and the result.
fn read_form(boundary: &str, body: &[u8], piece: usize) -> (Vec<Part>, Result<(), MultipartError>) {
    let mut parts: Vec<Part> = Vec::new();
    let mut reader = match Multipart::new(boundary) {
        Ok(reader) => reader,
        Err(error) => return (parts, Err(error)),
    };
    let mut is_open = false;
    for mut piece in body.chunks(piece) {
        loop {
            match reader.step(&mut piece) {
                Err(error) => return (parts, Err(error)),
                Ok(Event::More) => break,
                Ok(Event::Part(head)) => {
                    assert!(!is_open);
                    is_open = true;
                    parts.push((head, Vec::new()));
                }
                Ok(Event::Data(data)) => {
                    assert!(is_open && !data.is_empty());
                    parts.last_mut().expect("a part").1.extend_from_slice(data);
                }
                Ok(Event::PartEnd) => is_open = !std::mem::replace(&mut is_open, false),
            }
        }
        assert!(piece.is_empty());
    }
    let held: usize = parts.iter().map(|(_, data)| data.len()).sum();
    assert!(held <= body.len(), "{held} bytes of {}", body.len());
    (parts, reader.finish())
}

/// Parses the text as each kind of header value and as a query.
///
/// # Panics
/// Panics if an assertion below fails.
pub(crate) fn texts(text: &str) {
    let media = MediaType::parse(text);
    let _names = (media.parameter("name"), media.parameter("filename"));
    let shown = content_disposition(text);
    assert!(
        shown.bytes().all(|byte| (0x20..0x7f).contains(&byte)),
        "{shown}"
    );
    for size in [0, 1, 1000, u64::MAX] {
        if let Wanted::Part { start, len } = range::wanted(Some(text), size) {
            assert!(len > 0 && start.checked_add(len).is_some_and(|end| end <= size));
        }
    }
    let _coding = range::coding(text);
    let metadata: Metadata = [(text.to_owned(), text.to_owned())].into();
    let _carried = metadata::check(&metadata);
    for (workdir, home) in [("", ""), ("/work", "/home/user")] {
        if let Ok(path) = resolve(text, workdir, home) {
            assert!(path.is_absolute(), "{}", path.display());
        }
    }
    let now = 1_700_000_000;
    assert!(signature::check(Operation::Read, "secret", "", text, now).is_err());
}
