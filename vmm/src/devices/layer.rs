//! The host files that store the disks of the block devices.
//!
//! ```text
//! root     ── read ──► image file, shared by all VMs through the host's page cache
//! layer    ── read ──► private file if the block was written, else the diff's file if it has the block,
//!                      else the template's file
//!          ── write ─► private file (unlinked, sparse, initially empty)
//!          ── discard ─► the block is removed from the private file, which frees its space on the host
//! ```
//! A clone starts with the template's file and an empty private file, so cloning a disk costs next to nothing. The
//! private file disappears with the process. It is on a disk rather than in memory, so the guest's writes are not
//! charged to the host's memory. A full host disk, or reaching the limit on the private file's size, is an I/O error in
//! the guest. A discarded block reads as in the diff or the template: its content is undefined until it is written
//! again (virtio 1.2, 5.2.6.2), and a snapshot need not contain it.

use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::unistd::{Whence, lseek};

use super::buffers::Buffers;
use super::sys;
use crate::extents::{Extents, Found};
use crate::sys::length;

/// Granularity of copy-on-write in bytes, the block size of the guest's file systems.
const BLOCK: u64 = 4096;
const BLOCK_BYTES: usize = 4096;
/// Blocks per leaf of the map: 16 MiB of disk in 512 bytes of map.
const LEAF_BLOCKS: u64 = 4096;
/// Size of the buffer for copying a layer, in bytes.
const COPY_BYTES: usize = 256 << 10;

/// The set of blocks in the private file. A leaf exists only where a block was written.
#[derive(Debug, Default)]
struct BlockMap {
    leaves: Vec<Option<Box<[u64; 64]>>>,
    /// Number of blocks in the set.
    len: u64,
}

impl BlockMap {
    fn contains(&self, block: u64) -> bool {
        let (leaf, word, bit) = place(block);
        match self.leaves.get(leaf) {
            Some(Some(words)) => words[word] & bit != 0,
            _ => false,
        }
    }

    fn insert(&mut self, block: u64) {
        let (leaf, word, bit) = place(block);
        if self.leaves.len() <= leaf {
            self.leaves.resize_with(leaf + 1, || None);
        }
        let word = &mut self.leaves[leaf].get_or_insert_with(|| Box::new([0; 64]))[word];
        self.len += u64::from(*word & bit == 0);
        *word |= bit;
    }

    fn remove(&mut self, block: u64) {
        let (leaf, word, bit) = place(block);
        if let Some(Some(words)) = self.leaves.get_mut(leaf) {
            self.len -= u64::from(words[word] & bit != 0);
            words[word] &= !bit;
        }
    }

    /// Whether `block` is in the set, and the end of the run of blocks with the same result, at most `end`.
    fn run(&self, block: u64, end: u64) -> (bool, u64) {
        let held = self.contains(block);
        let mut next = block + 1;
        while next < end && self.contains(next) == held {
            let (leaf, ..) = place(next);
            let absent = !matches!(self.leaves.get(leaf), Some(Some(_)));
            next += if absent {
                LEAF_BLOCKS - next % LEAF_BLOCKS
            } else {
                1
            };
        }
        (held, next.min(end))
    }
}

fn place(block: u64) -> (usize, usize, u64) {
    let leaf = usize::try_from(block / LEAF_BLOCKS).unwrap_or(usize::MAX);
    let word = usize::try_from(block % LEAF_BLOCKS / 64).unwrap_or(0);
    (leaf, word, 1 << (block % 64))
}

/// The file that holds the bytes of a run of blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    Base,
    /// The diff's file, at this offset.
    Diff(u64),
    Private,
}

/// The layer blocks of a diff. The file is read-only and shared by all clones of the diff.
#[derive(Debug)]
pub struct LayerDiff {
    /// The blocks, one after another.
    pub file: File,
    /// The positions of the blocks in the layer.
    pub extents: Extents,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    ReadOnly,
    /// Writes go to a private file.
    CopyOnWrite,
}

/// A disk: a read-only base file and the blocks written over it.
#[derive(Debug)]
pub(super) struct Disk {
    base: File,
    diff: Option<LayerDiff>,
    len: u64,
    access: Access,
    private: Option<File>,
    written: BlockMap,
    /// Limit on blocks in the private file.
    limit: u64,
}

impl Disk {
    /// A disk over `base`, in whole sectors: a remainder of less than 512 bytes is ignored. With a `private` file,
    /// which must be empty, the disk is copy-on-write; without it, read-only.
    pub(super) fn new(base: File, private: Option<File>) -> io::Result<Self> {
        let len = length(&base)? & !511;
        let access = match private {
            Some(_) => Access::CopyOnWrite,
            None => Access::ReadOnly,
        };
        Ok(Self {
            base,
            diff: None,
            len,
            access,
            private,
            written: BlockMap::default(),
            limit: u64::MAX,
        })
    }

    /// Limits the size of the private file to `limit` bytes, rounded down to whole blocks. `None`: no limit.
    pub(super) fn with_limit(mut self, limit: Option<u64>) -> Self {
        self.limit = limit.map_or(u64::MAX, |bytes| bytes / BLOCK);
        self
    }

    /// Lays a diff over the base. The extents must lie within the disk rounded up to whole blocks, which
    /// [`Extents::new`] checks.
    pub(super) fn with_diff(mut self, diff: Option<LayerDiff>) -> Self {
        self.diff = diff;
        self
    }

    /// The base file.
    pub(super) fn base(&self) -> &File {
        &self.base
    }

    /// Size in bytes, a multiple of 512.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn access(&self) -> Access {
        self.access
    }

    /// Reads from `offset` until `into` is full. Also fails if the range is not within the disk.
    pub(super) fn read(&self, offset: u64, mut into: Buffers<'_>) -> io::Result<()> {
        let mut at = self.check(offset, into.len())?;
        while into.len() > 0 {
            let (source, end) = self.run(at, at + as_u64(into.len()));
            let piece = split(&mut into, end - at)?;
            self.read_from(source, at, piece)?;
            at = end;
        }
        Ok(())
    }

    fn read_from(&self, source: Source, at: u64, mut into: Buffers<'_>) -> io::Result<()> {
        let (file, mut at) = self.place(source, at)?;
        while into.len() > 0 {
            match sys::preadv(file.as_fd(), into.slices(), at) {
                Ok(0) => {
                    into.fill_zero();
                    return Ok(());
                }
                Ok(done) => {
                    split(&mut into, as_u64(done))?;
                    at += as_u64(done);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The file of a source, and the offset in that file of the disk's byte `at`.
    fn place(&self, source: Source, at: u64) -> io::Result<(&File, u64)> {
        Ok(match (source, &self.diff) {
            (Source::Diff(stored), Some(diff)) => (&diff.file, stored),
            (Source::Private, _) => (self.private()?, at),
            (Source::Base | Source::Diff(_), _) => (&self.base, at),
        })
    }

    /// The source of the byte at `at`, and the end of the run of bytes with the same source, at most `end`.
    fn run(&self, at: u64, end: u64) -> (Source, u64) {
        let (written, blocks) = self.written.run(at / BLOCK, end.div_ceil(BLOCK));
        let end = end.min(blocks * BLOCK);
        if written {
            return (Source::Private, end);
        }
        match self.diff.as_ref().map(|diff| diff.extents.find(at)) {
            None => (Source::Base, end),
            Some(Found::Here { stored, end: e }) => (Source::Diff(stored), end.min(e)),
            Some(Found::Elsewhere { end: e }) => (Source::Base, end.min(e)),
        }
    }

    /// Writes `from` at `offset`. Also fails if the range is not within the disk, the disk is read-only, or the limit
    /// of the private file is reached. After an error the range can contain both old and new bytes, as on any disk.
    pub(super) fn write(&mut self, offset: u64, mut from: Buffers<'_>) -> io::Result<()> {
        let start = self.check(offset, from.len())?;
        if self.access == Access::ReadOnly {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        let end = start + as_u64(from.len());
        if start == end {
            return Ok(());
        }
        self.check_limit(start / BLOCK..end.div_ceil(BLOCK))?;
        if !start.is_multiple_of(BLOCK) {
            self.copy_up(start / BLOCK)?;
        }
        if !end.is_multiple_of(BLOCK) && end != self.len {
            self.copy_up(end / BLOCK)?;
        }
        let mut at = start;
        while from.len() > 0 {
            match sys::pwritev(self.private()?.as_fd(), from.slices(), at) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(done) => {
                    split(&mut from, as_u64(done))?;
                    at += as_u64(done);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        for block in start / BLOCK..end.div_ceil(BLOCK) {
            self.written.insert(block);
        }
        Ok(())
    }

    /// Fails if these blocks would exceed the limit of the private file.
    fn check_limit(&self, blocks: Range<u64>) -> io::Result<()> {
        if self.limit == u64::MAX {
            return Ok(());
        }
        let fresh = blocks
            .filter(|block| !self.written.contains(*block))
            .count();
        if self.written.len.saturating_add(as_u64(fresh)) > self.limit {
            Err(io::ErrorKind::QuotaExceeded.into())
        } else {
            Ok(())
        }
    }

    /// Frees the blocks that lie wholly within a range. They then read as in the diff or the base; blocks only partly
    /// within the range keep their content. Also fails if the range is not within the disk or the disk is read-only.
    pub(super) fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        let end = match offset.checked_add(len) {
            Some(end) if end <= self.len => end,
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        };
        if self.access == Access::ReadOnly {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        let mut at = offset.div_ceil(BLOCK);
        let last = if end == self.len {
            end.div_ceil(BLOCK)
        } else {
            end / BLOCK
        };
        while at < last {
            let (held, next) = self.written.run(at, last);
            if held {
                (at..next).for_each(|block| self.written.remove(block));
                punch(self.private()?, at * BLOCK, (next - at) * BLOCK)?;
            }
            at = next;
        }
        Ok(())
    }

    /// Space that the private file occupies, in bytes.
    #[cfg(test)]
    pub(super) fn private_bytes(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        let meta = self.private.as_ref().map(|file| file.metadata().unwrap());
        meta.map_or(0, |meta| meta.blocks() * 512)
    }

    /// Copies a block to the private file, unless it is there already, before a part of the block is overwritten.
    fn copy_up(&mut self, block: u64) -> io::Result<()> {
        if self.written.contains(block) {
            return Ok(());
        }
        let mut bytes = [0; BLOCK_BYTES];
        let (source, _) = self.run(block * BLOCK, (block + 1) * BLOCK);
        let (file, at) = self.place(source, block * BLOCK)?;
        let filled = read_full(file, &mut bytes, at)?;
        bytes[filled..].fill(0);
        self.private()?.write_all_at(&bytes, block * BLOCK)?;
        self.written.insert(block);
        Ok(())
    }

    fn private(&self) -> io::Result<&File> {
        self.private.as_ref().ok_or(io::ErrorKind::NotFound.into())
    }

    fn check(&self, offset: u64, len: usize) -> io::Result<u64> {
        match offset.checked_add(as_u64(len)) {
            Some(end) if end <= self.len => Ok(offset),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Writes the disk as the guest sees it into `target`, with holes where the files have holes. Returns the number of
    /// bytes copied.
    pub(super) fn copy_to(&self, target: &File) -> io::Result<u64> {
        target.set_len(0)?;
        target.set_len(self.len)?;
        let mut copied = 0;
        let mut at = 0;
        while at < self.len {
            let (source, end) = self.run(at, self.len);
            let (file, from) = self.place(source, at)?;
            copied += match source {
                // A run of the diff has no holes, and its offset in the file differs from its offset on the disk.
                Source::Diff(_) => copy_range((file, from), end - at, |bytes, done| {
                    target.write_all_at(bytes, at + done)
                })?,
                Source::Base | Source::Private => copy_data(file, target, at, end)?,
            };
            at = end;
        }
        Ok(copied)
    }

    /// Appends all blocks that do not come from the base to `target`, padded to whole blocks. Returns their positions.
    pub(super) fn save_diff(&self, target: &mut dyn Write) -> io::Result<Extents> {
        let mut extents = Extents::default();
        let mut at = 0;
        while at < self.len {
            let (source, end) = self.run(at, self.len);
            if source != Source::Base {
                let from = self.place(source, at)?;
                let whole = (end - at).next_multiple_of(BLOCK);
                let copied = copy_range(from, end - at, |bytes, _| target.write_all(bytes))?;
                // Bytes beyond the end of a file, or of the disk, read as zeros.
                io::copy(&mut io::Read::take(io::repeat(0), whole - copied), target)?;
                extents.push(at, whole);
            }
            at = end;
        }
        Ok(extents)
    }
}

/// Copies the data between two offsets and skips the holes. Returns the number of bytes copied.
fn copy_data(from: &File, to: &File, start: u64, end: u64) -> io::Result<u64> {
    let mut copied = 0;
    let mut at = start;
    while let Some((data, hole)) = next_data(from, at, end)? {
        copied += copy_range((from, data), hole - data, |bytes, done| {
            to.write_all_at(bytes, data + done)
        })?;
        at = hole;
    }
    Ok(copied)
}

/// The next range of data from `at` on, up to `end`. On a file system that does not report holes everything is data.
fn next_data(file: &File, at: u64, end: u64) -> io::Result<Option<(u64, u64)>> {
    if at >= end {
        return Ok(None);
    }
    let seek = |offset: u64, whence| match i64::try_from(offset) {
        Ok(offset) => lseek(file, offset, whence),
        Err(_) => Err(nix::errno::Errno::EOVERFLOW),
    };
    let data = match seek(at, Whence::SeekData) {
        Ok(data) => u64::try_from(data).unwrap_or(end),
        Err(nix::errno::Errno::ENXIO) => return Ok(None),
        Err(_) => return Ok(Some((at, end))),
    };
    if data >= end {
        return Ok(None);
    }
    let hole = seek(data, Whence::SeekHole)?;
    Ok(Some((data, u64::try_from(hole).unwrap_or(end).min(end))))
}

/// Reads `bytes` bytes of a file from `start` on and passes them to `put` in pieces, each with its distance from
/// `start`. Returns the number of bytes passed, which is less than `bytes` if the file ends earlier.
fn copy_range(
    (from, start): (&File, u64),
    bytes: u64,
    mut put: impl FnMut(&[u8], u64) -> io::Result<()>,
) -> io::Result<u64> {
    let mut buffer = vec![0; COPY_BYTES];
    let mut done = 0;
    while done < bytes {
        let want = usize::try_from(bytes - done).map_or(COPY_BYTES, |left| left.min(COPY_BYTES));
        let got = read_full(from, &mut buffer[..want], start + done)?;
        if got == 0 {
            break;
        }
        put(&buffer[..got], done)?;
        done += as_u64(got);
    }
    Ok(done)
}

/// Reads until `into` is full or the file ends.
fn read_full(file: &File, into: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < into.len() {
        match file.read_at(&mut into[done..], offset + as_u64(done)) {
            Ok(0) => break,
            Ok(len) => done += len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// Makes a hole. On a file system without holes the space stays occupied until the file is deleted.
fn punch(file: &File, at: u64, bytes: u64) -> io::Result<()> {
    let offset = |value: u64| i64::try_from(value).map_err(|_| io::ErrorKind::InvalidInput);
    let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    match fallocate(file, mode, offset(at)?, offset(bytes)?) {
        Ok(()) | Err(Errno::EOPNOTSUPP) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

fn split<'a>(buffers: &mut Buffers<'a>, len: u64) -> io::Result<Buffers<'a>> {
    let len = usize::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
    let front = buffers.split_front(len);
    front.ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

fn as_u64(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}
