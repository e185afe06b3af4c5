//! Decoder for the chunked transfer coding of HTTP/1.1 (RFC 9112, 7.1), for clients and servers. Performs no I/O.
//!
//! The decoder consumes input as it arrives and returns body bytes as slices of the input, so it copies nothing and
//! stores only a few counters. Chunk extensions and trailers are discarded, within a length limit.

/// Length limit of each chunk-size line, and of the trailer section, in bytes.
const LINE_LIMIT: u32 = 1024;

/// Decoder state for one message body.
#[derive(Clone, Debug, Default)]
pub struct ChunkedDecoder {
    state: State,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// In a chunk-size line. `digits`: number of hex digits read; `extension`: the size is complete, and the rest of
    /// the line is discarded; `seen`: number of bytes of the line read.
    Size {
        size: u64,
        digits: u32,
        extension: bool,
        seen: u32,
    },
    /// In a chunk, with this many bytes left.
    Data(u64),
    /// In the line end after a chunk.
    DataEnd {
        cr: bool,
    },
    /// In the trailer section. `blank`: the current line is empty so far; `seen`: number of bytes of the section read.
    Trailer {
        blank: bool,
        seen: u32,
    },
    Done,
}

impl Default for State {
    fn default() -> Self {
        Self::Size {
            size: 0,
            digits: 0,
            extension: false,
            seen: 0,
        }
    }
}

/// The result of one decoding step.
#[derive(Debug, PartialEq, Eq)]
pub enum Decoded<'a> {
    /// Body bytes. Call [`ChunkedDecoder::step`] again with the rest of the input.
    Data(&'a [u8]),
    /// All input has been consumed, and the body is not complete.
    More,
    /// The body is complete. The rest of the input belongs to the next message.
    End,
}

/// Why the input is not a valid chunked body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChunkError {
    /// A chunk size is missing, is malformed, or has more than 15 hex digits.
    #[error("missing or too large chunk size")]
    Size,
    /// Chunk data is not followed by a line end.
    #[error("missing line end in a chunked body")]
    LineEnd,
    /// A size line or the trailer section exceeds the limit.
    #[error("chunk size line or trailers longer than {LINE_LIMIT} bytes")]
    TooLong,
}

impl ChunkedDecoder {
    /// Whether the body is complete.
    #[must_use]
    pub fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    /// Consumes bytes from the front of `input` until the next result.
    ///
    /// # Errors
    /// Returns [`ChunkError`] if the input is not a chunked body. The decoder must not be used afterwards.
    pub fn step<'a>(&mut self, input: &mut &'a [u8]) -> Result<Decoded<'a>, ChunkError> {
        loop {
            match self.state {
                State::Done => return Ok(Decoded::End),
                State::Data(left) => {
                    if input.is_empty() {
                        return Ok(Decoded::More);
                    }
                    let n = usize::try_from(left).map_or(input.len(), |left| left.min(input.len()));
                    let (data, rest) = input.split_at(n);
                    *input = rest;
                    let left = left - u64::try_from(n).unwrap_or(left);
                    self.state = match left {
                        0 => State::DataEnd { cr: false },
                        left => State::Data(left),
                    };
                    return Ok(Decoded::Data(data));
                }
                State::Size { .. } | State::DataEnd { .. } | State::Trailer { .. } => {
                    let Some((byte, rest)) = input.split_first() else {
                        return Ok(Decoded::More);
                    };
                    *input = rest;
                    self.state = control(self.state, *byte)?;
                }
            }
        }
    }
}

/// The state after `byte`, which is not part of chunk data.
fn control(state: State, byte: u8) -> Result<State, ChunkError> {
    match state {
        State::Size {
            size,
            digits,
            extension,
            seen,
        } => size_line(size, digits, extension, seen, byte),
        State::DataEnd { cr: false } if byte == b'\r' => Ok(State::DataEnd { cr: true }),
        State::DataEnd { cr: true } if byte == b'\n' => Ok(State::default()),
        State::DataEnd { .. } => Err(ChunkError::LineEnd),
        State::Trailer { seen, .. } if seen >= LINE_LIMIT => Err(ChunkError::TooLong),
        State::Trailer { blank, seen } => Ok(match byte {
            b'\n' if blank => State::Done,
            b'\n' => State::Trailer {
                blank: true,
                seen: seen + 1,
            },
            byte => State::Trailer {
                blank: blank && byte == b'\r',
                seen: seen + 1,
            },
        }),
        State::Data(_) | State::Done => Ok(state),
    }
}

fn size_line(
    size: u64,
    digits: u32,
    extension: bool,
    seen: u32,
    byte: u8,
) -> Result<State, ChunkError> {
    if seen >= LINE_LIMIT {
        return Err(ChunkError::TooLong);
    }
    let next = |size, digits, extension| State::Size {
        size,
        digits,
        extension,
        seen: seen + 1,
    };
    match (char::from(byte).to_digit(16), byte) {
        (_, b'\n') if digits == 0 => Err(ChunkError::Size),
        (_, b'\n') if size == 0 => Ok(State::Trailer {
            blank: true,
            seen: 0,
        }),
        (_, b'\n') => Ok(State::Data(size)),
        (_, _) if extension => Ok(next(size, digits, true)),
        (Some(_), _) if digits == 15 => Err(ChunkError::Size),
        (Some(digit), _) => Ok(next(size << 4 | u64::from(digit), digits + 1, false)),
        (None, b';' | b' ' | b'\t' | b'\r') if digits > 0 => Ok(next(size, digits, true)),
        (None, _) => Err(ChunkError::Size),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Decodes `wire` in pieces of `cut` bytes. Returns the body and the number of unused bytes.
    fn decode(wire: &[u8], cut: usize) -> Result<Option<(Vec<u8>, usize)>, ChunkError> {
        let (mut decoder, mut body, mut used) = (ChunkedDecoder::default(), Vec::new(), 0);
        for piece in wire.chunks(cut) {
            let mut input = piece;
            loop {
                match decoder.step(&mut input)? {
                    Decoded::Data(data) => body.extend_from_slice(data),
                    Decoded::More => break,
                    Decoded::End => {
                        used += piece.len() - input.len();
                        return Ok(Some((body, wire.len() - used)));
                    }
                }
            }
            used += piece.len();
        }
        Ok(None)
    }

    proptest! {
        #[test]
        fn a_body_is_decoded_independently_of_how_it_is_split(
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..100), 0..6),
            cut in 1_usize..40,
        ) {
            let mut wire = Vec::new();
            for chunk in &chunks {
                wire.extend_from_slice(format!("{:X};x=\"1\"\r\n", chunk.len()).as_bytes());
                wire.extend_from_slice(chunk);
                wire.extend_from_slice(b"\r\n");
            }
            wire.extend_from_slice(b"0\r\nTrailer: 1\r\n\r\nNEXT");
            prop_assert_eq!(decode(&wire, cut), Ok(Some((chunks.concat(), 4))));
        }

        #[test]
        fn no_input_panics(wire in prop::collection::vec(any::<u8>(), 0..200), cut in 1_usize..9) {
            let _ = decode(&wire, cut);
        }
    }

    #[test]
    fn invalid_sizes_and_line_ends_are_refused() {
        assert_eq!(decode(b"\r\n", 9), Err(ChunkError::Size));
        assert_eq!(decode(b"-1\r\n", 9), Err(ChunkError::Size));
        assert_eq!(decode(b"1000000000000000\r\n", 99), Err(ChunkError::Size));
        assert_eq!(decode(b"1\r\nabc", 9), Err(ChunkError::LineEnd));
    }

    #[test]
    fn endless_trailers_and_extensions_are_refused() {
        let trailers = [b"0\r\n".as_slice(), &b"a: b\r\n".repeat(400)].concat();
        assert_eq!(decode(&trailers, 64), Err(ChunkError::TooLong));
        let extension = [b"1;".as_slice(), &[b'x'; 2000]].concat();
        assert_eq!(decode(&extension, 64), Err(ChunkError::TooLong));
    }
}
