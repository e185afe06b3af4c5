//! The pages that a clone has touched: measured in /proc/self/pagemap, and recorded in a template's `working-set` file.

use std::{fs::File, io, os::unix::fs::FileExt};

use vm_memory::{GuestMemoryRegion, MmapRegion};

use super::guest_memory::{Memory, Part};
use super::pages::{PAGE, Ranges, WorkingSet, extend, united};
use crate::{confine, sys};

/// Granularity of the touched blocks in a working set, in bytes.
pub(super) const BLOCK: u64 = 2 << 20;
/// Longest working-set file in bytes: each second page of the largest VM as a separate range.
const MAX_LIST: usize = 32 << 20;
/// Separates the private pages from the touched blocks in a working-set file. No page has this position.
const SECOND_LIST: (u64, u64) = (u64::MAX, u64::MAX);

impl Memory {
    /// The pages that are private to this process: those that are present or swapped out, and not file pages.
    ///
    /// # Errors
    /// Returns an error if /proc/self/pagemap cannot be read.
    pub fn private_ranges(&self) -> io::Result<Ranges> {
        Ok(self.working_set()?.own)
    }

    /// The pages that were touched since the mapping was created, from /proc/self/pagemap.
    ///
    /// # Errors
    /// Returns an error if /proc/self/pagemap cannot be read.
    pub fn working_set(&self) -> io::Result<WorkingSet> {
        let pagemap = confine::pagemap()?;
        let mut set = WorkingSet::default();
        for part in &self.parts {
            part.working_set(pagemap, &mut set)?;
        }
        set.touched = united(set.touched);
        Ok(set)
    }
}

impl Part {
    fn working_set(&self, pagemap: &File, set: &mut WorkingSet) -> io::Result<()> {
        const FILE_PAGE: u64 = 1 << 61;
        const SWAPPED: u64 = 1 << 62;
        const PRESENT: u64 = 1 << 63;
        let mapping: &MmapRegion<()> = &self.region;
        let host = mapping.as_ptr() as u64;
        let pages = self.region.len() / PAGE;
        let mut buffer = vec![0_u8; 8 << 10];
        let mut page = 0;
        while page < pages {
            let n = (pages - page).min(1 << 10);
            let wanted = &mut buffer[..usize::try_from(n * 8).unwrap_or(0)];
            pagemap.read_exact_at(wanted, (host / PAGE + page) * 8)?;
            for (i, word) in wanted.chunks_exact(8).enumerate() {
                let word = u64::from_le_bytes(word.try_into().unwrap_or_default());
                if word & (PRESENT | SWAPPED) == 0 {
                    continue;
                }
                let at = self.offset + (page + i as u64) * PAGE;
                if word & FILE_PAGE == 0 {
                    extend(&mut set.own, at);
                }
                let block = (at - at % BLOCK, BLOCK.min(self.end() - (at - at % BLOCK)));
                if set.touched.last() != Some(&block) {
                    set.touched.push(block);
                }
            }
            page += n;
        }
        Ok(())
    }
}

/// Reads a working-set file: pairs of little-endian u64 (offset, length), each a range of whole pages inside `bytes`;
/// then, after a pair of all ones, the touched blocks. A file that is missing, unreadable or too long gives an empty
/// set. Everything from the first invalid pair on is ignored, because the set only affects speed.
#[must_use]
pub fn read_working_set(file: Option<&File>, bytes: u64) -> WorkingSet {
    let raw = file
        .and_then(|file| read_list(file).ok())
        .unwrap_or_default();
    let mut pairs = raw.chunks_exact(16).map(|pair| {
        let (at, n) = pair.split_at(8);
        let number = |b: &[u8]| u64::from_le_bytes(b.try_into().unwrap_or_default());
        (number(at), number(n))
    });
    let inside = |(at, n): &(u64, u64)| {
        at % PAGE == 0 && n % PAGE == 0 && at.checked_add(*n).is_some_and(|end| end <= bytes)
    };
    let mut own = Ranges::new();
    let mut next = pairs.next();
    while let Some(pair) = next.filter(inside) {
        own.push(pair);
        next = pairs.next();
    }
    let touched = match next {
        Some(SECOND_LIST) => pairs.take_while(inside).collect(),
        _ => Ranges::new(),
    };
    WorkingSet { own, touched }
}

/// Reads the whole file unless it is longer than any VM's working set can be.
fn read_list(file: &File) -> io::Result<Vec<u8>> {
    let bytes = sys::length(file)?;
    let len = usize::try_from(bytes).unwrap_or(usize::MAX);
    if len > MAX_LIST {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut raw = vec![0; len];
    file.read_exact_at(&mut raw, 0)?;
    Ok(raw)
}

/// Writes a working-set file.
///
/// # Errors
/// Returns an error if the file cannot be written.
pub fn write_working_set(file: &File, set: &WorkingSet) -> io::Result<()> {
    let pairs = set.own.iter().chain([&SECOND_LIST]).chain(&set.touched);
    let raw: Vec<u8> = pairs
        .flat_map(|(at, n)| [at.to_le_bytes(), n.to_le_bytes()].concat())
        .collect();
    file.write_all_at(&raw, 0)
}
