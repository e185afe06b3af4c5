//! The recorded changes of a directory, and the states in which a crash can leave it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    fs::{self, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use crate::trace::{Step, TraceError, below, steps};

type Inode = usize;
/// A name in a directory.
type Slot = (Inode, String);
/// Names, and their new targets.
type Renames = [(Slot, Option<Inode>)];

/// The recorded directory.
const ROOT: Inode = 0;
/// Up to this number of changes that may or may not survive, every combination is tried.
const ALL_COMBINATIONS: usize = 4;
/// Contents of a file that another program wrote through a descriptor.
const WRITTEN_ELSEWHERE: &[u8] = b"written by a program that was not traced";

#[derive(Clone, Debug)]
enum Change {
    /// Changed names and their new targets.
    Names(Vec<(Slot, Option<Inode>)>),
    /// The new contents of a file.
    Contents(Inode, Vec<u8>),
    Sync(Inode, PathBuf),
    /// Text that the traced program wrote to mark its progress.
    Mark(String),
}

/// All changes of a directory.
#[derive(Clone, Debug)]
pub struct Recording {
    changes: Vec<Change>,
    is_dir: Vec<bool>,
}

/// State of an unsynced file after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Unsynced {
    Whole,
    Empty,
    Half,
    Zeros,
}

/// A directory after a crash: for each path below it, the contents of the file, or `None` for a directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tree(BTreeMap<PathBuf, Option<Vec<u8>>>);

/// A crash and one of the states that it can leave.
#[derive(Clone, Debug)]
pub struct Crash {
    /// Number of changes before the crash, for [`Recording::marks`].
    pub at: usize,
    pub tree: Tree,
}

impl fmt::Display for Tree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (path, contents) in &self.0 {
            let path = path.display();
            match contents {
                None => writeln!(f, "{path}/")?,
                Some(bytes) => writeln!(f, "{path}: {:?}", String::from_utf8_lossy(bytes))?,
            }
        }
        Ok(())
    }
}

impl Tree {
    /// Writes the tree into an existing directory, with files that only their owner can read: the recording has no
    /// modes, and programs refuse secrets that others can read. `edit` may change the contents of each file.
    ///
    /// # Errors
    /// Returns the first error of a file operation.
    pub fn write(&self, to: &Path, edit: impl Fn(&Path, &[u8]) -> Vec<u8>) -> io::Result<()> {
        for (path, contents) in &self.0 {
            match contents {
                None => fs::create_dir(to.join(path))?,
                Some(bytes) => {
                    let mut options = OpenOptions::new();
                    options.write(true).create(true).truncate(true).mode(0o600);
                    let mut file = options.open(to.join(path))?;
                    file.write_all(&edit(path, bytes))?;
                }
            }
        }
        Ok(())
    }

    /// Names and contents of the files directly in a directory.
    #[must_use]
    pub fn files(&self, dir: &Path) -> BTreeMap<String, Vec<u8>> {
        let inside = self.0.iter().filter(|(path, _)| path.parent() == Some(dir));
        inside
            .filter_map(|(path, contents)| {
                let name = path.file_name()?.to_string_lossy().into_owned();
                Some((name, contents.clone()?))
            })
            .collect()
    }

    /// All directories.
    pub fn dirs(&self) -> impl Iterator<Item = &Path> {
        let dirs = self.0.iter().filter(|(_, contents)| contents.is_none());
        dirs.map(|(path, _)| path.as_path())
    }

    /// The contents of a file; `None` if there is no such file.
    #[must_use]
    pub fn file(&self, path: &Path) -> Option<&[u8]> {
        self.0.get(path)?.as_deref()
    }
}

impl Recording {
    /// Reads a trace made with [`crate::TRACED`]. Changes outside `root` are ignored, except writes to `marks`, each of
    /// which is a mark.
    ///
    /// # Errors
    /// Returns [`TraceError`] for a line that cannot be read.
    pub fn new(trace: &str, root: &Path, marks: &Path) -> Result<Self, TraceError> {
        let mut builder = Builder::default();
        for step in steps(trace)? {
            builder.add(step, root, marks);
        }
        Ok(builder.finish())
    }

    /// The marks before a crash, oldest first.
    #[must_use]
    pub fn marks(&self, at: usize) -> Vec<&str> {
        let before = self.changes.iter().take(at);
        before
            .filter_map(|change| match change {
                Change::Mark(text) => Some(text.as_str()),
                _ => None,
            })
            .collect()
    }

    /// The syncs: the number of the change, and the path that was synced.
    #[must_use]
    pub fn syncs(&self) -> Vec<(usize, &Path)> {
        let numbered = self.changes.iter().enumerate();
        numbered
            .filter_map(|(n, change)| match change {
                Change::Sync(_, path) => Some((n, path.as_path())),
                _ => None,
            })
            .collect()
    }

    /// The same changes without the sync at this position.
    #[must_use]
    pub fn without(&self, sync: usize) -> Self {
        let mut less = self.clone();
        less.changes[sync] = Change::Mark(String::new());
        less
    }

    /// All crashes, with the states that each can leave. A mark `checkpoint` stands for a long time without a crash,
    /// after which everything is on disk.
    #[must_use]
    pub fn crashes(&self) -> Vec<Crash> {
        let mut crashes = Vec::new();
        let mut disk = Disk::new(self);
        for at in 0..=self.changes.len() {
            let mut seen = BTreeSet::new();
            for (kept, unsynced) in disk.variants() {
                let tree = disk.tree(&kept, unsynced);
                if seen.insert(tree.clone()) {
                    crashes.push(Crash { at, tree });
                }
            }
            if let Some(change) = self.changes.get(at) {
                disk.apply(change);
            }
        }
        crashes
    }
}

/// Builds a recording from steps.
#[derive(Default)]
struct Builder {
    changes: Vec<Change>,
    is_dir: Vec<bool>,
    names: HashMap<Slot, Inode>,
    contents: HashMap<Inode, Vec<u8>>,
}

impl Builder {
    fn add(&mut self, step: Step, root: &Path, marks: &Path) {
        if self.is_dir.is_empty() {
            self.is_dir.push(true);
        }
        if let Step::Write(path, _, text) = &step
            && path == marks
        {
            let text = String::from_utf8_lossy(text);
            let lines = text.lines().map(|line| Change::Mark(line.to_owned()));
            return self.changes.extend(lines);
        }
        let slot = |this: &Self, path: &Path| this.slot(&below(path, root)?);
        let inode = |this: &Self, path: &Path| this.inode(&below(path, root)?);
        match step {
            Step::Open { path, truncates } => match (inode(self, &path), slot(self, &path)) {
                (Some(file), _) if truncates => {
                    self.changes.push(Change::Contents(file, Vec::new()));
                    self.contents.insert(file, Vec::new());
                }
                (None, Some(slot)) => self.make(slot, false),
                _ => {}
            },
            Step::MakeDir(path) => {
                if let Some(slot) = slot(self, &path) {
                    self.make(slot, true);
                }
            }
            Step::Remove(path) => {
                if let Some(slot) = slot(self, &path) {
                    self.rename(vec![(slot, None)]);
                }
            }
            Step::Rename(from, to) => {
                let moved = inode(self, &from);
                if let (Some(from), Some(to)) = (slot(self, &from), slot(self, &to)) {
                    self.rename(vec![(from, None), (to, moved)]);
                }
            }
            Step::Link(from, to) => {
                if let (Some(file), Some(to)) = (inode(self, &from), slot(self, &to)) {
                    self.rename(vec![(to, Some(file))]);
                }
            }
            Step::Write(path, offset, bytes) => {
                if let Some(file) = inode(self, &path) {
                    let contents = self.contents.entry(file).or_default();
                    let offset = offset.unwrap_or(contents.len());
                    contents.resize(contents.len().max(offset + bytes.len()), 0);
                    contents[offset..offset + bytes.len()].copy_from_slice(&bytes);
                    self.changes.push(Change::Contents(file, contents.clone()));
                }
            }
            Step::Sync(path) => {
                if let Some(inode) = inode(self, &path) {
                    let path = below(&path, root).unwrap_or_default();
                    self.changes.push(Change::Sync(inode, path));
                }
            }
        }
    }

    fn inode(&self, path: &Path) -> Option<Inode> {
        path.iter().try_fold(ROOT, |dir, name| {
            let slot = (dir, name.to_string_lossy().into_owned());
            self.names.get(&slot).copied()
        })
    }

    fn slot(&self, path: &Path) -> Option<Slot> {
        let name = path.file_name()?.to_string_lossy().into_owned();
        Some((self.inode(path.parent()?)?, name))
    }

    fn make(&mut self, slot: Slot, is_dir: bool) {
        let inode = self.is_dir.len();
        self.is_dir.push(is_dir);
        self.rename(vec![(slot, Some(inode))]);
    }

    fn rename(&mut self, changed: Vec<(Slot, Option<Inode>)>) {
        for (slot, inode) in &changed {
            match inode {
                Some(inode) => self.names.insert(slot.clone(), *inode),
                None => self.names.remove(slot),
            };
        }
        self.changes.push(Change::Names(changed));
    }

    /// Adds the initial contents of files that the traced program never wrote, at their creation.
    fn finish(self) -> Recording {
        let mut changes = Vec::new();
        let mut seen = BTreeSet::from([ROOT]);
        for change in self.changes {
            let made = match &change {
                Change::Names(names) => names.iter().filter_map(|(_, inode)| *inode).collect(),
                _ => Vec::new(),
            };
            changes.push(change);
            for inode in made {
                let is_new = seen.insert(inode);
                if is_new && !self.is_dir[inode] && !self.contents.contains_key(&inode) {
                    changes.push(Change::Contents(inode, WRITTEN_ELSEWHERE.to_vec()));
                }
            }
        }
        Recording {
            changes,
            is_dir: self.is_dir,
        }
    }
}

/// The changes before a crash, and which of them are certain to survive.
struct Disk<'a> {
    recording: &'a Recording,
    /// The changes of names, oldest first, and whether each is certain to survive.
    names: Vec<(&'a Renames, bool)>,
    /// The contents of each file, and whether they are certain to survive.
    contents: HashMap<Inode, (&'a [u8], bool)>,
    /// The result of the certain changes before the first uncertain one.
    base: HashMap<Slot, Inode>,
}

impl<'a> Disk<'a> {
    fn new(recording: &'a Recording) -> Self {
        Self {
            recording,
            names: Vec::new(),
            contents: HashMap::new(),
            base: HashMap::new(),
        }
    }

    fn apply(&mut self, change: &'a Change) {
        match change {
            Change::Names(changed) => self.names.push((changed, false)),
            Change::Contents(file, bytes) => {
                self.contents.insert(*file, (bytes, false));
            }
            Change::Sync(inode, _) if self.recording.is_dir[*inode] => {
                let touches =
                    |changed: &[(Slot, _)]| changed.iter().any(|((dir, _), _)| dir == inode);
                let synced: Vec<_> = (0..self.names.len())
                    .filter(|n| touches(self.names[*n].0))
                    .collect();
                for n in self.with_earlier(synced) {
                    self.names[n].1 = true;
                }
            }
            Change::Sync(inode, _) => {
                if let Some((_, synced)) = self.contents.get_mut(inode) {
                    *synced = true;
                }
            }
            Change::Mark(text) if text == "checkpoint" => {
                self.names
                    .iter_mut()
                    .for_each(|(_, certain)| *certain = true);
                self.contents
                    .values_mut()
                    .for_each(|(_, synced)| *synced = true);
            }
            Change::Mark(_) => {}
        }
        let certain = self
            .names
            .iter()
            .take_while(|(_, certain)| *certain)
            .count();
        for (changed, _) in self.names.drain(..certain) {
            rename(&mut self.base, changed);
        }
    }

    /// Adds the earlier changes of the same names to a set of changes.
    fn with_earlier(&self, chosen: Vec<usize>) -> BTreeSet<usize> {
        let mut kept = BTreeSet::new();
        let mut wanted: BTreeSet<&Slot> = BTreeSet::new();
        let chosen: BTreeSet<_> = chosen.into_iter().collect();
        for n in (0..self.names.len()).rev() {
            let slots = || self.names[n].0.iter().map(|(slot, _)| slot);
            if chosen.contains(&n) || slots().any(|slot| wanted.contains(slot)) {
                kept.insert(n);
                wanted.extend(slots());
            }
        }
        kept
    }

    /// The sets of changes to try, with the states of unsynced files.
    fn variants(&self) -> Vec<(BTreeSet<usize>, Unsynced)> {
        let certain: Vec<_> = (0..self.names.len()).filter(|n| self.names[*n].1).collect();
        let open: Vec<_> = (0..self.names.len())
            .filter(|n| !self.names[*n].1)
            .collect();
        let mut sets = BTreeSet::new();
        let mut add = |chosen: Vec<usize>| {
            sets.insert(self.with_earlier([certain.clone(), chosen].concat()));
        };
        if open.len() <= ALL_COMBINATIONS {
            for mask in 0_u32..1 << open.len() {
                let chosen = open.iter().enumerate();
                add(chosen
                    .filter(|(bit, _)| mask >> bit & 1 == 1)
                    .map(|(_, n)| *n)
                    .collect());
            }
        } else {
            for n in 0..=open.len() {
                add(open[..n].to_vec());
            }
            for n in &open {
                add(vec![*n]);
                add(open.iter().copied().filter(|other| other != n).collect());
            }
        }
        // Each set with whole files, and in turn with one of the other states.
        let torn = [Unsynced::Empty, Unsynced::Half, Unsynced::Zeros];
        let looks = torn.into_iter().cycle().skip(self.names.len() % torn.len());
        sets.into_iter()
            .zip(looks)
            .flat_map(|(set, look)| [(set.clone(), Unsynced::Whole), (set, look)])
            .collect()
    }

    fn tree(&self, kept: &BTreeSet<usize>, unsynced: Unsynced) -> Tree {
        let mut names = self.base.clone();
        for n in kept {
            rename(&mut names, self.names[*n].0);
        }
        let mut children: HashMap<Inode, Vec<(&str, Inode)>> = HashMap::new();
        for ((dir, name), inode) in &names {
            children.entry(*dir).or_default().push((name, *inode));
        }
        let mut tree = BTreeMap::new();
        let mut todo = vec![(PathBuf::new(), ROOT)];
        while let Some((path, dir)) = todo.pop() {
            for (name, inode) in children.get(&dir).into_iter().flatten() {
                let path = path.join(name);
                if self.recording.is_dir[*inode] {
                    tree.insert(path.clone(), None);
                    todo.push((path, *inode));
                } else {
                    tree.insert(path, Some(self.look(*inode, unsynced)));
                }
            }
        }
        Tree(tree)
    }

    fn look(&self, file: Inode, unsynced: Unsynced) -> Vec<u8> {
        let (bytes, is_synced) = self.contents.get(&file).copied().unwrap_or_default();
        match unsynced {
            _ if is_synced => bytes.to_vec(),
            Unsynced::Whole => bytes.to_vec(),
            Unsynced::Empty => Vec::new(),
            Unsynced::Half => bytes[..bytes.len() / 2].to_vec(),
            Unsynced::Zeros => vec![0; bytes.len()],
        }
    }
}

fn rename(names: &mut HashMap<Slot, Inode>, changed: &[(Slot, Option<Inode>)]) {
    for (slot, inode) in changed {
        match inode {
            Some(inode) => names.insert(slot.clone(), *inode),
            None => names.remove(slot),
        };
    }
}

#[cfg(test)]
mod tests;
