//! The position of each inode and its data in the image.

use std::collections::HashMap;

use super::{BLOCK, ErofsError, SUPER_OFFSET, SUPER_SIZE};
use crate::{
    limits::Limits,
    tar::Meta,
    tree::{Kind, Node, NodeId, Tree},
};

/// Size of an inode in its extended form, in bytes.
const INODE: u64 = 64;
/// Inode numbers count units of 32 bytes.
const SLOT: u64 = 32;
const DIRENT: usize = 12;
const XATTR_HEADER: usize = 12;

pub(crate) struct Layout<'a> {
    pub(super) tree: &'a Tree,
    /// The root first, then the children of each directory in turn.
    pub(super) inodes: Vec<Inode>,
    index: HashMap<NodeId, usize>,
    /// The first block of the data.
    pub(super) data_start: u64,
    data_blocks: u64,
}

pub(super) struct Inode {
    pub(super) node: NodeId,
    /// Index of the directory that names it first. The root is its own parent.
    parent: usize,
    /// Offset in the image, in bytes.
    pub(super) offset: u64,
    pub(super) size: u64,
    /// Number of bytes at the end of the data that follow the inode. Zero: all data is in blocks.
    pub(super) inline: u64,
    /// First block of the rest of the data, relative to [`Layout::data_start`].
    pub(super) block: u64,
    pub(super) links: u32,
}

impl Inode {
    pub(super) fn number(&self) -> u64 {
        self.offset / SLOT
    }
}

impl<'a> Layout<'a> {
    pub(crate) fn of(tree: &'a Tree, limits: &Limits) -> Result<Self, ErofsError> {
        let mut layout = Self {
            tree,
            inodes: Vec::new(),
            index: HashMap::new(),
            data_start: 0,
            data_blocks: 0,
        };
        layout.visit();
        layout.place(limits)?;
        Ok(layout)
    }

    pub(super) fn blocks(&self) -> u64 {
        self.data_start + self.data_blocks
    }

    /// Lists all reachable nodes and counts their names.
    fn visit(&mut self) {
        self.add(self.tree.root(), 0);
        let mut next = 0;
        while next < self.inodes.len() {
            let node = self.tree.node(self.inodes[next].node);
            if let Kind::Directory(children) = &node.kind {
                // Its own `.`. The name in its parent was counted there.
                self.inodes[next].links += 1;
                for child in children.values() {
                    if let Some(known) = self.index.get(child) {
                        self.inodes[*known].links += 1;
                        continue;
                    }
                    self.add(*child, next);
                    if matches!(self.tree.node(*child).kind, Kind::Directory(_)) {
                        self.inodes[next].links += 1;
                    }
                }
            }
            next += 1;
        }
    }

    fn add(&mut self, node: NodeId, parent: usize) {
        self.index.insert(node, self.inodes.len());
        self.inodes.push(Inode {
            node,
            parent,
            offset: 0,
            size: 0,
            inline: 0,
            block: 0,
            links: 1,
        });
    }

    fn place(&mut self, limits: &Limits) -> Result<(), ErofsError> {
        let mut offset = SUPER_OFFSET + SUPER_SIZE;
        let mut apparent: u64 = 0;
        for inode in &mut self.inodes {
            let node = self.tree.node(inode.node);
            inode.size = data_size(node);
            apparent = apparent.saturating_add(inode.size);
            if apparent > limits.apparent {
                return Err(ErofsError::TooLarge(limits.apparent));
            }
            let head = INODE + xattr_size(&node.meta) as u64;
            let tail = inode.size % BLOCK;
            inode.inline = if head + tail <= BLOCK { tail } else { 0 };
            inode.block = self.data_blocks;
            self.data_blocks += (inode.size - inode.inline).div_ceil(BLOCK);
            inode.offset = fit(offset.next_multiple_of(SLOT), head, inode.inline);
            offset = inode.offset + head + inode.inline;
        }
        self.data_start = offset.div_ceil(BLOCK);
        Ok(())
    }

    /// The data of a directory: in each block first the entries, then their names. The names of all blocks are sorted.
    pub(super) fn directory(&self, inode: &Inode) -> Vec<u8> {
        let Kind::Directory(children) = &self.tree.node(inode.node).kind else {
            return Vec::new();
        };
        let parent = self.inodes[inode.parent].node;
        let mut names: Vec<(&[u8], NodeId)> = vec![(b".", inode.node), (b"..", parent)];
        names.extend(children.iter().map(|(name, child)| (&**name, *child)));
        names.sort_unstable();
        let mut data = Vec::new();
        let mut rest = &names[..];
        while !rest.is_empty() {
            data.resize(data.len().next_multiple_of(block()), 0);
            let count = fitting(rest.iter().map(|(name, _)| name.len()));
            let (now, later) = rest.split_at(count);
            self.append_block(now, &mut data);
            rest = later;
        }
        data
    }

    /// Checks that no two inodes overlap, and that each directory has its planned size.
    ///
    /// # Panics
    /// Panics if a check fails.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn check(&self) {
        let mut end = SUPER_OFFSET + SUPER_SIZE;
        for inode in &self.inodes {
            assert!(inode.offset >= end && inode.offset.is_multiple_of(SLOT));
            let node = self.tree.node(inode.node);
            end = inode.offset + INODE + xattr_size(&node.meta) as u64;
            assert!(inode.inline == 0 || end / BLOCK == (end + inode.inline - 1) / BLOCK);
            end += inode.inline;
            if matches!(node.kind, Kind::Directory(_)) {
                assert_eq!(self.directory(inode).len() as u64, inode.size);
            }
        }
        assert!(end <= self.data_start * BLOCK);
    }

    fn append_block(&self, names: &[(&[u8], NodeId)], data: &mut Vec<u8>) {
        let mut place = names.len() * DIRENT;
        for (name, node) in names {
            let number = self.inodes[self.index[node]].number();
            data.extend(number.to_le_bytes());
            data.extend(u16::try_from(place).unwrap_or(u16::MAX).to_le_bytes());
            data.extend([file_type(self.tree.node(*node)), 0]);
            place += name.len();
        }
        for (name, _) in names {
            data.extend(*name);
        }
    }
}

/// The first offset from `offset` on at which neither the inode nor the inline data crosses the end of a block.
fn fit(offset: u64, head: u64, inline: u64) -> u64 {
    let crosses = |begin: u64, len: u64| len > 0 && begin / BLOCK != (begin + len - 1) / BLOCK;
    if crosses(offset, INODE) || crosses(offset + head, inline) {
        return offset.next_multiple_of(BLOCK);
    }
    offset
}

fn block() -> usize {
    usize::try_from(BLOCK).unwrap_or(usize::MAX)
}

/// Number of entries with names of these lengths that fit into one block.
fn fitting(lengths: impl Iterator<Item = usize>) -> usize {
    let mut used = 0;
    let fits = |len: &usize| {
        used += DIRENT + len;
        used <= block()
    };
    lengths.take_while(fits).count()
}

fn data_size(node: &Node) -> u64 {
    match &node.kind {
        Kind::File(content) => content.size,
        Kind::Symlink(target) => target.len() as u64,
        Kind::Fifo => 0,
        Kind::Directory(children) => {
            // The blocks are filled as in `Layout::directory`, in the same order.
            let mut lengths: Vec<(&[u8], usize)> = vec![(b".", 1), (b"..", 2)];
            lengths.extend(children.keys().map(|name| (&**name, name.len())));
            lengths.sort_unstable();
            let (mut size, mut used) = (0, 0);
            for (_, len) in lengths {
                if used + DIRENT + len > block() {
                    size += BLOCK;
                    used = 0;
                }
                used += DIRENT + len;
            }
            size + used as u64
        }
    }
}

fn file_type(node: &Node) -> u8 {
    match node.kind {
        Kind::File(_) => 1,
        Kind::Directory(_) => 2,
        Kind::Fifo => 5,
        Kind::Symlink(_) => 7,
    }
}

/// The number of an attribute's namespace and the rest of its name. `None` if EROFS cannot store it.
pub(crate) fn xattr_name(name: &[u8]) -> Option<(u8, &[u8])> {
    match name {
        b"system.posix_acl_access" => return Some((2, b"")),
        b"system.posix_acl_default" => return Some((3, b"")),
        _ => {}
    }
    let spaces = [(1, &b"user."[..]), (4, b"trusted."), (6, b"security.")];
    let found = spaces.iter().find_map(|(number, prefix)| {
        let rest = name.strip_prefix(*prefix)?;
        Some((*number, rest))
    });
    found.filter(|(_, rest)| !rest.is_empty() && rest.len() <= 255)
}

/// Size of a node's attributes in the image, in bytes.
pub(crate) fn xattr_size(meta: &Meta) -> usize {
    if meta.xattrs.is_empty() {
        return 0;
    }
    let entry = |(name, value): &(Vec<u8>, Vec<u8>)| {
        let rest = xattr_name(name).map_or(0, |(_, rest)| rest.len());
        (4 + rest + value.len()).next_multiple_of(4)
    };
    XATTR_HEADER + meta.xattrs.iter().map(entry).sum::<usize>()
}

/// The size as inodes store it: the header counts as one unit, everything else in units of four bytes.
pub(super) fn xattr_count(meta: &Meta) -> u16 {
    let size = xattr_size(meta).checked_sub(XATTR_HEADER);
    u16::try_from(size.map_or(0, |size| size / 4 + 1)).unwrap_or(u16::MAX)
}

pub(super) fn write_xattrs(meta: &Meta, bytes: &mut Vec<u8>) {
    if meta.xattrs.is_empty() {
        return;
    }
    bytes.extend([0; XATTR_HEADER]);
    for (name, value) in &meta.xattrs {
        let Some((space, rest)) = xattr_name(name) else {
            continue;
        };
        let len = u16::try_from(value.len()).unwrap_or(u16::MAX);
        bytes.extend([u8::try_from(rest.len()).unwrap_or(u8::MAX), space]);
        bytes.extend(len.to_le_bytes());
        bytes.extend(rest);
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
}
