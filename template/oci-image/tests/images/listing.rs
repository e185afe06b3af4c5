//! The contents of a merged tree or of a directory, as a map that can be compared.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::Path,
};

use oci_image::{
    Source,
    digest::Digest,
    tree::{Kind, NodeId, Tree},
};

/// One name of a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// File type and permission bits.
    pub(crate) mode: u32,
    pub(crate) owner: (u32, u32),
    pub(crate) mtime: (i64, i64),
    pub(crate) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Size and digest of a file, or the target of a link.
    pub(crate) content: String,
    /// The first name of the same file.
    pub(crate) first: Vec<u8>,
    pub(crate) links: u64,
}

pub(crate) type Listing = BTreeMap<Vec<u8>, Record>;

pub(crate) fn of_tree(tree: &Tree, layers: &[impl Source]) -> Listing {
    let mut names: BTreeMap<Vec<u8>, NodeId> = BTreeMap::new();
    let mut queue = vec![(Vec::new(), tree.root())];
    let mut links: HashMap<NodeId, u64> = HashMap::new();
    while let Some((path, id)) = queue.pop() {
        *links.entry(id).or_default() += 1;
        if let Kind::Directory(children) = &tree.node(id).kind {
            let dirs = children.values().filter(|c| is_dir(tree, **c)).count();
            *links.entry(id).or_default() += 1 + dirs as u64;
            for (name, child) in children {
                queue.push(([&path[..], b"/", name].concat(), *child));
            }
        }
        names.insert(path, id);
    }
    let mut first: HashMap<NodeId, Vec<u8>> = HashMap::new();
    let mut listing = Listing::new();
    for (path, id) in names {
        let node = tree.node(id);
        let (kind, content) = match &node.kind {
            Kind::Directory(_) => (0o040_000, String::new()),
            Kind::Symlink(target) => (0o120_000, String::from_utf8_lossy(target).into_owned()),
            Kind::Fifo => (0o010_000, String::new()),
            Kind::File(content) => {
                let mut bytes = vec![0; usize::try_from(content.size).unwrap()];
                for segment in &content.segments {
                    let at = usize::try_from(segment.at).unwrap();
                    let len = usize::try_from(segment.len).unwrap();
                    let layer = &layers[usize::try_from(content.layer).unwrap()];
                    layer
                        .read_at(&mut bytes[at..at + len], segment.offset)
                        .unwrap();
                }
                (0o100_000, summary(&bytes))
            }
        };
        let meta = &node.meta;
        let record = Record {
            mode: kind | u32::from(meta.mode),
            owner: (meta.uid, meta.gid),
            mtime: (meta.mtime.seconds, i64::from(meta.mtime.nanoseconds)),
            xattrs: meta.xattrs.iter().cloned().collect(),
            content,
            first: first.entry(id).or_insert_with(|| path.clone()).clone(),
            links: links[&id],
        };
        listing.insert(path, record);
    }
    listing
}

fn is_dir(tree: &Tree, id: NodeId) -> bool {
    matches!(tree.node(id).kind, Kind::Directory(_))
}

fn summary(bytes: &[u8]) -> String {
    format!("{} {}", bytes.len(), Digest::of(bytes))
}

pub(crate) fn of_directory(root: &Path) -> Listing {
    let mut paths = vec![Vec::new()];
    let mut queue = vec![root.to_owned()];
    while let Some(dir) = queue.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            let below = path.as_os_str().as_bytes()[root.as_os_str().len()..].to_vec();
            paths.push(below);
            if path.symlink_metadata().unwrap().is_dir() {
                queue.push(path);
            }
        }
    }
    paths.sort();
    let mut first: HashMap<u64, Vec<u8>> = HashMap::new();
    let mut listing = Listing::new();
    for below in paths {
        let path = root.join(std::ffi::OsStr::from_bytes(
            below.strip_prefix(b"/").unwrap_or(&below),
        ));
        let found = path.symlink_metadata().unwrap();
        let content = if found.is_symlink() {
            let target = fs::read_link(&path).unwrap();
            target.to_string_lossy().into_owned()
        } else if found.is_file() {
            summary(&fs::read(&path).unwrap())
        } else {
            String::new()
        };
        let record = Record {
            mode: found.mode(),
            owner: (found.uid(), found.gid()),
            mtime: (found.mtime(), found.mtime_nsec()),
            xattrs: xattrs(&path),
            content,
            first: first
                .entry(found.ino())
                .or_insert_with(|| below.clone())
                .clone(),
            links: found.nlink(),
        };
        listing.insert(below, record);
    }
    listing
}

fn xattrs(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut names = vec![0; 1 << 16];
    let len = rustix::fs::llistxattr(path, &mut names[..]).unwrap();
    let names = names[..len]
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty());
    names
        .map(|name| {
            let mut value = vec![0; 1 << 16];
            let text = std::str::from_utf8(name).unwrap();
            let len = rustix::fs::lgetxattr(path, text, &mut value[..]).unwrap();
            (name.to_vec(), value[..len].to_vec())
        })
        .collect()
}

/// The names in which two listings differ, with both records.
pub(crate) fn differences(a: &Listing, b: &Listing) -> Vec<String> {
    let mut names: Vec<_> = a.keys().chain(b.keys()).collect();
    names.sort();
    names.dedup();
    let different = names
        .into_iter()
        .filter(|name| a.get(*name) != b.get(*name));
    different
        .map(|name| {
            let text = format!(
                "{}: {:?} {:?}",
                name.escape_ascii(),
                a.get(name),
                b.get(name)
            );
            text.chars().take(800).collect()
        })
        .collect()
}
