//! Merges the layers of an image to one tree in memory: metadata and names, with references to the contents.
//!
//! A layer is applied in two passes. The first pass removes the files of lower layers that its whiteouts hide. The
//! second adds its entries in order. The result therefore does not depend on the position of a whiteout in its layer. A
//! tree has no `..`, no links out of it and no devices, whatever the layers contain. No lookup ever leaves it.

use std::collections::BTreeMap;

use crate::{
    erofs::layout,
    limits::Limits,
    tar::{Content, Entry, EntryKind, Meta},
};

/// PATH_MAX and NAME_MAX of Linux, and the longest target of a symbolic link.
const MAX_PATH: usize = 4096;
const MAX_NAME: usize = 255;
const MAX_TARGET: usize = 4095;
/// Limit of one file's extended attributes in the image, in bytes. Linux lists at most 64 KiB.
const MAX_XATTRS: usize = 60 << 10;
/// Maximum number of symbolic links in one lookup, as in Linux.
const MAX_LINKS: usize = 40;
const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";

/// Index of a node in its tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(usize);

/// A file system tree. Nodes that are no longer reachable stay in memory until the tree is dropped.
#[derive(Clone, Debug)]
pub struct Tree {
    nodes: Vec<Node>,
    steps: u64,
    limits: Limits,
}

/// An inode. Hard links are several names of one node.
#[derive(Clone, Debug)]
pub struct Node {
    pub meta: Meta,
    pub kind: Kind,
}

#[derive(Clone, Debug)]
pub enum Kind {
    Directory(BTreeMap<Box<[u8]>, NodeId>),
    File(Content),
    Symlink(Box<[u8]>),
    Fifo,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("layer entry {path:?} {fault}")]
pub struct MergeError {
    /// Truncated to 200 characters.
    pub path: String,
    pub fault: Fault,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("has '..' in its path")]
    Parent,
    #[error("has a NUL in its path or link target")]
    Nul,
    #[error("has a path of more than {MAX_PATH} bytes or a name of more than {MAX_NAME}")]
    TooLong,
    #[error("has an empty link target or one of more than {MAX_TARGET} bytes")]
    Target,
    #[error("has more than {MAX_XATTRS} bytes of extended attributes")]
    Xattrs,
    #[error("is the root directory, but not a directory")]
    Root,
    #[error("is a whiteout without a name, or lies below a whiteout")]
    Whiteout,
    #[error("is a device outside of /dev: images with devices are refused")]
    Device,
    #[error("is a hard link to {0:?}, which is missing or a directory")]
    Hardlink(String),
    #[error("passes through more than {MAX_LINKS} symbolic links")]
    Loop,
    #[error("exceeds the limit of {0} files and directories")]
    Nodes(usize),
    #[error("exceeds the limit of {0} steps for looking up paths")]
    Steps(u64),
}

/// Whether a lookup follows symbolic links.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Links {
    Follow,
    Refuse,
}

impl Tree {
    /// A tree that contains only an empty root directory.
    #[must_use]
    pub fn new(limits: &Limits) -> Self {
        Self {
            nodes: vec![implied_directory()],
            steps: limits.steps,
            limits: limits.clone(),
        }
    }

    #[must_use]
    pub fn root(&self) -> NodeId {
        NodeId(0)
    }

    /// # Panics
    /// Panics if `id` is from another tree.
    #[must_use]
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0]
    }

    /// The node at a path. Follows all symbolic links, including the last. `None` if it does not exist.
    #[must_use]
    pub fn find(&self, path: &[u8]) -> Option<NodeId> {
        let mut dirs = vec![self.root()];
        let mut ahead = reversed(path);
        let mut at = self.root();
        let mut links = 0;
        while let Some(name) = ahead.pop() {
            if *name == *b".." {
                leave(&mut dirs);
                at = *dirs.last()?;
                continue;
            }
            let Kind::Directory(children) = &self.node(at).kind else {
                return None;
            };
            let child = *children.get(&name)?;
            match &self.node(child).kind {
                Kind::Symlink(target) => {
                    links += 1;
                    if links > MAX_LINKS {
                        return None;
                    }
                    follow(target, &mut dirs, &mut ahead);
                    at = *dirs.last()?;
                }
                Kind::Directory(_) => {
                    dirs.push(child);
                    at = child;
                }
                Kind::File(_) | Kind::Fifo => at = child,
            }
        }
        Some(at)
    }

    /// Makes the directory at `path` and everything below it readable and writable for all users.
    pub(crate) fn open_to_all(&mut self, path: &[u8]) {
        let mut queue = Vec::from_iter(self.find(path));
        while let Some(NodeId(index)) = queue.pop() {
            let node = &mut self.nodes[index];
            match &node.kind {
                Kind::Directory(children) => queue.extend(children.values()),
                Kind::File(_) | Kind::Fifo => {}
                Kind::Symlink(_) => continue,
            }
            node.meta.mode = 0o777;
        }
    }

    /// Applies a layer on top of the layers applied before.
    ///
    /// # Errors
    /// Returns an error that names the first entry that cannot be applied. The tree is then incomplete.
    pub fn apply(&mut self, entries: Vec<Entry>) -> Result<(), MergeError> {
        for entry in &entries {
            self.hide(entry).map_err(|fault| at(&entry.path, fault))?;
        }
        for entry in entries {
            let path = entry.path.clone();
            self.add(entry).map_err(|fault| at(&path, fault))?;
        }
        Ok(())
    }

    /// Removes the files that `entry` hides, if it is a whiteout.
    fn hide(&mut self, entry: &Entry) -> Result<(), Fault> {
        let path = components(&entry.path)?;
        let Some((name, parents)) = path.split_last() else {
            return Ok(());
        };
        if parents.iter().any(|name| name.starts_with(WHITEOUT)) {
            return Err(Fault::Whiteout);
        }
        let Some(hidden) = name.strip_prefix(WHITEOUT) else {
            return Ok(());
        };
        if matches!(hidden, b"" | b"." | b"..") {
            return Err(Fault::Whiteout);
        }
        // A symbolic link in place of the directory hides nothing.
        let Some(directory) = self.directory(parents)? else {
            return Ok(());
        };
        let children = self.children(directory);
        if *name == OPAQUE {
            children.clear();
        } else {
            children.remove(hidden);
        }
        Ok(())
    }

    fn add(&mut self, mut entry: Entry) -> Result<(), Fault> {
        entry.meta.xattrs.retain(|(name, _)| is_kept(name));
        if layout::xattr_size(&entry.meta) > MAX_XATTRS {
            return Err(Fault::Xattrs);
        }
        let path = components(&entry.path)?;
        let Some((name, parents)) = path.split_last() else {
            return match entry.kind {
                EntryKind::Directory => {
                    self.nodes[0].meta = entry.meta;
                    Ok(())
                }
                _ => Err(Fault::Root),
            };
        };
        if name.starts_with(WHITEOUT) {
            return Ok(());
        }
        let kind = match entry.kind {
            // The guest's kernel provides /dev.
            EntryKind::Device if path[0] == b"dev" && path.len() > 1 => return Ok(()),
            EntryKind::Device => return Err(Fault::Device),
            EntryKind::Directory => {
                let parent = self.make_directories(parents)?;
                return self.add_directory(parent, name, entry.meta);
            }
            EntryKind::Hardlink(target) => {
                let linked = self.link_target(&target)?;
                let parent = self.make_directories(parents)?;
                self.children(parent).insert((*name).into(), linked);
                return Ok(());
            }
            EntryKind::File(content) => Kind::File(content),
            EntryKind::Symlink(target) if target.contains(&0) => return Err(Fault::Nul),
            EntryKind::Symlink(target) if target.is_empty() || target.len() > MAX_TARGET => {
                return Err(Fault::Target);
            }
            EntryKind::Symlink(target) => Kind::Symlink(target.into()),
            EntryKind::Fifo => Kind::Fifo,
        };
        let parent = self.make_directories(parents)?;
        let meta = entry.meta;
        let id = self.push(Node { meta, kind })?;
        self.children(parent).insert((*name).into(), id);
        Ok(())
    }

    /// Adds a directory. It keeps the children of a directory that it replaces.
    fn add_directory(&mut self, parent: NodeId, name: &[u8], meta: Meta) -> Result<(), Fault> {
        let present = self.children(parent).get(name).copied();
        if let Some(NodeId(index)) = present
            && matches!(self.nodes[index].kind, Kind::Directory(_))
        {
            self.nodes[index].meta = meta;
            return Ok(());
        }
        let kind = Kind::Directory(BTreeMap::new());
        let id = self.push(Node { meta, kind })?;
        self.children(parent).insert(name.into(), id);
        Ok(())
    }

    /// The target node of a hard link. Follows symbolic links in its directory, but not at its end.
    fn link_target(&mut self, target: &[u8]) -> Result<NodeId, Fault> {
        let missing = || Fault::Hardlink(shown(target));
        let path = components(target)?;
        let (name, parents) = path.split_last().ok_or_else(missing)?;
        let parent = self.walk(parents, Links::Follow)?.ok_or_else(missing)?;
        let linked = self.children(parent).get(*name).copied();
        let linked = linked.ok_or_else(missing)?;
        match self.node(linked).kind {
            Kind::Directory(_) => Err(missing()),
            Kind::File(_) | Kind::Symlink(_) | Kind::Fifo => Ok(linked),
        }
    }

    /// The directory at a path without symbolic links. `None` if it does not exist.
    fn directory(&mut self, path: &[&[u8]]) -> Result<Option<NodeId>, Fault> {
        self.walk(path, Links::Refuse)
    }

    /// The directory at a path. `None` if it does not exist.
    fn walk(&mut self, path: &[&[u8]], links: Links) -> Result<Option<NodeId>, Fault> {
        let mut walk = Walk::new(path);
        loop {
            self.step()?;
            let Some((at, name)) = walk.next() else {
                return Ok(Some(walk.at()));
            };
            let child = self.children(at).get(&name).copied();
            let Some(child) = child else {
                return Ok(None);
            };
            match (&self.node(child).kind, links) {
                (Kind::Directory(_), _) => walk.enter(child),
                (Kind::Symlink(target), Links::Follow) => walk.follow(target)?,
                _ => return Ok(None),
            }
        }
    }

    /// The directory at a path. Follows symbolic links. Creates directories that are missing or hidden by a file.
    fn make_directories(&mut self, path: &[&[u8]]) -> Result<NodeId, Fault> {
        let mut walk = Walk::new(path);
        loop {
            self.step()?;
            let Some((at, name)) = walk.next() else {
                return Ok(walk.at());
            };
            let child = self.children(at).get(&name).copied();
            match child.map(|child| (child, &self.node(child).kind)) {
                Some((child, Kind::Directory(_))) => walk.enter(child),
                Some((_, Kind::Symlink(target))) => walk.follow(target)?,
                Some((_, Kind::File(_) | Kind::Fifo)) | None => {
                    let id = self.push(implied_directory())?;
                    self.children(at).insert(name, id);
                    walk.enter(id);
                }
            }
        }
    }

    fn step(&mut self) -> Result<(), Fault> {
        let exceeded = Fault::Steps(self.limits.steps);
        self.steps = self.steps.checked_sub(1).ok_or(exceeded)?;
        Ok(())
    }

    fn push(&mut self, node: Node) -> Result<NodeId, Fault> {
        if self.nodes.len() > self.limits.entries {
            return Err(Fault::Nodes(self.limits.entries));
        }
        self.nodes.push(node);
        Ok(NodeId(self.nodes.len() - 1))
    }

    /// The children of a directory.
    ///
    /// # Panics
    /// Panics if `id` is not a directory, which the callers have checked.
    fn children(&mut self, id: NodeId) -> &mut BTreeMap<Box<[u8]>, NodeId> {
        match &mut self.nodes[id.0].kind {
            Kind::Directory(children) => children,
            other => panic!("{other:?} is not a directory"),
        }
    }
}

/// A lookup in progress: the directories passed, ending with the current one, and the remaining names.
struct Walk {
    dirs: Vec<NodeId>,
    ahead: Vec<Box<[u8]>>,
    links: usize,
}

impl Walk {
    fn new(path: &[&[u8]]) -> Self {
        Self {
            dirs: vec![NodeId(0)],
            ahead: path.iter().rev().map(|name| Box::from(*name)).collect(),
            links: 0,
        }
    }

    fn at(&self) -> NodeId {
        self.dirs.last().copied().unwrap_or(NodeId(0))
    }

    /// The current directory and the next name to look up in it.
    fn next(&mut self) -> Option<(NodeId, Box<[u8]>)> {
        loop {
            let name = self.ahead.pop()?;
            if *name != *b".." {
                return Some((self.at(), name));
            }
            leave(&mut self.dirs);
        }
    }

    fn enter(&mut self, child: NodeId) {
        self.dirs.push(child);
    }

    fn follow(&mut self, target: &[u8]) -> Result<(), Fault> {
        self.links += 1;
        if self.links > MAX_LINKS {
            return Err(Fault::Loop);
        }
        follow(target, &mut self.dirs, &mut self.ahead);
        Ok(())
    }
}

/// Continues a lookup at the target of a symbolic link. An absolute target begins at the root of the tree.
fn follow(target: &[u8], dirs: &mut Vec<NodeId>, ahead: &mut Vec<Box<[u8]>>) {
    if target.starts_with(b"/") {
        dirs.truncate(1);
    }
    ahead.extend(reversed(target));
}

/// The parent of the root is the root.
fn leave(dirs: &mut Vec<NodeId>) {
    if dirs.len() > 1 {
        dirs.pop();
    }
}

/// The names of a path in reverse order, including `..`.
fn reversed(path: &[u8]) -> Vec<Box<[u8]>> {
    let names = path.split(|byte| *byte == b'/');
    let names = names.filter(|name| !matches!(*name, b"" | b"."));
    names.rev().map(Box::from).collect()
}

/// The names of an entry's path. A leading `/` is the root of the image.
fn components(path: &[u8]) -> Result<Vec<&[u8]>, Fault> {
    if path.len() > MAX_PATH {
        return Err(Fault::TooLong);
    }
    if path.contains(&0) {
        return Err(Fault::Nul);
    }
    let names = path.split(|byte| *byte == b'/');
    let names: Vec<_> = names.filter(|name| !matches!(*name, b"" | b".")).collect();
    if names.contains(&&b".."[..]) {
        return Err(Fault::Parent);
    }
    if names.iter().any(|name| name.len() > MAX_NAME) {
        return Err(Fault::TooLong);
    }
    Ok(names)
}

/// Whether an extended attribute is kept for the guest. Labels and signatures in `security.` belong to the host that
/// made the image, and the guest's overlayfs would obey `trusted.overlay.`.
fn is_kept(name: &[u8]) -> bool {
    let is_unwanted = name.starts_with(b"trusted.overlay.")
        || (name.starts_with(b"security.") && name != b"security.capability");
    !is_unwanted && layout::xattr_name(name).is_some()
}

/// A directory that is implied by a path but has no entry.
fn implied_directory() -> Node {
    Node {
        meta: Meta {
            mode: 0o755,
            ..Meta::default()
        },
        kind: Kind::Directory(BTreeMap::new()),
    }
}

fn at(path: &[u8], fault: Fault) -> MergeError {
    let path = shown(path);
    MergeError { path, fault }
}

/// Formats a path for an error message.
fn shown(path: &[u8]) -> String {
    String::from_utf8_lossy(path).chars().take(200).collect()
}
