//! Extents: the positions of the parts of memory and of the layer that a diff contains. The diff's memory and layer
//! files store these parts one after another; a third file, described here, lists their positions. Holes in the files
//! have no meaning, because copying can add or remove them.
//!
//! ```text
//! offset 0  magic "CUBEDIFF"                       8 bytes
//!        8  format of the template, little-endian  4 bytes
//!       12  zero                                   4 bytes
//!       16  extents of the memory, LE              8 bytes
//!       24  extents of the layer, LE               8 bytes
//!       32  SHA-256 of what follows               32 bytes
//!       64  pairs (offset, bytes) of LE u64: the memory's, then the layer's
//! ```
//! Invariant: every extent lies within the base (its length rounded up to a page), and no two overlap.

use sha2::{Digest, Sha256};

use crate::memory::PAGE;

const MAGIC: [u8; 8] = *b"CUBEDIFF";
const HEADER: usize = 64;
const PAIR: usize = 16;
/// Limit on extents per list: enough for 8 GiB of memory, or of a disk, in which every other page differs.
pub const MAX_EXTENTS: usize = 2 << 20;
/// Longest file with two lists, in bytes.
pub const MAX_FILE: u64 = (HEADER + 2 * MAX_EXTENTS * PAIR) as u64;

/// A run of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Offset in the memory or disk.
    pub at: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Offset in the diff's file.
    pub stored: u64,
}

/// Runs of whole pages in ascending order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extents {
    list: Vec<Extent>,
}

/// Source of a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The diff contains the byte.
    Here {
        /// Offset of the byte in the diff's file.
        stored: u64,
        /// End of the extent, as an offset in the memory or disk.
        end: u64,
    },
    /// The diff does not contain the byte.
    Elsewhere {
        /// Start of the next extent; `u64::MAX` if none follows.
        end: u64,
    },
}

/// Reasons why bytes are not a valid list of extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExtentsError {
    #[error("it is not a list of extents")]
    Magic,
    #[error("it has format {0}")]
    Format(u32),
    /// The counts in the header do not match the length.
    #[error("its length does not match its header")]
    Length,
    #[error("it has {0} extents: the limit is {MAX_EXTENTS}")]
    TooMany(u64),
    #[error("its SHA-256 differs from the one in its header")]
    Sum,
    #[error(
        "its extent of {bytes} bytes at {at:#x} is empty, not page-aligned, out of order or out of range"
    )]
    Extent {
        /// Offset of the extent.
        at: u64,
        /// Length of the extent.
        bytes: u64,
    },
}

impl Extents {
    /// Checks ranges (offset, bytes): whole pages in ascending order, without overlap, and below `limit` rounded up to
    /// a page.
    ///
    /// # Errors
    /// Returns [`ExtentsError::Extent`] for the first invalid range, and [`ExtentsError::TooMany`] if there are more
    /// than [`MAX_EXTENTS`].
    pub fn new(
        ranges: impl IntoIterator<Item = (u64, u64)>,
        limit: u64,
    ) -> Result<Self, ExtentsError> {
        let limit = limit.next_multiple_of(PAGE);
        let mut this = Self::default();
        let mut free_from = 0;
        for (at, bytes) in ranges {
            let whole = bytes > 0 && at.is_multiple_of(PAGE) && bytes.is_multiple_of(PAGE);
            let end = at.checked_add(bytes).filter(|end| *end <= limit);
            let end = end.filter(|_| whole && at >= free_from);
            free_from = end.ok_or(ExtentsError::Extent { at, bytes })?;
            this.push(at, bytes);
        }
        match this.list.len() {
            0..=MAX_EXTENTS => Ok(this),
            n => Err(ExtentsError::TooMany(n as u64)),
        }
    }

    /// Appends a run of pages, which must lie above all pages appended earlier.
    pub fn push(&mut self, at: u64, bytes: u64) {
        let stored = self.bytes();
        match self.list.last_mut() {
            Some(last) if last.at + last.bytes == at => last.bytes += bytes,
            _ => self.list.push(Extent { at, bytes, stored }),
        }
    }

    /// Length in bytes of the file that stores the pages.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.list.last().map_or(0, |last| last.stored + last.bytes)
    }

    /// Number of extents.
    #[must_use]
    pub fn len(&self) -> usize {
        self.list.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The extents in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = &Extent> {
        self.list.iter()
    }

    /// The source of the byte at offset `at`.
    #[must_use]
    pub fn find(&self, at: u64) -> Found {
        let first = self.list.partition_point(|e| e.at + e.bytes <= at);
        match self.list.get(first) {
            Some(e) if e.at <= at => Found::Here {
                stored: e.stored + (at - e.at),
                end: e.at + e.bytes,
            },
            Some(e) => Found::Elsewhere { end: e.at },
            None => Found::Elsewhere { end: u64::MAX },
        }
    }
}

/// Encodes two lists as a file.
///
/// # Errors
/// Returns [`ExtentsError::TooMany`] if a list is longer than [`decode`] accepts.
pub fn encode(format: u32, memory: &Extents, layer: &Extents) -> Result<Vec<u8>, ExtentsError> {
    for extents in [memory, layer] {
        if extents.len() > MAX_EXTENTS {
            return Err(ExtentsError::TooMany(extents.len() as u64));
        }
    }
    let mut pairs = Vec::with_capacity((memory.len() + layer.len()) * PAIR);
    for e in memory.iter().chain(layer.iter()) {
        pairs.extend(e.at.to_le_bytes());
        pairs.extend(e.bytes.to_le_bytes());
    }
    let mut bytes = Vec::with_capacity(HEADER + pairs.len());
    bytes.extend(MAGIC);
    bytes.extend(format.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend((memory.len() as u64).to_le_bytes());
    bytes.extend((layer.len() as u64).to_le_bytes());
    bytes.extend(Sha256::digest(&pairs));
    bytes.extend(pairs);
    Ok(bytes)
}

/// Decodes a file with two lists. `memory` and `layer` are the lengths in bytes of the base's memory and layer.
///
/// # Errors
/// Returns [`ExtentsError`] for the first check that fails.
pub fn decode(
    bytes: &[u8],
    format: u32,
    (memory, layer): (u64, u64),
) -> Result<(Extents, Extents), ExtentsError> {
    let (header, pairs) = bytes
        .split_first_chunk::<HEADER>()
        .ok_or(ExtentsError::Length)?;
    if !header.starts_with(&MAGIC) {
        return Err(ExtentsError::Magic);
    }
    let [.., f0, f1, f2, f3, _, _, _, _] = header[..16] else {
        return Err(ExtentsError::Length);
    };
    let found = u32::from_le_bytes([f0, f1, f2, f3]);
    if found != format {
        return Err(ExtentsError::Format(found));
    }
    let count = |at: usize| {
        let n = header[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
        usize::try_from(n)
            .ok()
            .filter(|n| *n <= MAX_EXTENTS)
            .ok_or(ExtentsError::TooMany(n))
    };
    let (of_memory, of_layer) = (count(16)?, count(24)?);
    if pairs.len() != (of_memory + of_layer) * PAIR {
        return Err(ExtentsError::Length);
    }
    if Sha256::digest(pairs)[..] != header[32..] {
        return Err(ExtentsError::Sum);
    }
    let (of_memory, of_layer) = pairs.split_at(of_memory * PAIR);
    Ok((
        Extents::new(ranges(of_memory), memory)?,
        Extents::new(ranges(of_layer), layer)?,
    ))
}

fn ranges(pairs: &[u8]) -> impl Iterator<Item = (u64, u64)> {
    let number = |b: &[u8]| b.try_into().map_or(0, u64::from_le_bytes);
    pairs.chunks_exact(PAIR).map(move |pair| {
        let (at, bytes) = pair.split_at(PAIR / 2);
        (number(at), number(bytes))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMIT: u64 = 1000 * PAGE;

    /// Extents inside [`LIMIT`], made from random gaps and lengths in pages.
    fn any_extents() -> impl Strategy<Value = Extents> {
        proptest::collection::vec((0..9_u64, 1..5_u64), 0..60).prop_map(|steps| {
            let mut at = 0;
            let ranges = steps.into_iter().map(move |(gap, pages)| {
                let start = at + gap;
                at = start + pages;
                (start * PAGE, pages * PAGE)
            });
            Extents::new(ranges, LIMIT).unwrap()
        })
    }

    proptest! {
        #[test]
        fn encoded_lists_decode_unchanged(memory in any_extents(), layer in any_extents()) {
            let bytes = encode(7, &memory, &layer).unwrap();
            let (m, l) = decode(&bytes, 7, (LIMIT, LIMIT)).unwrap();
            prop_assert_eq!((m, l), (memory, layer));
            prop_assert_eq!(decode(&bytes, 8, (LIMIT, LIMIT)), Err(ExtentsError::Format(7)));
        }

        #[test]
        fn a_byte_is_found_in_its_extent(extents in any_extents(), at in 0..LIMIT) {
            let holder = extents.iter().find(|e| (e.at..e.at + e.bytes).contains(&at));
            match (extents.find(at), holder) {
                (Found::Here { stored, end }, Some(e)) => {
                    prop_assert_eq!(stored, e.stored + at - e.at);
                    prop_assert_eq!(end, e.at + e.bytes);
                }
                (Found::Elsewhere { end }, None) => {
                    let next = extents.iter().map(|e| e.at).find(|start| *start > at);
                    prop_assert_eq!(end, next.unwrap_or(u64::MAX));
                }
                other => prop_assert!(false, "{:?}", other),
            }
        }

        #[test]
        fn accepted_extents_lie_in_range_and_do_not_overlap(
            pairs in proptest::collection::vec((0..1100_u64, 0..40_u64), 0..4),
            odd in 0..3_u64,
        ) {
            let pairs = pairs.iter().map(|(at, n)| (at * PAGE + odd / 2, n * PAGE + odd % 2));
            if let Ok(extents) = Extents::new(pairs, LIMIT) {
                let mut end = 0;
                for e in extents.iter() {
                    prop_assert!(e.at >= end && e.bytes > 0);
                    prop_assert!(e.at % PAGE == 0 && e.bytes % PAGE == 0);
                    end = e.at + e.bytes;
                }
                prop_assert!(end <= LIMIT);
            }
        }

        #[test]
        fn a_changed_bit_is_detected(extents in any_extents(), at: prop::sample::Index, bit in 0..8_u32) {
            let mut bytes = encode(7, &extents, &extents).unwrap();
            let at = at.index(bytes.len());
            // Four bytes of the header are unused.
            prop_assume!(!(12..16).contains(&at));
            bytes[at] ^= 1 << bit;
            prop_assert!(decode(&bytes, 7, (LIMIT, LIMIT)).is_err());
        }
    }

    #[test]
    fn impossible_extents_are_refused() {
        let page = PAGE;
        for bad in [
            vec![(0, 0)],
            vec![(1, page)],
            vec![(0, page - 1)],
            vec![(LIMIT, page)],
            vec![(u64::MAX - page + 1, page)],
            vec![(page, page), (0, page)],
            vec![(0, 2 * page), (page, page)],
        ] {
            let refused = Extents::new(bad.clone(), LIMIT);
            assert!(
                matches!(refused, Err(ExtentsError::Extent { .. })),
                "{bad:?}"
            );
        }
    }
}
