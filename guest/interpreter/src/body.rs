//! Bodies of requests: by length or in chunks, in whole, within a limit.

use api_types::envd::{Decoded, Framing};

/// Largest body in bytes; code may carry data.
pub(crate) const MAX_BODY: usize = 32 << 20;

/// A body on its way.
#[derive(Debug)]
pub(crate) struct Body {
    framing: Framing,
    bytes: Vec<u8>,
}

/// Why a body is not taken.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum BodyError {
    #[error("the request's body is larger than {MAX_BODY} bytes")]
    TooLarge,
    #[error("{0}")]
    Coding(#[from] api_types::envd::ChunkError),
}

impl Body {
    pub(crate) fn new(framing: Framing) -> Self {
        Self {
            framing,
            bytes: Vec::new(),
        }
    }

    /// Takes what is there from the front of `input`; the body once it is whole.
    pub(crate) fn take(&mut self, input: &mut Vec<u8>) -> Result<Option<Vec<u8>>, BodyError> {
        match &mut self.framing {
            Framing::Length(length) => {
                let length = usize::try_from(*length).unwrap_or(usize::MAX);
                if length > MAX_BODY {
                    return Err(BodyError::TooLarge);
                }
                if input.len() < length {
                    return Ok(None);
                }
                let rest = input.split_off(length);
                Ok(Some(std::mem::replace(input, rest)))
            }
            Framing::Chunked(decoder) => {
                let mut rest = input.as_slice();
                let whole = loop {
                    match decoder.step(&mut rest)? {
                        Decoded::More => break false,
                        Decoded::End => break true,
                        Decoded::Data(data) if self.bytes.len() + data.len() > MAX_BODY => {
                            return Err(BodyError::TooLarge);
                        }
                        Decoded::Data(data) => self.bytes.extend_from_slice(data),
                    }
                };
                let used = input.len() - rest.len();
                input.drain(..used);
                Ok(whole.then(|| std::mem::take(&mut self.bytes)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use api_types::envd::ChunkedDecoder;
    use proptest::prelude::*;

    fn read(framing: Framing, pieces: &[&[u8]]) -> Result<Option<Vec<u8>>, BodyError> {
        let (mut body, mut input) = (Body::new(framing), Vec::new());
        for piece in pieces {
            input.extend_from_slice(piece);
            if let Some(whole) = body.take(&mut input)? {
                return Ok(Some(whole));
            }
        }
        Ok(None)
    }

    #[test]
    fn large_bodies_are_refused_before_they_arrive() {
        let length = u64::try_from(MAX_BODY).unwrap() + 1;
        assert_eq!(
            read(Framing::Length(length), &[b""]),
            Err(BodyError::TooLarge)
        );
        let chunk = vec![b'x'; MAX_BODY + 1];
        let size = format!("{:x}\r\n", chunk.len());
        let framing = Framing::Chunked(ChunkedDecoder::default());
        assert_eq!(
            read(framing, &[size.as_bytes(), &chunk]),
            Err(BodyError::TooLarge)
        );
    }

    proptest! {
        #[test]
        fn both_codings_give_the_bytes(bytes in prop::collection::vec(any::<u8>(), 1..50), cut in 0_usize..60) {
            let coded = [format!("{:x}\r\n", bytes.len()).as_bytes(), &bytes, b"\r\n0\r\n\r\n"].concat();
            for (framing, wire) in [
                (Framing::Length(bytes.len().try_into().unwrap()), &bytes),
                (Framing::Chunked(ChunkedDecoder::default()), &coded),
            ] {
                let (first, second) = wire.split_at(cut.min(wire.len()));
                prop_assert_eq!(read(framing, &[first, second]), Ok(Some(bytes.clone())));
            }
        }
    }
}
