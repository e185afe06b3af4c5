//! Guest memory: a mapping and a KVM slot for each part that lies together, which is one, or two around a hole
//! in guest-physical addresses. Here and in files it is one row of bytes: offsets skip the hole.
//!
//! A booted VM has anonymous memory; a clone has the template's
//! file, mapped privately: what it writes is its own, what it only reads is the host's page cache. A clone
//! of a diff has the base's file so, and over it runs of pages from the diff's file.

use std::{
    fs::File,
    io::{self, Write},
    os::unix::fs::FileExt,
    sync::Arc,
};

use model::WorkingSetPrefault;
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryRegion, GuestRegionMmap, MmapRegion,
    mmap::MmapRegionError,
};

use crate::{
    confine,
    devices::Ram,
    extents::{Extent, Extents},
    sys,
};

/// Bytes of a page.
pub const PAGE: u64 = 4096;
const PAGE_BYTES: usize = 4096;
/// Most runs of a diff that are mapped. Each may cut a mapping in two; a process may have 65530
/// (`vm.max_map_count`).
const MAX_MAPPED: usize = 20_000;
/// Runs of a diff up to this length are read rather than mapped: a mapping costs as much as copying a few
/// pages, again at the first touch of each page, and again when the process ends.
const LONGEST_READ: u64 = 16 * PAGE;
/// Most bytes that are read for that reason: what is copied is this clone's alone.
const MAX_READ: u64 = 4 << 20;
/// Unit in which a working set says what is touched.
const BLOCK: u64 = 2 << 20;
/// Longest file of a working set in bytes: every second page of the largest VM on its own.
const MAX_LIST: usize = 32 << 20;
/// Ends the first list of a working set's file: no pages are there.
const SECOND_LIST: (u64, u64) = (u64::MAX, u64::MAX);

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
    parts: Vec<Part>,
    bytes: u64,
    backing: Backing,
    /// What a diff's file holds of it.
    laid_over: Arc<Extents>,
    /// What its VM is expected to touch at once.
    expected: Ranges,
}

/// (offset, bytes) ranges of whole pages.
pub type Ranges = Vec<(u64, u64)>;

/// What a clone has touched since it was made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WorkingSet {
    /// Pages that are its own.
    pub own: Ranges,
    /// Blocks of 2 MiB with a page that it wrote or read, or the host brought in with one.
    pub touched: Ranges,
}

#[derive(Debug, Clone)]
struct Part {
    /// Where it begins in the row of bytes.
    offset: u64,
    region: Arc<GuestRegionMmap<()>>,
}

impl Part {
    fn end(&self) -> u64 {
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
    fn pieces(&self, at: u64, bytes: u64) -> impl Iterator<Item = (u64, u64, &Part)> {
        self.parts.iter().filter_map(move |part| {
            let (from, to) = (at.max(part.offset), (at + bytes).min(part.end()));
            (from < to).then(|| (from, to - from, part))
        })
    }

    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
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

    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
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
        ranges.extend(pages.filter(|(page, _)| *page < self.bytes));
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
    fn prefault(&self, ranges: &[(u64, u64)]) {
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

    /// Pages that are this process's own, as (offset, bytes) ranges: those that /proc/self/pagemap says
    /// are present, or swapped out, and not file pages.
    ///
    /// # Errors
    /// The file's.
    pub fn private_ranges(&self) -> io::Result<Ranges> {
        Ok(self.working_set()?.own)
    }

    /// What was touched since the mapping was made, from /proc/self/pagemap.
    ///
    /// # Errors
    /// The file's.
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

/// Ranges that together say the same, in order and apart.
fn united(mut ranges: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    ranges.sort_unstable();
    let mut united: Vec<(u64, u64)> = Vec::with_capacity(ranges.len());
    for (at, bytes) in ranges {
        match united.last_mut() {
            Some((start, n)) if *start + *n >= at => *n = (*n).max(at + bytes - *start),
            _ => united.push((at, bytes)),
        }
    }
    united
}

/// The length in bytes from which on runs are mapped; see [`MAX_READ`], [`MAX_MAPPED`].
fn shortest_mapped(extents: &Extents) -> u64 {
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

fn extend(ranges: &mut Vec<(u64, u64)>, page: u64) {
    match ranges.last_mut() {
        Some((at, n)) if *at + *n == page => *n += PAGE,
        _ => ranges.push((page, PAGE)),
    }
}

/// Puts those words into `bytes`, a copy of what is at `start`, that lie in it.
fn put_words(bytes: &mut [u8], start: u64, words: &[(u64, u64)]) {
    for (at, word) in words {
        let offset = at.checked_sub(start).and_then(|n| usize::try_from(n).ok());
        if let Some(place) = offset.and_then(|n| bytes.get_mut(n..n.checked_add(8)?)) {
            place.copy_from_slice(&word.to_le_bytes());
        }
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

/// Reads a working set: pairs of little-endian u64, whole pages inside `bytes`; after a pair of ones the second
/// list, if there is one. A file that is absent is empty; one that is malformed is ignored from the first bad
/// pair on, since it only speeds things up.
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

/// The bytes of a list; one that is longer than any VM's can be is no list.
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

/// Writes a working set.
///
/// # Errors
/// The file's.
pub fn write_working_set(file: &File, set: &WorkingSet) -> io::Result<()> {
    let pairs = set.own.iter().chain([&SECOND_LIST]).chain(&set.touched);
    let raw: Vec<u8> = pairs
        .flat_map(|(at, n)| [at.to_le_bytes(), n.to_le_bytes()].concat())
        .collect();
    file.write_all_at(&raw, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_saved_is_what_a_private_copy_sees() {
        let memory = Memory::anonymous(4 << 20, None).unwrap();
        memory
            .ram
            .write_obj(7_u64, GuestAddress(0x20_1000))
            .unwrap();
        let file = tempfile::tempfile().unwrap();
        memory.save(&file).unwrap();
        let copy = Memory::private_copy(file.try_clone().unwrap(), 4 << 20, None).unwrap();
        assert_eq!(
            copy.ram.read_obj::<u64>(GuestAddress(0x20_1000)).unwrap(),
            7
        );
        copy.ram.write_obj(8_u64, GuestAddress(0x20_1000)).unwrap();
        let other = Memory::private_copy(file, 4 << 20, None).unwrap();
        assert_eq!(
            other.ram.read_obj::<u64>(GuestAddress(0x20_1000)).unwrap(),
            7
        );
        let ranges = copy.private_ranges().unwrap();
        assert!(ranges.contains(&(0x20_1000, PAGE)), "{ranges:?}");
    }

    /// In the middle of the memory of the tests below.
    const HOLE: Option<Hole> = Some(Hole {
        start: 300 * PAGE,
        end: 2000 * PAGE,
    });

    #[test]
    fn memory_above_a_hole_is_saved_and_comes_back_there() {
        let hole = HOLE.unwrap();
        let memory = Memory::anonymous(4 << 20, HOLE).unwrap();
        let places = [0, hole.start - 8, hole.end, hole.end + 700 * PAGE];
        for at in places {
            memory.ram.write_obj(at + 1, GuestAddress(at)).unwrap();
        }
        for at in [hole.start, hole.end - 1, hole.end + (4 << 20) - hole.start] {
            assert!(memory.ram.read_obj::<u8>(GuestAddress(at)).is_err());
        }
        let regions: Vec<_> = memory
            .regions()
            .map(|r| (r.start_addr().0, r.len()))
            .collect();
        let above = (4 << 20) - hole.start;
        assert_eq!(regions, [(0, hole.start), (hole.end, above)]);
        let file = tempfile::tempfile().unwrap();
        memory.save(&file).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 4 << 20);
        let copy = Memory::private_copy(file.try_clone().unwrap(), 4 << 20, HOLE).unwrap();
        for at in places {
            assert_eq!(copy.ram.read_obj::<u64>(GuestAddress(at)).unwrap(), at + 1);
        }
        copy.prefault(&[(hole.start - PAGE, 2 * PAGE)]);
        assert_eq!(
            copy.private_ranges().unwrap(),
            [(hole.start - PAGE, 2 * PAGE)]
        );
        // Without a need for it there is no hole.
        let small = Memory::anonymous(hole.start, HOLE).unwrap();
        assert_eq!(small.regions().count(), 1);
    }

    /// A base file of recognizable pages, and a private copy of it.
    fn base_and_copy() -> (File, Memory) {
        const BYTES: u64 = 4 << 20;
        let file = tempfile::tempfile().unwrap();
        file.set_len(BYTES).unwrap();
        for page in (0..BYTES / PAGE).filter(|page| page % 3 == 0) {
            file.write_all_at(&[page.to_le_bytes()[0] | 1; 64], page * PAGE)
                .unwrap();
        }
        let copy = Memory::private_copy(file.try_clone().unwrap(), BYTES, HOLE).unwrap();
        (file, copy)
    }

    fn all(memory: &Memory) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(memory.bytes()).unwrap()];
        memory.read(0, &mut bytes).unwrap();
        bytes
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(32))]

        #[test]
        fn a_diff_over_its_base_is_the_memory(
            writes in proptest::collection::vec((0..1024_u64, 1..9_u64, 0..4_u8), 0..40),
            words in proptest::collection::btree_map(0..512_u64, 0_u64.., 0..4),
        ) {
            let (base, memory) = base_and_copy();
            for (page, pages, fill) in writes {
                let n = usize::try_from(pages.min(1024 - page) * PAGE).unwrap();
                memory.write(page * PAGE, &vec![fill; n]).unwrap();
            }
            let words: Vec<_> = words.into_iter().map(|(i, word)| (i * 8192 + 8, word)).collect();
            let mut file = tempfile::tempfile().unwrap();
            let extents = memory.save_diff(&base, &words, &mut file).unwrap();
            proptest::prop_assert_eq!(file.metadata().unwrap().len(), extents.bytes());
            // Twice: the diff of a clone of a diff holds what that held.
            for _ in 0..2 {
                let mut clone =
                    Memory::private_copy(base.try_clone().unwrap(), memory.bytes(), HOLE).unwrap();
                clone.lay_over(&file, extents.clone()).unwrap();
                let mut expected = all(&memory);
                put_words(&mut expected, 0, &words);
                proptest::prop_assert!(all(&clone) == expected);
                file = tempfile::tempfile().unwrap();
                let again = clone.save_diff(&base, &[], &mut file).unwrap();
                proptest::prop_assert_eq!(&again, &extents);
            }
        }
    }

    #[test]
    fn a_clone_writes_neither_to_the_base_nor_to_the_diff() {
        let (base, memory) = base_and_copy();
        memory.ram.write_obj(1_u64, GuestAddress(3 * PAGE)).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        let extents = memory.save_diff(&base, &[], &mut file).unwrap();
        let clone = || {
            let mut clone =
                Memory::private_copy(base.try_clone().unwrap(), memory.bytes(), HOLE).unwrap();
            clone.lay_over(&file, extents.clone()).unwrap();
            clone
        };
        let (one, other) = (clone(), clone());
        for page in 0..8 {
            one.ram.write_obj(9_u64, GuestAddress(page * PAGE)).unwrap();
        }
        assert!(all(&other) == all(&memory) && all(&clone()) == all(&memory));
        let extents = one.save_diff(&base, &[], &mut io::sink()).unwrap();
        assert_eq!(extents.bytes(), 8 * PAGE);
    }

    #[test]
    fn short_runs_of_a_diff_are_read_while_they_are_few_and_long_ones_mapped() {
        let bytes = 1 << 30;
        let extents = |runs: &[(u64, u64)]| Extents::new(runs.iter().copied(), bytes).unwrap();
        let long = LONGEST_READ + PAGE;
        let both = extents(&[(0, PAGE), (4 * PAGE, LONGEST_READ), (64 * PAGE, long)]);
        assert_eq!(shortest_mapped(&both), long);
        let many: Vec<_> = (0..=MAX_READ / PAGE)
            .map(|i| (i * 2 * PAGE, PAGE))
            .collect();
        assert_eq!(shortest_mapped(&extents(&many[1..])), long);
        assert_eq!(shortest_mapped(&extents(&many)), PAGE);

        let (base, memory) = base_and_copy();
        for page in [5, 6, 100] {
            let n = if page == 100 { long } else { PAGE };
            let n = usize::try_from(n).unwrap();
            memory.write(page * PAGE, &vec![7; n]).unwrap();
        }
        let mut file = tempfile::tempfile().unwrap();
        let extents = memory.save_diff(&base, &[], &mut file).unwrap();
        let mut clone = Memory::private_copy(base, memory.bytes(), HOLE).unwrap();
        clone.lay_over(&file, extents).unwrap();
        assert_eq!(clone.private_ranges().unwrap(), [(5 * PAGE, 2 * PAGE)]);
        assert!(all(&clone) == all(&memory));
    }

    /// Every other page of 256 MiB: more runs than are mapped.
    #[test]
    fn a_diff_of_more_runs_than_mappings_is_read() {
        const PAGES: u64 = 65_536;
        let base = tempfile::tempfile().unwrap();
        base.set_len(PAGES * PAGE).unwrap();
        let runs = (0..PAGES / 2).map(|i| (i * 2 * PAGE, PAGE));
        let extents = Extents::new(runs, PAGES * PAGE).unwrap();
        assert_eq!(shortest_mapped(&extents), 2 * PAGE);
        let file = tempfile::tempfile().unwrap();
        file.set_len(extents.bytes()).unwrap();
        file.write_all_at(&[5; 8], extents.bytes() - PAGE).unwrap();
        let mut memory = Memory::private_copy(base, PAGES * PAGE, None).unwrap();
        memory.lay_over(&file, extents).unwrap();
        let last = memory.ram.read_obj::<u8>(GuestAddress((PAGES - 2) * PAGE));
        assert_eq!(last.unwrap(), 5);
    }

    #[test]
    fn a_page_that_was_copied_and_not_changed_is_in_no_diff() {
        let (base, memory) = base_and_copy();
        memory.prefault(&[(0, 64 * PAGE)]);
        assert_eq!(memory.private_ranges().unwrap(), [(0, 64 * PAGE)]);
        let extents = memory.save_diff(&base, &[], &mut io::sink()).unwrap();
        assert!(extents.is_empty(), "{extents:?}");
    }

    #[test]
    fn a_diff_that_is_too_short_is_an_error() {
        let (_, mut memory) = base_and_copy();
        let extents = Extents::new([(0, 2 * PAGE)], memory.bytes()).unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(PAGE).unwrap();
        assert!(memory.lay_over(&file, extents).is_err());
    }

    #[test]
    fn a_hostile_working_set_is_cut_at_its_first_bad_pair() {
        let good = [(0, 4096), (8192, 8192)];
        let bad = [(u64::MAX - 4095, 8192), (0, 4096)];
        let mixed = [&good[..], &bad[..]].concat();
        for (own, touched) in [(good.to_vec(), mixed.clone()), (mixed, good.to_vec())] {
            let file = tempfile::tempfile().unwrap();
            write_working_set(&file, &WorkingSet { own, touched }).unwrap();
            let read = read_working_set(Some(&file), 1 << 20);
            assert_eq!(read.own, good);
            assert!(read.touched.is_empty() || read.touched == good);
        }
    }

    #[test]
    fn a_working_set_says_what_is_its_own_and_what_was_only_read() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(16 << 20).unwrap();
        file.write_all_at(&[1; 8], 9 << 20).unwrap();
        let copy = Memory::private_copy(file, 16 << 20, None).unwrap();
        copy.write(5 << 20, &[1]).unwrap();
        copy.read(9 << 20, &mut [0]).unwrap();
        let set = copy.working_set().unwrap();
        assert_eq!(set.own, [(5 << 20, PAGE)]);
        assert_eq!(set.touched, [(4 << 20, BLOCK), (8 << 20, BLOCK)]);
        let file = tempfile::tempfile().unwrap();
        write_working_set(&file, &set).unwrap();
        assert_eq!(read_working_set(Some(&file), copy.bytes()), set);
    }
}
