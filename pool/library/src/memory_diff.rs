//! Stores the memory of a template as a diff against the memory of another template. Pages are compared by content,
//! because two boots of a kernel leave most pages with equal content at different addresses.
//!
//! ```text
//! memory.diff:
//! offset 0  magic "CUBEMEMD"                             8 bytes
//!        8  version, little-endian                       4 bytes
//!       12  zero                                         4 bytes
//!       16  length of the memory file, LE                8 bytes
//!       24  bytes of its huge pages with data, LE        8 bytes
//!       32  SHA-256 of the base's manifest, or zeros    32 bytes
//!       64  SHA-256 of bytes 0 to 63                    32 bytes
//!       96  chunks, each of 4 MiB of memory that is not all zero, in ascending order:
//!             number, length, deflated length, LE        4 bytes each
//!             SHA-256 of the deflated content           32 bytes
//!             deflated content
//! content of a chunk:
//!        source of each page, LE u32                     0: zeros, 1: stored, n: page n - 2 of the base
//!        the stored pages
//! ```
//! Invariant: nothing is inflated before its sum was compared, and no length is used before it was compared with a limit.

use std::{
    collections::HashMap,
    io::{self, Read, Write},
};

use flate2::{Compression, read::DeflateDecoder, write::DeflateEncoder};
use sha2::{Digest, Sha256};

/// Name of the file, next to the template's manifest.
pub const NAME: &str = "memory.diff";
pub const PAGE: usize = 4096;
const CHUNK_PAGES: u32 = 1024;
/// Memory of a chunk, in bytes. The last chunk may be shorter.
pub const CHUNK: usize = CHUNK_PAGES as usize * PAGE;

const MAGIC: [u8; 8] = *b"CUBEMEMD";
const VERSION: u32 = 1;
const HEADER: usize = 96;
const SUMMED: usize = 64;
const SOURCE: usize = 4;
const MAX_CONTENT: usize = CHUNK + CHUNK_PAGES as usize * SOURCE;
/// Deflate adds five bytes to each incompressible block of 64 KiB.
const MAX_DEFLATED: usize = MAX_CONTENT + (MAX_CONTENT >> 8);
const CHUNK_HEADER: usize = 44;

const ZEROS: u32 = 0;
const STORED: u32 = 1;
const FIRST: u32 = 2;

/// The header of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Length of the memory file in bytes.
    pub length: u64,
    /// Memory in bytes that the loaded template occupies.
    pub loaded_bytes: u64,
    /// SHA-256 of the base's manifest. `None` if the diff uses no page of a base.
    pub base: Option<[u8; 32]>,
}

impl Header {
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(HEADER);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(self.length.to_le_bytes());
        bytes.extend(self.loaded_bytes.to_le_bytes());
        bytes.extend(self.base.unwrap_or_default());
        let sum = Sha256::digest(&bytes);
        bytes.extend(sum);
        to.write_all(&bytes)
    }

    /// # Errors
    /// Returns an error if the header is incomplete or damaged, or has another version.
    pub fn read(from: &mut impl Read) -> io::Result<Self> {
        let mut bytes = [0; HEADER];
        from.read_exact(&mut bytes)?;
        let (summed, sum) = bytes.split_at(SUMMED);
        let (magic, fields) = summed.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(io::Error::other("it is not a diff of memory"));
        }
        let version = le32(&fields[..4]);
        if version != VERSION {
            return Err(io::Error::other(format!(
                "it has version {version}, but this program reads version {VERSION}: start the release that wrote it"
            )));
        }
        if Sha256::digest(summed)[..] != *sum {
            return Err(io::Error::other("its header is damaged"));
        }
        let mut base = [0; 32];
        base.copy_from_slice(&fields[24..]);
        Ok(Self {
            length: le64(&fields[8..16]),
            loaded_bytes: le64(&fields[16..24]),
            base: (base != [0; 32]).then_some(base),
        })
    }
}

fn le32(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |n, b| (n << 8) | u32::from(*b))
}

fn le64(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |n, b| (n << 8) | u64::from(*b))
}

/// The pages of a base, by content.
#[derive(Debug, Default)]
pub struct BasePages(HashMap<[u8; 16], u32>);

impl BasePages {
    /// Adds the pages of a chunk of the base's memory. `chunk` is its number.
    pub fn add(&mut self, chunk: u32, memory: &[u8]) {
        let first = chunk.saturating_mul(CHUNK_PAGES);
        for (page, number) in memory.chunks_exact(PAGE).zip(first..) {
            if !is_zero(page) {
                self.0.entry(key(page)).or_insert(number);
            }
        }
    }

    fn source(&self, page: &[u8]) -> u32 {
        if is_zero(page) {
            return ZEROS;
        }
        let found = self.0.get(&key(page));
        found.map_or(STORED, |number| number.saturating_add(FIRST))
    }
}

/// Whether this part of a chunk is all zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    static NOTHING: [u8; CHUNK] = [0; CHUNK];
    bytes == &NOTHING[..bytes.len()]
}

/// A prefix of the page's SHA-256. A guest cannot construct another page with the same prefix.
fn key(page: &[u8]) -> [u8; 16] {
    let mut key = [0; 16];
    key.copy_from_slice(&Sha256::digest(page)[..16]);
    key
}

/// Counts of pages that are not zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pages {
    pub of_base: u64,
    pub stored: u64,
}

/// Writes the chunk with this number, unless it is all zero.
pub fn write_chunk(
    number: u32,
    memory: &[u8],
    base: &BasePages,
    to: &mut impl Write,
) -> io::Result<Pages> {
    let mut pages = Pages::default();
    let mut content = Vec::with_capacity(MAX_CONTENT);
    let mut stored = Vec::new();
    for page in memory.chunks_exact(PAGE) {
        let source = base.source(page);
        content.extend(source.to_le_bytes());
        match source {
            ZEROS => {}
            STORED => {
                stored.extend_from_slice(page);
                pages.stored += 1;
            }
            _ => pages.of_base += 1,
        }
    }
    if pages == Pages::default() {
        return Ok(pages);
    }
    content.append(&mut stored);
    let mut deflate = DeflateEncoder::new(Vec::new(), Compression::fast());
    deflate.write_all(&content)?;
    let deflated = deflate.finish()?;
    let length = |bytes: &[u8]| u32::try_from(bytes.len()).map_err(io::Error::other);
    for field in [number, length(&content)?, length(&deflated)?] {
        to.write_all(&field.to_le_bytes())?;
    }
    to.write_all(&Sha256::digest(&deflated))?;
    to.write_all(&deflated)?;
    Ok(pages)
}

/// Reads the next chunk: its number and its content. `None` at the end.
///
/// # Errors
/// Returns an error if the chunk is truncated or damaged.
pub fn read_chunk(from: &mut impl Read) -> io::Result<Option<(u32, Vec<u8>)>> {
    let mut header = Vec::with_capacity(CHUNK_HEADER);
    from.by_ref()
        .take(CHUNK_HEADER as u64)
        .read_to_end(&mut header)?;
    if header.is_empty() {
        return Ok(None);
    }
    if header.len() < CHUNK_HEADER {
        return Err(io::Error::other("it is truncated"));
    }
    let (fields, sum) = header.split_at(12);
    let number = le32(&fields[..4]);
    let limited = |field: &[u8], limit| {
        let length = usize::try_from(le32(field)).unwrap_or(usize::MAX);
        let fits = (length <= limit).then_some(length);
        fits.ok_or_else(|| damaged(number))
    };
    let length = limited(&fields[4..8], MAX_CONTENT)?;
    let mut deflated = vec![0; limited(&fields[8..], MAX_DEFLATED)?];
    from.read_exact(&mut deflated)?;
    if Sha256::digest(&deflated)[..] != *sum {
        return Err(damaged(number));
    }
    let mut content = vec![0; length];
    let mut inflate = DeflateDecoder::new(deflated.as_slice());
    inflate.read_exact(&mut content)?;
    match inflate.read(&mut [0])? {
        0 => Ok(Some((number, content))),
        _ => Err(damaged(number)),
    }
}

fn damaged(chunk: u32) -> io::Error {
    io::Error::other(format!("its chunk {chunk} is damaged"))
}

/// Makes the memory of a chunk from its content. `memory` must be zeroed. `base` reads pages of the base, starting at
/// the given number.
///
/// # Errors
/// Returns an error if the content does not fit the memory, and the errors of `base`.
pub fn unpack(
    content: &[u8],
    memory: &mut [u8],
    mut base: impl FnMut(u32, &mut [u8]) -> io::Result<()>,
) -> io::Result<()> {
    let short = || io::Error::other("a chunk does not fit the memory");
    let pages = memory.len() / PAGE;
    let (sources, mut stored) = content.split_at_checked(pages * SOURCE).ok_or_else(short)?;
    let sources: Vec<_> = sources.chunks_exact(SOURCE).map(le32).collect();
    let mut at = 0;
    while at < pages {
        let first = sources[at];
        let follows = |n: usize, source: u32| match first {
            ZEROS | STORED => source == first,
            _ => u64::from(source) == u64::from(first) + n as u64,
        };
        let run = sources[at..]
            .iter()
            .enumerate()
            .take_while(|(n, source)| follows(*n, **source))
            .count();
        let target = &mut memory[at * PAGE..(at + run) * PAGE];
        match first {
            ZEROS => {}
            STORED => {
                let (taken, rest) = stored.split_at_checked(target.len()).ok_or_else(short)?;
                target.copy_from_slice(taken);
                stored = rest;
            }
            page => base(page - FIRST, target)?,
        }
        at += run;
    }
    if stored.is_empty() {
        Ok(())
    } else {
        Err(short())
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    fn page(kind: u8) -> [u8; PAGE] {
        let mut page = [0; PAGE];
        if kind > 0 {
            page[usize::from(kind)] = kind;
            page[PAGE - 1] = 0xff;
        }
        page
    }

    fn memory(kinds: &[u8]) -> Vec<u8> {
        kinds.iter().flat_map(|kind| page(*kind)).collect()
    }

    /// Writes memory as a diff, and reads it back.
    fn round_trip(base: &[u8], whole: &[u8]) -> (Vec<u8>, Pages) {
        let mut pages = BasePages::default();
        pages.add(0, base);
        let mut diff = Vec::new();
        let written = write_chunk(7, whole, &pages, &mut diff).unwrap();
        let mut again = vec![0; whole.len()];
        let mut from = diff.as_slice();
        while let Some((number, content)) = read_chunk(&mut from).unwrap() {
            assert_eq!(number, 7);
            unpack(&content, &mut again, of(base)).unwrap();
        }
        assert!(again == whole);
        (diff, written)
    }

    fn of(base: &[u8]) -> impl FnMut(u32, &mut [u8]) -> io::Result<()> {
        |number, to| {
            let at = usize::try_from(number).unwrap() * PAGE;
            let from = base
                .get(at..at + to.len())
                .ok_or(io::ErrorKind::UnexpectedEof)?;
            to.copy_from_slice(from);
            Ok(())
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn memory_is_the_same_after_a_diff_and_only_new_pages_are_stored(
            base in vec(0..6_u8, 0..40),
            whole in vec(0..9_u8, 0..60),
        ) {
            let (_, pages) = round_trip(&memory(&base), &memory(&whole));
            let count = |in_base| {
                let counted = whole.iter().filter(|k| **k > 0 && base.contains(k) == in_base);
                counted.count() as u64
            };
            prop_assert_eq!(pages, Pages { of_base: count(true), stored: count(false) });
        }

        #[test]
        fn a_damaged_diff_is_refused(at in 0_usize..10_000, bit in 0..8_u32, cut in any::<bool>()) {
            let base = memory(&[1, 2, 3]);
            let (mut diff, _) = round_trip(&base, &memory(&[9, 0, 2, 3, 8, 1]));
            let at = at % diff.len();
            if cut {
                diff.truncate(at.max(1));
            } else {
                diff[at] ^= 1 << bit;
            }
            let mut again = vec![0; 6 * PAGE];
            // A changed chunk number is detected by the checksum of the whole memory, or because the chunks are out of
            // order.
            if let Ok(Some((7, content))) = read_chunk(&mut diff.as_slice()) {
                prop_assert!(unpack(&content, &mut again, of(&base)).is_err());
            }
        }

        #[test]
        fn any_content_fits_or_is_refused(content in vec(any::<u8>(), 0..3 * PAGE), pages in 0..4_usize) {
            let _ = unpack(&content, &mut vec![0; pages * PAGE], of(&memory(&[1, 2])));
            let _ = read_chunk(&mut content.as_slice());
            prop_assert!(Header::read(&mut content.as_slice()).is_err());
        }
    }

    #[test]
    fn memory_without_a_base_is_stored_and_zeros_are_not() {
        assert!(round_trip(&[], &memory(&[0, 0, 0])).0.is_empty());
        let (diff, pages) = round_trip(&[], &memory(&[1, 1, 0]));
        assert_eq!((pages.of_base, pages.stored), (0, 2));
        assert!(diff.len() < PAGE, "it is deflated");
    }

    #[test]
    fn a_header_is_the_same_after_it_was_written_and_any_other_is_refused() {
        for base in [None, Some([3; 32])] {
            let header = Header {
                length: 1 << 33,
                loaded_bytes: 7,
                base,
            };
            let mut bytes = Vec::new();
            header.write(&mut bytes).unwrap();
            assert_eq!(Header::read(&mut bytes.as_slice()).unwrap(), header);
            for at in 0..HEADER {
                let mut other = bytes.clone();
                other[at] ^= 1;
                assert!(Header::read(&mut other.as_slice()).is_err(), "{at}");
            }
            assert!(Header::read(&mut &bytes[..HEADER - 1]).is_err());
        }
    }
}
