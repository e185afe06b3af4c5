//! A directory, or a tree of them, under inotify(7).
//!
//! The kernel watches single directories, so a tree is watched by following its own events: a new directory is watched
//! first and then read, and its entries are reported as created. The kernel reports entries that were created between
//! these two steps as well; `Tree::announced` filters out these repetitions until the kernel's queue has been empty
//! once. A directory that moves within the tree keeps its watch; one that leaves the tree loses it.
//!
//! Invariant: no change is lost silently. If one may be lost (the kernel's queue overflows, there are too many
//! directories), the tree fails permanently with an error.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fs, io,
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
};

use envd::EventType;
use nix::{
    errno::Errno,
    sys::inotify::{AddWatchFlags as Mask, InitFlags, Inotify, InotifyEvent, WatchDescriptor},
};

/// Largest number of directories in a tree.
const MAX_DIRS: usize = 8192;
/// Largest number of names that are read when watching begins.
const MAX_NAMES: usize = 256 << 10;
/// Largest number of names that are reported when a directory appears.
const MAX_NEWS: usize = 16 << 10;

/// Events that are requested from the kernel: those for which E2B has an event type.
const CHANGES: Mask = Mask::IN_CREATE
    .union(Mask::IN_MODIFY)
    .union(Mask::IN_ATTRIB)
    .union(Mask::IN_DELETE)
    .union(Mask::IN_DELETE_SELF)
    .union(Mask::IN_MOVED_FROM)
    .union(Mask::IN_MOVED_TO)
    .union(Mask::IN_MOVE_SELF)
    .union(Mask::IN_ONLYDIR);

/// A tree cannot be watched, or can no longer be watched.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WatchError {
    #[error("changes came faster than they could be read, some are lost")]
    Overflow,
    #[error(
        "more than {MAX_DIRS} directories or {MAX_NAMES} names, or {MAX_NEWS} that appear at once"
    )]
    TooLarge,
    #[error("the system's limit of watched directories is reached")]
    NoWatches,
    #[error("cannot watch '{path}'")]
    System {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// A change in a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    /// Relative to the tree's root; empty for the root itself.
    pub(crate) path: PathBuf,
    pub(crate) kind: EventType,
}

/// A watched directory or tree.
pub(crate) struct Tree {
    inotify: Inotify,
    base: PathBuf,
    reach: Reach,
    root: WatchDescriptor,
    /// Watched directories, relative to the root.
    dirs: BTreeMap<WatchDescriptor, PathBuf>,
    /// Names that were reported as created when their directory was read. The kernel may report them again.
    announced: BTreeSet<(WatchDescriptor, OsString)>,
    /// Watches of directories that were moved away, with the cookie of the move, until the event of its destination
    /// arrives.
    moved: Vec<(u32, Subtree)>,
}

/// Watches and their paths, relative to a directory.
type Subtree = Vec<(WatchDescriptor, PathBuf)>;

/// The depth of a watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    Directory,
    Everything,
}

impl Tree {
    /// Begins to watch. `base` may be a link to a directory.
    pub(crate) fn open(base: &Path, reach: Reach) -> Result<Self, WatchError> {
        let failed = |errno| failed(base, errno);
        let flags = InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK;
        let inotify = Inotify::init(flags).map_err(failed)?;
        let root = inotify.add_watch(base, CHANGES).map_err(failed)?;
        let mut tree = Self {
            inotify,
            base: base.to_owned(),
            reach,
            root,
            dirs: [(root, PathBuf::new())].into(),
            announced: BTreeSet::new(),
            moved: Vec::new(),
        };
        if reach == Reach::Everything {
            // Existing entries are not reported.
            tree.read_dirs(vec![(root, PathBuf::new())], None)?;
        }
        Ok(tree)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }

    /// The full path of an entry of the tree.
    pub(crate) fn path_of(&self, path: &Path) -> PathBuf {
        if path.as_os_str().is_empty() {
            self.base.clone()
        } else {
            self.base.join(path)
        }
    }

    /// Reads some of the pending events and appends their changes. Returns false if there were none.
    pub(crate) fn read(&mut self, changes: &mut Vec<Change>) -> Result<bool, WatchError> {
        let events = match self.inotify.read_events() {
            Ok(events) => events,
            Err(Errno::EAGAIN) => {
                self.settle();
                return Ok(false);
            }
            Err(Errno::EINTR) => return Ok(true),
            Err(errno) => return Err(failed(&self.base, errno)),
        };
        for event in events {
            self.take(event, changes)?;
        }
        Ok(true)
    }

    /// Called when the kernel's queue is empty. The kernel will repeat no more names that were read from directories,
    /// and directories whose destination is still unknown have left the tree.
    fn settle(&mut self) {
        self.announced.clear();
        for (_, subtree) in std::mem::take(&mut self.moved) {
            for (watch, _) in subtree {
                // Fails if the kernel has dropped the watch already.
                let _ = self.inotify.rm_watch(watch);
            }
        }
    }

    fn take(&mut self, event: InotifyEvent, changes: &mut Vec<Change>) -> Result<(), WatchError> {
        if event.mask.contains(Mask::IN_Q_OVERFLOW) {
            return Err(WatchError::Overflow);
        }
        if event.mask.intersects(Mask::IN_IGNORED | Mask::IN_UNMOUNT) {
            self.dirs.remove(&event.wd);
            return Ok(());
        }
        let Some(dir) = self.dirs.get(&event.wd) else {
            return Ok(());
        };
        let Some(name) = event.name else {
            // Events of other directories themselves are reported by their parents' watches.
            if event.wd == self.root {
                self.take_own(event.mask, changes);
            }
            return Ok(());
        };
        let path = dir.join(&name);
        let known = self.announced.remove(&(event.wd, name));
        let Some(kind) = kind(event.mask) else {
            return Ok(());
        };
        if known && event.mask.contains(Mask::IN_CREATE) {
            return Ok(());
        }
        changes.push(Change {
            path: path.clone(),
            kind,
        });
        if self.reach == Reach::Everything && event.mask.contains(Mask::IN_ISDIR) {
            self.take_directory(event.mask, event.cookie, path, changes)?;
        }
        Ok(())
    }

    /// Handles an event of the root itself. If the root was moved, removes all watches, because the paths of later
    /// events would be wrong.
    fn take_own(&mut self, mask: Mask, changes: &mut Vec<Change>) {
        if let Some(kind) = kind(mask) {
            let path = PathBuf::new();
            changes.push(Change { path, kind });
        }
        if mask.contains(Mask::IN_MOVE_SELF) {
            for (watch, _) in std::mem::take(&mut self.dirs) {
                let _ = self.inotify.rm_watch(watch);
            }
        }
    }

    /// Handles an event of a directory below the root.
    fn take_directory(
        &mut self,
        mask: Mask,
        cookie: u32,
        path: PathBuf,
        changes: &mut Vec<Change>,
    ) -> Result<(), WatchError> {
        if mask.contains(Mask::IN_MOVED_FROM) {
            let subtree = self.cut(&path);
            self.moved.push((cookie, subtree));
        } else if mask.contains(Mask::IN_MOVED_TO)
            && let Some(at) = self.moved.iter().position(|(c, _)| *c == cookie)
        {
            let (_, subtree) = self.moved.swap_remove(at);
            for (watch, below) in subtree {
                let path = if below.as_os_str().is_empty() {
                    path.clone()
                } else {
                    path.join(below)
                };
                self.dirs.insert(watch, path);
            }
        } else if mask.intersects(Mask::IN_CREATE | Mask::IN_MOVED_TO)
            && let Some(watch) = self.watch(path.clone())?
        {
            self.read_dirs(vec![(watch, path)], Some(changes))?;
        }
        Ok(())
    }

    /// Removes a directory and everything below it from the table. Returns their watches.
    fn cut(&mut self, path: &Path) -> Subtree {
        let dirs = self.dirs.iter();
        let subtree: Subtree = dirs
            .filter_map(|(watch, dir)| Some((*watch, dir.strip_prefix(path).ok()?.to_owned())))
            .collect();
        for (watch, _) in &subtree {
            self.dirs.remove(watch);
        }
        subtree
    }

    /// Watches one directory; `None` if it was removed or replaced in the meantime, or may not be read.
    fn watch(&mut self, path: PathBuf) -> Result<Option<WatchDescriptor>, WatchError> {
        let full = self.base.join(&path);
        if self.dirs.len() >= MAX_DIRS {
            return Err(WatchError::TooLarge);
        }
        let flags = CHANGES | Mask::IN_DONT_FOLLOW;
        match self.inotify.add_watch(&full, flags) {
            Ok(watch) => {
                self.dirs.insert(watch, path);
                Ok(Some(watch))
            }
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::EACCES) => Ok(None),
            Err(errno) => Err(failed(&full, errno)),
        }
    }

    /// Reads watched directories, and watches and reads all directories below them. Entries are reported as created if
    /// `news` is given.
    fn read_dirs(
        &mut self,
        mut open: Vec<(WatchDescriptor, PathBuf)>,
        mut news: Option<&mut Vec<Change>>,
    ) -> Result<(), WatchError> {
        let most = news.as_ref().map_or(MAX_NAMES, |_| MAX_NEWS);
        let mut names = 0;
        while let Some((watch, dir)) = open.pop() {
            // The directory was removed in the meantime or cannot be read. In the latter case its watch still reports
            // events.
            let Ok(entries) = fs::read_dir(self.path_of(&dir)) else {
                continue;
            };
            for entry in entries.filter_map(Result::ok) {
                names += 1;
                if names > most {
                    return Err(WatchError::TooLarge);
                }
                let path = dir.join(entry.file_name());
                if let Some(changes) = &mut news {
                    self.announced.insert((watch, entry.file_name()));
                    changes.push(Change {
                        path: path.clone(),
                        kind: EventType::Create,
                    });
                }
                if entry.file_type().is_ok_and(|kind| kind.is_dir())
                    && let Some(watch) = self.watch(path.clone())?
                {
                    open.push((watch, path));
                }
            }
        }
        Ok(())
    }
}

fn failed(path: &Path, errno: Errno) -> WatchError {
    match errno {
        Errno::ENOSPC | Errno::EMFILE | Errno::ENFILE => WatchError::NoWatches,
        errno => WatchError::System {
            path: path.to_owned(),
            source: errno.into(),
        },
    }
}

/// Converts a kernel event to E2B's event type. The source of a move counts as renamed, its destination as created.
fn kind(mask: Mask) -> Option<EventType> {
    let has = |flags: Mask| mask.intersects(flags);
    if has(Mask::IN_CREATE | Mask::IN_MOVED_TO) {
        Some(EventType::Create)
    } else if has(Mask::IN_MOVED_FROM | Mask::IN_MOVE_SELF) {
        Some(EventType::Rename)
    } else if has(Mask::IN_DELETE | Mask::IN_DELETE_SELF) {
        Some(EventType::Remove)
    } else if has(Mask::IN_MODIFY) {
        Some(EventType::Write)
    } else if has(Mask::IN_ATTRIB) {
        Some(EventType::Chmod)
    } else {
        None
    }
}

#[cfg(test)]
mod tests;
