//! Diffs of memory: finds the pages that differ from the base file, and lays them over the base in a clone.

use std::{
    fs::File,
    io::{self, Write},
    os::unix::fs::FileExt,
    sync::Arc,
};

use super::guest_memory::Memory;
use super::pages::{PAGE, PAGE_BYTES, united};
use crate::{
    extents::{Extent, Extents},
    sys,
};

/// Limit on the number of mapped runs. Each mapped run can add two mappings, and a process may have 65530
/// (`vm.max_map_count`).
const MAX_MAPPED: usize = 20_000;
/// Length in bytes of the longest run that is copied rather than mapped. Setting up a mapping costs as much as copying
/// a few pages; each first access to a page and the process's exit add to that.
pub(super) const LONGEST_READ: u64 = 16 * PAGE;
/// Limit on the total bytes of short runs that are copied (see [`LONGEST_READ`]): copied pages are private to the
/// clone. [`MAX_MAPPED`] takes precedence over this limit.
pub(super) const MAX_READ: u64 = 4 << 20;

impl Memory {
    /// Compares memory with `base`, writes the differing pages consecutively to `target`, and returns their positions.
    /// Compares only private pages, pages of an earlier diff and pages of `words`. `words` are (offset, value) pairs;
    /// each value replaces the eight bytes of memory at its offset before the comparison.
    ///
    /// # Errors
    /// Returns an error if memory, `base` or /proc/self/pagemap cannot be read, or `target` cannot be written.
    pub fn save_diff(
        &self,
        base: &File,
        words: &[(u64, u64)],
        target: &mut dyn Write,
    ) -> io::Result<Extents> {
        const CHUNK: u64 = 64 << 10;
        let mut extents = Extents::default();
        let (mut mine, mut theirs) = (vec![0; 64 << 10], vec![0; 64 << 10]);
        for (start, bytes) in self.ranges_with(words)? {
            for at in (start..start + bytes).step_by(64 << 10) {
                let n = usize::try_from((start + bytes - at).min(CHUNK)).unwrap_or(0);
                self.read(at, &mut mine[..n])?;
                put_words(&mut mine[..n], at, words);
                base.read_exact_at(&mut theirs[..n], at)?;
                let pages = mine[..n].chunks(PAGE_BYTES).zip(theirs.chunks(PAGE_BYTES));
                for (i, (page, theirs)) in pages.enumerate() {
                    if page != theirs {
                        target.write_all(page)?;
                        extents.push(at + i as u64 * PAGE, PAGE);
                    }
                }
            }
        }
        Ok(extents)
    }

    /// The ranges of pages that can differ from the base: private pages, pages of an earlier diff, and the pages of
    /// `words`.
    fn ranges_with(&self, words: &[(u64, u64)]) -> io::Result<Vec<(u64, u64)>> {
        let mut ranges = self.private_ranges()?;
        ranges.extend(self.laid_over.iter().map(|e| (e.at, e.bytes)));
        let pages = words.iter().map(|(at, _)| (at - at % PAGE, PAGE));
        ranges.extend(pages.filter(|(page, _)| *page < self.bytes()));
        Ok(united(ranges))
    }

    /// Lays the pages of a diff over the base. Must be called before the VM is created. Long runs are mapped, so that
    /// pages that the clone only reads stay in the host's page cache. Short runs are copied, which is faster (see
    /// [`LONGEST_READ`]). Beyond [`MAX_MAPPED`] long runs, the shortest of them are copied as well.
    ///
    /// # Errors
    /// Returns [`io::ErrorKind::UnexpectedEof`] if the file is shorter than `extents` requires, and other errors if it
    /// cannot be read or mapped.
    pub fn lay_over(&mut self, file: &File, extents: Extents) -> io::Result<()> {
        if sys::length(file)? < extents.bytes() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let shortest = shortest_mapped(&extents);
        let mut buffer = Vec::new();
        for extent in extents.iter() {
            let n = usize::try_from(extent.bytes).map_err(io::Error::other)?;
            if extent.bytes >= shortest {
                self.map_over(file, extent)?;
            } else {
                buffer.resize(n, 0);
                file.read_exact_at(&mut buffer, extent.stored)?;
                self.write(extent.at, &buffer)?;
            }
        }
        self.laid_over = Arc::new(extents);
        Ok(())
    }

    fn map_over(&self, file: &File, extent: &Extent) -> io::Result<()> {
        for (at, n, part) in self.pieces(extent.at, extent.bytes) {
            let from = extent.stored + (at - extent.at);
            let offset = usize::try_from(at - part.offset).map_err(io::Error::other)?;
            let n = usize::try_from(n).map_err(io::Error::other)?;
            sys::map_over(&part.region, offset, n, (file, from.cast_signed()))?;
        }
        Ok(())
    }
}

/// Minimum length, in bytes, of a run that is mapped rather than copied, given [`LONGEST_READ`], [`MAX_READ`] and
/// [`MAX_MAPPED`].
pub(super) fn shortest_mapped(extents: &Extents) -> u64 {
    let mut lengths: Vec<u64> = extents.iter().map(|e| e.bytes).collect();
    lengths.sort_unstable();
    let mut read = 0;
    let too_much = lengths.iter().find(|bytes| {
        read += **bytes;
        read > MAX_READ || **bytes > LONGEST_READ
    });
    let cheap = too_much.map_or(LONGEST_READ + PAGE, |bytes| *bytes);
    let demanded = lengths.len().checked_sub(MAX_MAPPED + 1);
    cheap.max(demanded.map_or(PAGE, |last| lengths[last] + PAGE))
}

/// Applies `words` to `bytes`, a copy of memory from offset `start`. Skips words not wholly inside `bytes`.
pub(super) fn put_words(bytes: &mut [u8], start: u64, words: &[(u64, u64)]) {
    for (at, word) in words {
        let offset = at.checked_sub(start).and_then(|n| usize::try_from(n).ok());
        if let Some(place) = offset.and_then(|n| bytes.get_mut(n..n.checked_add(8)?)) {
            place.copy_from_slice(&word.to_le_bytes());
        }
    }
}
