//! The disk files behind the block devices.
//!
//! ```text
//! root     ── read ──► image file, shared by all VMs through the host's page cache
//! layer    ── read ──► private file where the block was written, else the diff's file where that has it,
//!                      else the template's file
//!          ── write ─► private file (unlinked, sparse, empty at the start)
//!          ── discard ─► the block leaves the private file, whose space goes back to the host
//! ```
//! Cloning costs next to nothing: a clone starts with the template's file and an empty private one, which dies
//! with the process. That lies on a disk and not in memory, so that a full disk is an I/O error in the guest,
//! and the guest's writes are not charged to the host's memory. A limit on its blocks ends in the same error. A
//! discarded block reads as the template has it: its content is undefined until it is written again (virtio 1.2,
//! 5.2.6.2), and a snapshot need not keep it.

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

/// Granularity of copy-on-write, the block size of the guest's file systems.
const BLOCK: u64 = 4096;
const BLOCK_BYTES: usize = 4096;
/// Blocks that one leaf of the map covers: 16 MiB of disk in 512 bytes.
const LEAF_BLOCKS: u64 = 4096;
/// Bytes moved at a time when a layer is copied.
const COPY_BYTES: usize = 256 << 10;

/// Which blocks the private file holds. Leaves exist where something was written.
#[derive(Debug, Default)]
struct BlockMap {
    leaves: Vec<Option<Box<[u64; 64]>>>,
    /// Blocks in it.
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

    /// Whether `block` is in the map, and where a run of blocks of which the same holds ends: at most at
    /// `end`.
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

/// Where the bytes of a run of blocks are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    Base,
    /// From this offset of the diff's file on.
    Diff(u64),
    Private,
}

/// What a diff holds of a disk. Its file is only read, and shared by all clones of the diff.
#[derive(Debug)]
pub struct LayerDiff {
    /// The blocks, one after another.
    pub file: File,
    /// Where they belong.
    pub extents: Extents,
}

/// Whether a disk may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    ReadOnly,
    /// Writes go to a private file.
    CopyOnWrite,
}

/// A disk: a base file that is never written, and what was written over it.
#[derive(Debug)]
pub(super) struct Disk {
    base: File,
    diff: Option<LayerDiff>,
    len: u64,
    access: Access,
    private: Option<File>,
    written: BlockMap,
    /// Most blocks of the private file.
    limit: u64,
}

impl Disk {
    /// A disk of whole sectors over `base`; a tail of less than 512 bytes is left out. With an empty file for
    /// what is written it is copy-on-write, else read-only.
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

    /// The disk with a limit on what its private file may take, in bytes.
    pub(super) fn with_limit(mut self, limit: Option<u64>) -> Self {
        self.limit = limit.map_or(u64::MAX, |bytes| bytes / BLOCK);
        self
    }

    /// The disk with a diff laid over its base. The extents lie on the disk: whoever read them checked it.
    pub(super) fn with_diff(mut self, diff: Option<LayerDiff>) -> Self {
        self.diff = diff;
        self
    }

    /// The file below what was written.
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

    /// Fills `into` from `offset`. The range must lie on the disk.
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

    /// The file of a source and the offset in it of the disk's byte `at`.
    fn place(&self, source: Source, at: u64) -> io::Result<(&File, u64)> {
        Ok(match (source, &self.diff) {
            (Source::Diff(stored), Some(diff)) => (&diff.file, stored),
            (Source::Private, _) => (self.private()?, at),
            (Source::Base | Source::Diff(_), _) => (&self.base, at),
        })
    }

    /// The source of the byte at `at`, and where the run of the same source ends, at most at `end`.
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

    /// Writes `from` at `offset`. The range must lie on the disk. After an error the range holds a mix of
    /// old and new bytes, as on any disk.
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

    /// Whether these blocks may be in the private file.
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

    /// Gives the whole blocks of a range back. The range must lie on the disk; afterwards its content is
    /// what lies below the private file, or what it was.
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

    /// Bytes that the private file takes on its disk.
    #[cfg(test)]
    pub(super) fn private_bytes(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        let meta = self.private.as_ref().map(|file| file.metadata().unwrap());
        meta.map_or(0, |meta| meta.blocks() * 512)
    }

    /// Copies a block to the private file, before a part of it is overwritten.
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

    /// Writes the disk as the guest sees it into `target`, leaving holes where the files have them.
    /// The number of bytes written.
    pub(super) fn copy_to(&self, target: &File) -> io::Result<u64> {
        target.set_len(0)?;
        target.set_len(self.len)?;
        let mut copied = 0;
        let mut at = 0;
        while at < self.len {
            let (source, end) = self.run(at, self.len);
            let (file, from) = self.place(source, at)?;
            copied += match source {
                // All of it is data, and at another offset.
                Source::Diff(_) => copy_range((file, from), end - at, |bytes, done| {
                    target.write_all_at(bytes, at + done)
                })?,
                Source::Base | Source::Private => copy_data(file, target, at, end)?,
            };
            at = end;
        }
        Ok(copied)
    }

    /// Writes the blocks that are not the base's one after another, whole ones; says where they belong.
    pub(super) fn save_diff(&self, target: &mut dyn Write) -> io::Result<Extents> {
        let mut extents = Extents::default();
        let mut at = 0;
        while at < self.len {
            let (source, end) = self.run(at, self.len);
            if source != Source::Base {
                let from = self.place(source, at)?;
                let whole = (end - at).next_multiple_of(BLOCK);
                let copied = copy_range(from, end - at, |bytes, _| target.write_all(bytes))?;
                // What lies beyond the end of a file, or of the disk, reads as zeros.
                io::copy(&mut io::Read::take(io::repeat(0), whole - copied), target)?;
                extents.push(at, whole);
            }
            at = end;
        }
        Ok(extents)
    }
}

/// Copies what is data between two offsets, skipping holes.
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

/// The next range with data in it. A file system that knows no holes reports everything as data.
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

/// Hands `bytes` of a file from an offset on to `put`, with their distance from it; less at its end.
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

/// Makes a hole. A file system that has none keeps the space until the file goes.
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
