//! Output of programs as text.

/// Largest number of bytes of an incomplete UTF-8 sequence.
const MAX_TAIL: usize = 3;

/// Converts pieces of a byte stream to text without splitting characters: the bytes of an incomplete character are held
/// until the next piece.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    tail: Vec<u8>,
}

impl Decoder {
    /// Converts the next piece. Bytes that are not UTF-8 become U+FFFD.
    pub(crate) fn push(&mut self, piece: &[u8]) -> String {
        let mut bytes = std::mem::take(&mut self.tail);
        bytes.extend_from_slice(piece);
        let whole = bytes.len() - unfinished(&bytes);
        self.tail = bytes.split_off(whole);
        match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        }
    }

    /// Converts the held bytes after the last piece.
    pub(crate) fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.tail)).into_owned()
    }
}

/// The length of an incomplete character at the end; 0 if there is none.
fn unfinished(bytes: &[u8]) -> usize {
    let from = bytes.len().saturating_sub(MAX_TAIL);
    let end = bytes.get(from..).unwrap_or_default();
    let start = end.iter().rposition(|byte| byte & 0xc0 != 0x80);
    let Some(last) = start.and_then(|start| end.get(start..)) else {
        return 0;
    };
    match std::str::from_utf8(last) {
        Err(error) if error.error_len().is_none() => last.len(),
        Ok(_) | Err(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bytes_that_are_not_text_are_replaced_at_once() {
        let mut decoder = Decoder::default();
        assert_eq!(decoder.push(b"a\xff\x80b"), "a\u{fffd}\u{fffd}b");
        assert_eq!(decoder.push(b"\xe2\x82"), "");
        assert_eq!(decoder.push(b"x"), "\u{fffd}x");
        assert_eq!(decoder.push(b"\xf0\x9f"), "");
        assert_eq!(decoder.finish(), "\u{fffd}");
    }

    proptest! {
        #[test]
        fn text_is_the_same_in_any_pieces(text in ".{0,40}", cuts in prop::collection::vec(1_usize..7, 0..40)) {
            let mut decoder = Decoder::default();
            let (mut rest, mut read) = (text.as_bytes(), String::new());
            for cut in cuts.into_iter().chain([usize::MAX]) {
                let (piece, more) = rest.split_at(cut.min(rest.len()));
                read.push_str(&decoder.push(piece));
                rest = more;
            }
            read.push_str(&decoder.finish());
            prop_assert_eq!(read, text);
        }

        #[test]
        fn bytes_decode_the_same_in_any_pieces(bytes in prop::collection::vec(any::<u8>(), 0..40), cut in 0_usize..40) {
            let (first, second) = bytes.split_at(cut.min(bytes.len()));
            let mut decoder = Decoder::default();
            let read = decoder.push(first) + &decoder.push(second) + &decoder.finish();
            prop_assert_eq!(read, String::from_utf8_lossy(&bytes));
        }
    }
}
