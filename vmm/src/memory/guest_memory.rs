//! The memory of one VM.

use std::{fs::File, io, os::unix::fs::FileExt, sync::Arc};

use model::WorkingSetPrefault;
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryRegion, GuestRegionMmap, MmapRegion,
    mmap::MmapRegionError,
};

use super::pages::{Ranges, WorkingSet};
use crate::{devices::Ram, extents::Extents, sys};

/// Reasons why guest memory could not be created.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    #[error("cannot map {bytes} bytes of guest memory")]
    Map {
        bytes: u64,
        #[source]
        source: MmapRegionError,
    },
    #[error("{0} bytes of guest memory do not fit the address space")]
    Size(u64),
}

/// A range of guest-physical addresses without RAM. RAM that does not fit below the hole continues above it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hole {
    /// Address of the hole's first byte.
    pub start: u64,
    /// Address of the first byte above the hole.
    pub end: u64,
}

/// The memory of one VM.
#[derive(Debug, Clone)]
pub struct Memory {
    /// The memory by guest-physical address, accessed by copying.
    pub ram: Ram,
    /// In address order.
    pub(super) parts: Vec<Part>,
    bytes: u64,
    backing: Backing,
    /// The pages that came from a diff's file.
    pub(super) laid_over: Arc<Extents>,
    /// The pages that the VM is expected to touch first.
    expected: Ranges,
}

#[derive(Debug, Clone)]
pub(super) struct Part {
    /// Offset of the part's first byte, not counting the hole.
    pub(super) offset: u64,
    pub(super) region: Arc<GuestRegionMmap<()>>,
}

impl Part {
    pub(super) fn end(&self) -> u64 {
        self.offset + self.region.len()
    }
}

/// The content of a page that this process has not written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Backing {
    Zero,
    File,
}

impl Memory {
    /// Creates zeroed memory for a boot.
    ///
    /// # Errors
    /// Returns [`MemoryError`] if the host refuses the mapping.
    pub fn anonymous(bytes: u64, hole: Option<Hole>) -> Result<Self, MemoryError> {
        Self::map(bytes, hole, None)
    }

    /// Maps the template's memory file copy-on-write.
    ///
    /// # Errors
    /// Returns [`MemoryError`] if the host refuses the mapping.
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

    /// The mappings that become KVM slots.
    pub fn regions(&self) -> impl Iterator<Item = &GuestRegionMmap<()>> {
        self.parts.iter().map(|part| &*part.region)
    }

    /// Splits a range at the hole. Returns offset, length and part of each piece.
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

    /// Writes all of memory to `file`, which must be empty, and leaves holes for blocks of 64 KiB that are all zero.
    /// For a booted VM only pages that were touched are read.
    ///
    /// # Errors
    /// Returns an error if `file` cannot be written, or memory or /proc/self/pagemap cannot be read.
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

    /// Records the working set that the VM is expected to touch. With [`WorkingSetPrefault::On`], immediately makes
    /// private copies of the pages in `set.own`, so that the guest's first writes to them do not fault.
    pub fn expect(&mut self, set: WorkingSet, prefault: WorkingSetPrefault) {
        if prefault == WorkingSetPrefault::On {
            self.prefault(&set.own);
        }
        self.expected = [set.own, set.touched].concat();
    }

    /// The pages that the VM is expected to touch first: the recorded working set and the pages of a diff.
    pub fn expected(&self) -> impl Iterator<Item = (u64, u64)> {
        let changed = self.laid_over.iter().map(|e| (e.at, e.bytes));
        self.expected.iter().copied().chain(changed)
    }

    /// Host address of the first part. It stays valid as long as this memory or a clone of it exists.
    #[must_use]
    pub fn host(&self) -> *mut u8 {
        self.parts[0].region.as_ptr()
    }

    /// Whether no file backs the memory: true for a booted VM, false for a restored one.
    #[must_use]
    pub fn is_anonymous(&self) -> bool {
        self.backing == Backing::Zero
    }

    /// Makes private copies of pages before their first write, see [`sys::touch`].
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

/// Splits `bytes` of memory at the hole: offset, length and guest-physical address of each part.
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
