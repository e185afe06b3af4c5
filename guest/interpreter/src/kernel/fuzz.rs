//! Runs the parsers of kernel messages on arbitrary bytes.

use super::{
    display::{self, Weight},
    wire::Session,
    zmtp,
};
use crate::message::{self, Line};

/// Parses frames and the message that they form: first unchanged, and then signed with the key of the session.
///
/// # Panics
/// Panics if a frame is longer than its input, an unsigned message is accepted, or a result is not one line.
pub(crate) fn kernel(bytes: &[u8]) {
    let (mut rest, mut parts) = (bytes, Vec::new());
    while let Ok(Some((_, body, used))) = zmtp::frame(rest) {
        assert!(body.len() < used && used <= rest.len());
        parts.push(body.to_vec());
        rest = &rest[used..];
    }
    let session = Session::with_key("key");
    assert!(session.read(&parts).is_none(), "a signature was guessed");
    session.sign_parts(&mut parts);
    let Some(heard) = session.read(&parts) else {
        return;
    };
    for weight in [Weight::Main, Weight::Aside] {
        let line = display::result(&heard.content, weight);
        assert!(!line.contains('\n'), "{line}");
        assert_eq!(message::classify(line.as_bytes()), Line::Event);
    }
}
