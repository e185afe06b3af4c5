//! Diffs: which pages of a VM differ from those of its base, and how a clone gets both.

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

/// Most runs of a diff that are mapped. Each may cut a mapping in two; a process may have 65530
/// (`vm.max_map_count`).
const MAX_MAPPED: usize = 20_000;
/// Runs of a diff up to this length are read rather than mapped: a mapping costs as much as copying a few
/// pages, again at the first touch of each page, and again when the process ends.
pub(super) const LONGEST_READ: u64 = 16 * PAGE;
/// Most bytes that are read for that reason: what is copied is this clone's alone.
pub(super) const MAX_READ: u64 = 4 << 20;

impl Memory {
    /// Writes the pages that differ from the base's, one after another; says where they belong. They are
    /// looked for among those that are this process's own or were laid over the base. `words` (offset, value) are to be in the file in place of what is in memory.
    ///
    /// # Errors
    /// The files'.
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

    /// Private ranges, those of the diff below, and the pages of `words`.
    fn ranges_with(&self, words: &[(u64, u64)]) -> io::Result<Vec<(u64, u64)>> {
        let mut ranges = self.private_ranges()?;
        ranges.extend(self.laid_over.iter().map(|e| (e.at, e.bytes)));
        let pages = words.iter().map(|(at, _)| (at - at % PAGE, PAGE));
        ranges.extend(pages.filter(|(page, _)| *page < self.bytes()));
        Ok(united(ranges))
    }

    /// Lays the pages of a diff over what is there, for a VM that is not made yet. Long runs are mapped, so
    /// that what a clone only reads is the host's page cache; short ones are read, which is faster
    /// (see [`LONGEST_READ`]), and more of them if there are more runs than a process may have mappings.
    ///
    /// # Errors
    /// The file is shorter than the extents say, or the host refuses.
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

/// The length in bytes from which on runs are mapped; see [`MAX_READ`], [`MAX_MAPPED`].
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

/// Puts those words into `bytes`, a copy of what is at `start`, that lie in it.
pub(super) fn put_words(bytes: &mut [u8], start: u64, words: &[(u64, u64)]) {
    for (at, word) in words {
        let offset = at.checked_sub(start).and_then(|n| usize::try_from(n).ok());
        if let Some(place) = offset.and_then(|n| bytes.get_mut(n..n.checked_add(8)?)) {
            place.copy_from_slice(&word.to_le_bytes());
        }
    }
}
