//! The memory of one VM.

use std::{fs::File, io, os::unix::fs::FileExt, sync::Arc};

use model::WorkingSetPrefault;
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryRegion, GuestRegionMmap, MmapRegion,
    mmap::MmapRegionError,
};

use super::pages::{Ranges, WorkingSet};
use crate::{devices::Ram, extents::Extents, sys};

/// Why guest memory could not be made.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The mapping failed.
    #[error("cannot map {bytes} bytes of guest memory")]
    Map {
        /// Its length.
        bytes: u64,
        /// The cause.
        #[source]
        source: MmapRegionError,
    },
    /// The mapping does not fit the address space.
    #[error("guest memory of {0} bytes does not fit the address space")]
    Size(u64),
}

/// Guest-physical addresses that have no RAM; what does not fit below lies above.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hole {
    /// Its first byte.
    pub start: u64,
    /// The first byte of the RAM above it.
    pub end: u64,
}

/// The memory of one VM.
#[derive(Debug, Clone)]
pub struct Memory {
    /// All of it by guest-physical address, for reading and writing by copy.
    pub ram: Ram,
    /// In order.
    pub(super) parts: Vec<Part>,
    bytes: u64,
    backing: Backing,
    /// What a diff's file holds of it.
    pub(super) laid_over: Arc<Extents>,
    /// What its VM is expected to touch at once.
    expected: Ranges,
}

#[derive(Debug, Clone)]
pub(super) struct Part {
    /// Where it begins in the row of bytes.
    pub(super) offset: u64,
    pub(super) region: Arc<GuestRegionMmap<()>>,
}

impl Part {
    pub(super) fn end(&self) -> u64 {
        self.offset + self.region.len()
    }
}

/// What a page is that this process never wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Backing {
    Zero,
    File,
}

impl Memory {
    /// Zeroed memory of a VM to boot.
    ///
    /// # Errors
    /// The host refuses the mapping.
    pub fn anonymous(bytes: u64, hole: Option<Hole>) -> Result<Self, MemoryError> {
        Self::map(bytes, hole, None)
    }

    /// The template's memory, copy-on-write.
    ///
    /// # Errors
    /// The host refuses the mapping.
    pub fn private_copy(file: File, bytes: u64, hole: Option<Hole>) -> Result<Self, MemoryError> {
        Self::map(bytes, hole, Some(&Arc::new(file)))
    }

    fn map(bytes: u64, hole: Option<Hole>, file: Option<&Arc<File>>) -> Result<Self, MemoryError> {
        let mut parts = Vec::new();
        for (offset, length, gpa) in layout(bytes, hole) {
            let file = file.map(|file| FileOffset::from_arc(Arc::clone(file), offset));
            let region = Arc::new(map_part(file, length, gpa)?);
            parts.push(Part { offset, region });
        }
        let regions = parts.iter().map(|part| Arc::clone(&part.region)).collect();
        let ram = Ram::from_arc_regions(regions).map_err(|_| MemoryError::Size(bytes))?;
        Ok(Self {
            ram,
            parts,
            bytes,
            backing: file.map_or(Backing::Zero, |_| Backing::File),
            laid_over: Arc::default(),
            expected: Ranges::new(),
        })
    }

    /// Length in bytes, without the hole.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What a VM is to have as its memory.
    pub fn regions(&self) -> impl Iterator<Item = &GuestRegionMmap<()>> {
        self.parts.iter().map(|part| &*part.region)
    }

    /// The pieces of a range: each with its offset, its length, and the part in which it lies.
    pub(super) fn pieces(&self, at: u64, bytes: u64) -> impl Iterator<Item = (u64, u64, &Part)> {
        self.parts.iter().filter_map(move |part| {
            let (from, to) = (at.max(part.offset), (at + bytes).min(part.end()));
            (from < to).then(|| (from, to - from, part))
        })
    }

    pub(super) fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        for (from, n, part) in self.pieces(at, into.len() as u64) {
            let gpa = part.region.start_addr().0 + (from - part.offset);
            let start = usize::try_from(from - at).map_err(io::Error::other)?;
            let n = usize::try_from(n).map_err(io::Error::other)?;
            let read = self
                .ram
                .read_slice(&mut into[start..start + n], GuestAddress(gpa));
            read.map_err(io::Error::other)?;
        }
        Ok(())
    }

    pub(super) fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        for (to, n, part) in self.pieces(at, from.len() as u64) {
            let gpa = part.region.start_addr().0 + (to - part.offset);
            let start = usize::try_from(to - at).map_err(io::Error::other)?;
            let n = usize::try_from(n).map_err(io::Error::other)?;
            let written = self
                .ram
                .write_slice(&from[start..start + n], GuestAddress(gpa));
            written.map_err(io::Error::other)?;
        }
        Ok(())
    }

    /// Writes everything to a file, leaving holes where memory is zero. Of a booted VM's memory only what was
    /// ever touched is looked at.
    ///
    /// # Errors
    /// The file's.
    pub fn save(&self, file: &File) -> io::Result<()> {
        const CHUNK: usize = 1 << 20;
        file.set_len(self.bytes)?;
        let mut buffer = vec![0; CHUNK];
        let ranges = match self.backing {
            Backing::Zero => self.private_ranges()?,
            Backing::File => vec![(0, self.bytes)],
        };
        for (start, bytes) in ranges {
            for at in (start..start + bytes).step_by(CHUNK) {
                let n = CHUNK.min(usize::try_from(start + bytes - at).unwrap_or(CHUNK));
                self.read(at, &mut buffer[..n])?;
                write_non_zero(file, &buffer[..n], at)?;
            }
        }
        Ok(())
    }

    /// Readies it for a VM that will touch these; if asked, copies its own pages ahead of their first store.
    pub fn expect(&mut self, set: WorkingSet, prefault: WorkingSetPrefault) {
        if prefault == WorkingSetPrefault::On {
            self.prefault(&set.own);
        }
        self.expected = [set.own, set.touched].concat();
    }

    /// What its VM will touch at once, as far as is known: the working set, and what a diff changed.
    pub fn expected(&self) -> impl Iterator<Item = (u64, u64)> {
        let changed = self.laid_over.iter().map(|e| (e.at, e.bytes));
        self.expected.iter().copied().chain(changed)
    }

    /// Host address of its first part, as long as the process lives.
    #[must_use]
    pub fn host(&self) -> *mut u8 {
        self.parts[0].region.as_ptr()
    }

    /// Whether it was made without a file, as that of a VM that boots.
    #[must_use]
    pub fn is_anonymous(&self) -> bool {
        self.backing == Backing::Zero
    }

    /// Copies pages ahead of their first store; see [`sys::touch`].
    pub(super) fn prefault(&self, ranges: &[(u64, u64)]) {
        for part in &self.parts {
            let inside = ranges.iter().filter_map(|(at, n)| {
                let (from, to) = ((*at).max(part.offset), at.checked_add(*n)?.min(part.end()));
                let bytes = to.checked_sub(from).filter(|bytes| *bytes > 0)?;
                let offset = usize::try_from(from - part.offset).ok()?;
                Some((offset, usize::try_from(bytes).ok()?))
            });
            sys::touch(&part.region, inside);
        }
    }
}

/// The parts of so much memory: offset, length, guest-physical address.
fn layout(bytes: u64, hole: Option<Hole>) -> Vec<(u64, u64, u64)> {
    match hole {
        Some(hole) if bytes > hole.start => vec![
            (0, hole.start, 0),
            (hole.start, bytes - hole.start, hole.end),
        ],
        _ => vec![(0, bytes, 0)],
    }
}

fn map_part(
    file: Option<FileOffset>,
    bytes: u64,
    gpa: u64,
) -> Result<GuestRegionMmap<()>, MemoryError> {
    use nix::libc::{MAP_ANONYMOUS, MAP_NORESERVE, MAP_PRIVATE, PROT_READ, PROT_WRITE};
    let size = usize::try_from(bytes).map_err(|_| MemoryError::Size(bytes))?;
    let kind = if file.is_some() { 0 } else { MAP_ANONYMOUS };
    let mapping = MmapRegion::build(
        file,
        size,
        PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_NORESERVE | kind,
    )
    .map_err(|source| MemoryError::Map { bytes, source })?;
    GuestRegionMmap::new(mapping, GuestAddress(gpa)).ok_or(MemoryError::Size(bytes))
}

fn write_non_zero(file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
    const BLOCK: usize = 64 << 10;
    for (i, block) in bytes.chunks(BLOCK).enumerate() {
        if block.iter().any(|b| *b != 0) {
            file.write_all_at(block, at + (i * BLOCK) as u64)?;
        }
    }
    Ok(())
}
