//! What kernels send, under any bytes.

use super::{
    display::{self, Weight},
    wire::Session,
    zmtp,
};
use crate::message::{self, Line};

/// Frames, and the message that they are parts of: as they are, and signed with the key of the session.
///
/// # Panics
/// A frame is longer than what it was read from, an unsigned message is heard, or a result is not one line.
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
