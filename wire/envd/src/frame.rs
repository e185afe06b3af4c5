//! Connect's envelope around each message of a stream. Performs no I/O.
//!
//! ```text
//! offset 0  flags                  1 byte: 0x01 compressed, 0x02 end of stream
//!        1  body length, BE        4 bytes
//!        5  body
//! ```
//! The length is checked against the reader's limit before memory is allocated.

/// Length of the envelope in bytes.
pub const HEADER: usize = 5;
/// Flag of the last frame of a stream.
pub const END_STREAM: u8 = 0x02;
/// Flag of a compressed body. This implementation neither sends nor accepts compressed bodies.
pub const COMPRESSED: u8 = 0x01;

/// One complete frame, borrowed from the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    pub flags: u8,
    pub body: &'a [u8],
}

/// Why a frame is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The body exceeds the limit.
    #[error("frame of {len} bytes exceeds the limit of {limit} bytes")]
    TooLong {
        /// Length in the envelope.
        len: u32,
        /// The reader's limit.
        limit: u32,
    },
    /// The frame has a flag other than [`END_STREAM`].
    #[error("unsupported frame flags {0:#04x}")]
    Flags(u8),
}

/// The envelope for a body of `len` bytes.
#[must_use]
pub fn header(flags: u8, len: u32) -> [u8; HEADER] {
    let [a, b, c, d] = len.to_be_bytes();
    [flags, a, b, c, d]
}

/// Appends one frame to `out`.
///
/// # Errors
/// Returns [`FrameError::TooLong`] if the body exceeds `u32::MAX` bytes.
pub fn encode(flags: u8, body: &[u8], out: &mut Vec<u8>) -> Result<(), FrameError> {
    let len = u32::try_from(body.len()).map_err(|_| FrameError::TooLong {
        len: u32::MAX,
        limit: u32::MAX,
    })?;
    out.extend_from_slice(&header(flags, len));
    out.extend_from_slice(body);
    Ok(())
}

/// Decodes the first frame of `bytes`. Returns the frame and its length including the envelope, or `None` if more input
/// is needed.
///
/// # Errors
/// Returns [`FrameError::TooLong`] if the body exceeds `limit`, and [`FrameError::Flags`] for unsupported flags. Both
/// are detected as soon as the envelope is complete.
pub fn decode(bytes: &[u8], limit: u32) -> Result<Option<(Frame<'_>, usize)>, FrameError> {
    let Some(([flags, a, b, c, d], rest)) = bytes.split_first_chunk::<HEADER>() else {
        return Ok(None);
    };
    if flags & !END_STREAM != 0 {
        return Err(FrameError::Flags(*flags));
    }
    let len = u32::from_be_bytes([*a, *b, *c, *d]);
    if len > limit {
        return Err(FrameError::TooLong { len, limit });
    }
    let size = usize::try_from(len).unwrap_or(usize::MAX);
    let frame = rest.get(..size).map(|body| {
        let flags = *flags;
        (Frame { flags, body }, HEADER + size)
    });
    Ok(frame)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frames_are_decoded_independently_of_how_the_input_is_split(
            bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..8),
            cut in 1_usize..64,
        ) {
            let mut wire = Vec::new();
            for body in &bodies {
                encode(0, body, &mut wire).unwrap();
            }
            let (mut seen, mut held) = (Vec::new(), Vec::new());
            for piece in wire.chunks(cut) {
                held.extend_from_slice(piece);
                while let Some((frame, used)) = decode(&held, 1 << 20).unwrap() {
                    seen.push(frame.body.to_vec());
                    held.drain(..used);
                }
            }
            prop_assert!(held.is_empty());
            prop_assert_eq!(seen, bodies);
        }

        #[test]
        fn no_input_panics(bytes in prop::collection::vec(any::<u8>(), 0..64), limit: u32) {
            if let Ok(Some((frame, used))) = decode(&bytes, limit) {
                prop_assert_eq!(used, frame.body.len() + HEADER);
                prop_assert!(frame.body.len() <= limit as usize);
            }
        }
    }

    #[test]
    fn a_long_frame_is_refused_before_its_body_arrives() {
        let long = header(0, 4097);
        let expected = FrameError::TooLong {
            len: 4097,
            limit: 4096,
        };
        assert_eq!(decode(&long, 4096), Err(expected));
        assert_eq!(decode(&header(0, 4096), 4096), Ok(None));
    }

    #[test]
    fn compression_is_refused() {
        assert_eq!(
            decode(&header(COMPRESSED, 0), 10),
            Err(FrameError::Flags(1))
        );
    }
}
