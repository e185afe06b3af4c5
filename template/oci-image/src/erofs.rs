//! Writes a tree as an uncompressed EROFS image, as `mkfs.erofs` does for the root image `base`, but keeps each file's
//! modification time (Linux, `fs/erofs/erofs_fs.h`).
//!
//! Layout: the superblock in block 0, then the inodes, then the whole data blocks. Each inode is followed by its
//! extended attributes and by the rest of its data after whole blocks. Inodes are in breadth-first order, so the
//! children of a directory are adjacent. The output depends only on the tree. Holes of files become holes of the image
//! file.

pub(crate) mod layout;
mod output;

use std::{fs::File, io};

use crate::{
    limits::Limits,
    source::Source,
    tar::Content,
    tree::{Kind, Node, Tree},
};
use layout::{Inode, Layout};
use output::Output;

/// Block size, in bytes.
const BLOCK: u64 = 4096;
const SUPER_OFFSET: u64 = 1024;
const SUPER_SIZE: u64 = 128;
const MAGIC: u32 = 0xe0f5_e1e2;
/// Inode time stamps are modification times.
const COMPAT_MTIME: u32 = 2;
/// Bytes copied at once.
const PIECE: u64 = 1 << 18;

#[derive(Debug, thiserror::Error)]
pub enum ErofsError {
    #[error("cannot read an unpacked layer")]
    Read(#[source] io::Error),
    #[error("cannot write the image")]
    Write(#[source] io::Error),
    #[error("files of the image have more than {0} bytes")]
    TooLarge(u64),
    #[error("a file refers to layer {0}, which is missing")]
    Layer(u32),
}

/// Size of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Files, directories and links. A file with several names counts once.
    pub inodes: u64,
    /// Size of the image file, holes included.
    pub bytes: u64,
}

/// Writes `tree` into the empty file `out`. `layers` are the archives to which the contents in the tree refer.
///
/// # Errors
/// Returns an error if the files are larger than [`Limits::apparent`], or if reading or writing fails.
pub fn write<S: Source>(
    tree: &Tree,
    layers: &[S],
    out: &File,
    limits: &Limits,
) -> Result<Summary, ErofsError> {
    let layout = Layout::of(tree, limits)?;
    let mut writer = Writer {
        layers,
        layout: &layout,
        out: Output::new(out),
    };
    writer.superblock()?;
    for inode in &layout.inodes {
        writer.inode(inode)?;
    }
    for inode in &layout.inodes {
        writer.blocks(inode)?;
    }
    writer.out.flush().map_err(ErofsError::Write)?;
    let bytes = layout.blocks() * BLOCK;
    out.set_len(bytes).map_err(ErofsError::Write)?;
    let inodes = layout.inodes.len() as u64;
    Ok(Summary { inodes, bytes })
}

struct Writer<'a, S> {
    layers: &'a [S],
    layout: &'a Layout<'a>,
    out: Output<'a>,
}

impl<S: Source> Writer<'_, S> {
    fn superblock(&mut self) -> Result<(), ErofsError> {
        let root = low16(self.layout.inodes[0].number());
        let mut bytes = Vec::with_capacity(128);
        bytes.extend(MAGIC.to_le_bytes());
        bytes.extend([0; 4]); // no checksum
        bytes.extend(COMPAT_MTIME.to_le_bytes());
        bytes.extend([BLOCK.ilog2().to_le_bytes()[0], 0]);
        bytes.extend(root.to_le_bytes());
        bytes.extend((self.layout.inodes.len() as u64).to_le_bytes());
        bytes.extend([0; 12]); // time of the image: not used with inodes that have their own
        bytes.extend(low32(self.layout.blocks()).to_le_bytes());
        bytes.extend([0; 4]); // inode numbers count from block 0
        bytes.resize(128, 0); // no shared attributes, no name, no incompatible feature
        self.put(SUPER_OFFSET, &bytes)
    }

    /// Writes an inode, its extended attributes, and the end of its data if it is inline.
    fn inode(&mut self, inode: &Inode) -> Result<(), ErofsError> {
        let node = self.layout.tree.node(inode.node);
        // Flat data, with or without an inline end.
        let layout = if inode.inline == 0 { 0_u16 } else { 2 };
        let mut bytes = Vec::with_capacity(usize::try_from(BLOCK).unwrap_or(0));
        bytes.extend((1 | layout << 1).to_le_bytes()); // the extended form of 64 bytes
        bytes.extend(layout::xattr_count(&node.meta).to_le_bytes());
        bytes.extend(mode(node).to_le_bytes());
        bytes.extend([0; 2]);
        bytes.extend(inode.size.to_le_bytes());
        bytes.extend(low32(self.layout.data_start + inode.block).to_le_bytes());
        bytes.extend(low32(inode.number()).to_le_bytes());
        bytes.extend(node.meta.uid.to_le_bytes());
        bytes.extend(node.meta.gid.to_le_bytes());
        bytes.extend(node.meta.mtime.seconds.to_le_bytes());
        bytes.extend(node.meta.mtime.nanoseconds.to_le_bytes());
        bytes.extend(inode.links.to_le_bytes());
        bytes.extend([0; 16]);
        layout::write_xattrs(&node.meta, &mut bytes);
        if inode.inline > 0 {
            self.append_tail(inode, node, &mut bytes)?;
        }
        self.put(inode.offset, &bytes)
    }

    fn append_tail(
        &self,
        inode: &Inode,
        node: &Node,
        bytes: &mut Vec<u8>,
    ) -> Result<(), ErofsError> {
        let begin = inode.size - inode.inline;
        let from = usize::try_from(begin).unwrap_or(usize::MAX);
        match &node.kind {
            Kind::Directory(_) => bytes.extend(&self.layout.directory(inode)[from..]),
            Kind::Symlink(target) => bytes.extend(&target[from..]),
            Kind::File(content) => {
                let start = bytes.len();
                bytes.resize(start + usize::try_from(inode.inline).unwrap_or(0), 0);
                self.read(content, begin, &mut bytes[start..])?;
            }
            Kind::Fifo => {}
        }
        Ok(())
    }

    /// Fills `buffer`, which is zeroed, with a file's bytes from `begin`.
    fn read(&self, content: &Content, begin: u64, buffer: &mut [u8]) -> Result<(), ErofsError> {
        let end = begin + buffer.len() as u64;
        let first = (content.segments).partition_point(|segment| segment.at + segment.len <= begin);
        for segment in &content.segments[first..] {
            let from = segment.at.max(begin);
            let to = (segment.at + segment.len).min(end);
            if from >= to {
                break;
            }
            let index = |at: u64| usize::try_from(at - begin).unwrap_or(usize::MAX);
            let part = &mut buffer[index(from)..index(to)];
            let offset = segment.offset + (from - segment.at);
            let layer = self.layer(content)?;
            layer.read_at(part, offset).map_err(ErofsError::Read)?;
        }
        Ok(())
    }

    fn layer(&self, content: &Content) -> Result<&S, ErofsError> {
        let index = usize::try_from(content.layer).unwrap_or(usize::MAX);
        let layer = self.layers.get(index);
        layer.ok_or(ErofsError::Layer(content.layer))
    }

    /// Writes the data that is not inline.
    fn blocks(&mut self, inode: &Inode) -> Result<(), ErofsError> {
        let len = inode.size - inode.inline;
        if len == 0 {
            return Ok(());
        }
        let start = (self.layout.data_start + inode.block) * BLOCK;
        let end = usize::try_from(len).unwrap_or(usize::MAX);
        match &self.layout.tree.node(inode.node).kind {
            Kind::Directory(_) => {
                let bytes = self.layout.directory(inode);
                self.put(start, &bytes[..end])
            }
            Kind::Symlink(target) => self.put(start, &target[..end]),
            Kind::File(content) => self.copy(content, len, start),
            Kind::Fifo => Ok(()),
        }
    }

    /// Copies the first `len` bytes of a file to the offset `start` of the image. Holes are left out.
    fn copy(&mut self, content: &Content, len: u64, start: u64) -> Result<(), ErofsError> {
        let mut buffer = vec![0; usize::try_from(PIECE.min(len)).unwrap_or(0)];
        for segment in &content.segments {
            let wanted = segment.len.min(len.saturating_sub(segment.at));
            let range = segment.offset..segment.offset + wanted;
            for extent in (self.layer(content)?.data(range)).map_err(ErofsError::Read)? {
                let mut at = extent.start;
                while at < extent.end {
                    let piece = PIECE.min(extent.end - at);
                    let part = &mut buffer[..usize::try_from(piece).unwrap_or(0)];
                    let read = self.layer(content)?.read_at(part, at);
                    read.map_err(ErofsError::Read)?;
                    let place = start + segment.at + (at - segment.offset);
                    self.out.put(place, part).map_err(ErofsError::Write)?;
                    at += piece;
                }
            }
        }
        Ok(())
    }

    fn put(&mut self, offset: u64, bytes: &[u8]) -> Result<(), ErofsError> {
        self.out.put(offset, bytes).map_err(ErofsError::Write)
    }
}

/// File type and permission bits.
fn mode(node: &Node) -> u16 {
    let kind = match node.kind {
        Kind::Directory(_) => 0o040_000,
        Kind::File(_) => 0o100_000,
        Kind::Symlink(_) => 0o120_000,
        Kind::Fifo => 0o010_000,
    };
    kind | node.meta.mode
}

/// The number as EROFS stores it. [`Limits::apparent`] and [`Limits::entries`] keep it far below 2^32.
fn low32(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn low16(number: u64) -> u16 {
    u16::try_from(number).unwrap_or(u16::MAX)
}
