//! Guest memory: one mapping, one KVM slot. A booted VM has anonymous memory; a clone has the template's
//! file, mapped privately: what it writes is its own, what it only reads is the host's page cache.

use std::{fs::File, io, os::unix::fs::FileExt, path::Path, sync::Arc};

use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion,
    mmap::MmapRegionError,
};

use crate::{devices::Ram, sys};

/// Bytes of a page.
pub const PAGE: u64 = 4096;

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

/// The memory of one VM.
#[derive(Debug, Clone)]
pub struct Memory {
    /// All of it from guest-physical 0, for reading and writing by copy.
    pub ram: Ram,
    region: Arc<GuestRegionMmap<()>>,
    bytes: u64,
}

impl Memory {
    /// Zeroed memory of a VM to boot.
    ///
    /// # Errors
    /// The host refuses the mapping.
    pub fn anonymous(bytes: u64) -> Result<Self, MemoryError> {
        Self::map(bytes, None)
    }

    /// The template's memory, copy-on-write.
    ///
    /// # Errors
    /// The host refuses the mapping.
    pub fn private_copy(file: File, bytes: u64) -> Result<Self, MemoryError> {
        Self::map(bytes, Some(FileOffset::new(file, 0)))
    }

    fn map(bytes: u64, file: Option<FileOffset>) -> Result<Self, MemoryError> {
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
        let region =
            GuestRegionMmap::new(mapping, GuestAddress(0)).ok_or(MemoryError::Size(bytes))?;
        let region = Arc::new(region);
        let ram = GuestMemoryMmap::from_arc_regions(vec![Arc::clone(&region)])
            .map_err(|_| MemoryError::Size(bytes))?;
        Ok(Self { ram, region, bytes })
    }

    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The one region.
    #[must_use]
    pub fn region(&self) -> &GuestRegionMmap<()> {
        &self.region
    }

    /// Writes everything to a file, leaving holes where memory is zero.
    ///
    /// # Errors
    /// The file's.
    pub fn save(&self, file: &File) -> io::Result<()> {
        const CHUNK: usize = 1 << 20;
        file.set_len(self.bytes)?;
        let mut buffer = vec![0; CHUNK];
        let mut at = 0;
        while at < self.bytes {
            let n = CHUNK.min(usize::try_from(self.bytes - at).unwrap_or(CHUNK));
            self.ram
                .read_slice(&mut buffer[..n], GuestAddress(at))
                .map_err(io::Error::other)?;
            write_non_zero(file, &buffer[..n], at)?;
            at += n as u64;
        }
        Ok(())
    }

    /// Copies pages ahead of their first store; see [`sys::populate`].
    pub fn prefault(&self, ranges: &[(u64, u64)]) {
        let ranges = ranges
            .iter()
            .filter_map(|(at, n)| Some((usize::try_from(*at).ok()?, usize::try_from(*n).ok()?)));
        sys::populate(&self.region, ranges);
    }

    /// Pages that are this process's own, as (offset, bytes) ranges: those that /proc/self/pagemap says
    /// are present and not file pages.
    ///
    /// # Errors
    /// The file's.
    pub fn private_ranges(&self) -> io::Result<Vec<(u64, u64)>> {
        const FILE_PAGE: u64 = 1 << 61;
        const PRESENT: u64 = 1 << 63;
        let pagemap = File::open("/proc/self/pagemap")?;
        let mapping: &MmapRegion<()> = &self.region;
        let host = mapping.as_ptr() as u64;
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        let mut buffer = vec![0_u8; 8 << 10];
        let mut page = 0;
        while page < self.bytes / PAGE {
            let n = (self.bytes / PAGE - page).min(1 << 10);
            let wanted = &mut buffer[..usize::try_from(n * 8).unwrap_or(0)];
            pagemap.read_exact_at(wanted, (host / PAGE + page) * 8)?;
            for (i, word) in wanted.chunks_exact(8).enumerate() {
                let word = u64::from_le_bytes(word.try_into().unwrap_or_default());
                if word & (PRESENT | FILE_PAGE) == PRESENT {
                    extend(&mut ranges, (page + i as u64) * PAGE);
                }
            }
            page += n;
        }
        Ok(ranges)
    }
}

fn extend(ranges: &mut Vec<(u64, u64)>, page: u64) {
    match ranges.last_mut() {
        Some((at, n)) if *at + *n == page => *n += PAGE,
        _ => ranges.push((page, PAGE)),
    }
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

/// Reads a working-set list: pairs of little-endian u64, whole pages inside `bytes`. A list that is absent
/// is empty; one that is malformed is ignored from the first bad pair on, since it only speeds things up.
#[must_use]
pub fn read_working_set(path: &Path, bytes: u64) -> Vec<(u64, u64)> {
    let raw = std::fs::read(path).unwrap_or_default();
    raw.chunks_exact(16)
        .map(|pair| {
            let (at, n) = pair.split_at(8);
            let number = |b: &[u8]| u64::from_le_bytes(b.try_into().unwrap_or_default());
            (number(at), number(n))
        })
        .take_while(|(at, n)| {
            at % PAGE == 0 && n % PAGE == 0 && at.checked_add(*n).is_some_and(|end| end <= bytes)
        })
        .collect()
}

/// Writes a working-set list.
///
/// # Errors
/// The file's.
pub fn write_working_set(path: &Path, ranges: &[(u64, u64)]) -> io::Result<()> {
    let raw: Vec<u8> = ranges
        .iter()
        .flat_map(|(at, n)| [at.to_le_bytes(), n.to_le_bytes()].concat())
        .collect();
    std::fs::write(path, raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_saved_is_what_a_private_copy_sees() {
        let memory = Memory::anonymous(4 << 20).unwrap();
        memory
            .ram
            .write_obj(7_u64, GuestAddress(0x20_1000))
            .unwrap();
        let file = tempfile::tempfile().unwrap();
        memory.save(&file).unwrap();
        let copy = Memory::private_copy(file.try_clone().unwrap(), 4 << 20).unwrap();
        assert_eq!(
            copy.ram.read_obj::<u64>(GuestAddress(0x20_1000)).unwrap(),
            7
        );
        copy.ram.write_obj(8_u64, GuestAddress(0x20_1000)).unwrap();
        let other = Memory::private_copy(file, 4 << 20).unwrap();
        assert_eq!(
            other.ram.read_obj::<u64>(GuestAddress(0x20_1000)).unwrap(),
            7
        );
        let ranges = copy.private_ranges().unwrap();
        assert!(ranges.contains(&(0x20_1000, PAGE)), "{ranges:?}");
    }

    #[test]
    fn a_hostile_working_set_is_cut_at_its_first_bad_pair() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ws");
        let good = [(0, 4096), (8192, 8192)];
        let bad = [(u64::MAX - 4095, 8192), (0, 4096)];
        write_working_set(&path, &[&good[..], &bad[..]].concat()).unwrap();
        assert_eq!(read_working_set(&path, 1 << 20), good);
    }
}
