//! Removes a tree. Every step is relative to an open directory and follows no link, so replacing a directory by a link
//! during the removal cannot redirect it.

use std::{
    ffi::{CString, OsStr},
    io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use envd::{ConnectCode, ConnectError};
use nix::{
    dir::Dir,
    errno::Errno,
    fcntl::OFlag,
    sys::stat::Mode,
    unistd::{UnlinkatFlags, unlinkat},
};

use super::{super::message::error, failure::explain};

/// Largest depth; each level holds a descriptor.
const MAX_DEPTH: usize = 512;

/// A removal in progress.
pub(crate) struct Removal {
    /// The requested path, for errors.
    path: PathBuf,
    /// Directories being emptied, each inside its predecessor. The first is the parent of the path, from which only the
    /// path's own name is removed.
    open: Vec<OpenDir>,
}

struct OpenDir {
    dir: Dir,
    /// Names to remove, the next one last.
    names: Vec<CString>,
}

/// Names that are read at once.
const BATCH: usize = 256;

fn flags() -> OFlag {
    OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK
}

impl Removal {
    pub(super) fn open(path: &Path) -> Result<Self, ConnectError> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            let message = format!("'{}' cannot be removed", path.display());
            return error(ConnectCode::InvalidArgument, message);
        };
        let open = match Dir::open(parent, flags(), Mode::empty()) {
            Ok(dir) => {
                let names = vec![c_name(name)?];
                vec![OpenDir { dir, names }]
            }
            // Without its parent the path does not exist, which is the requested result.
            Err(Errno::ENOENT | Errno::ENOTDIR) => Vec::new(),
            Err(errno) => return Err(explain(path, &errno.into())),
        };
        let path = path.to_owned();
        Ok(Self { path, open })
    }

    /// Takes at most `count` steps. True once everything is removed.
    pub(super) fn turn(&mut self, count: usize) -> Result<bool, ConnectError> {
        for _ in 0..count {
            let done = self.remove_one();
            if done.map_err(|errno| explain(&self.path, &io::Error::from(errno)))? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Removes one entry, or enters or leaves a directory. True once everything is removed.
    fn remove_one(&mut self) -> Result<bool, Errno> {
        let depth = self.open.len();
        let Some(top) = self.open.last_mut() else {
            return Ok(true);
        };
        if let Some(name) = top.names.pop() {
            if !unlink(&top.dir, &name)? {
                self.enter(name)?;
            }
            return Ok(false);
        }
        if depth > 1 {
            top.names = read(&mut top.dir)?;
        }
        if top.names.is_empty() {
            // The directory's name is still the next one in its parent's list, so the next step removes it. If it has
            // new entries by then, it is entered again.
            self.open.pop();
        }
        Ok(false)
    }

    /// Enters a directory that is not empty. Its name stays in the list, to be removed after its entries.
    fn enter(&mut self, name: CString) -> Result<(), Errno> {
        if self.open.len() > MAX_DEPTH {
            return Err(Errno::EMFILE);
        }
        let Some(top) = self.open.last_mut() else {
            return Ok(());
        };
        let flags = flags() | OFlag::O_NOFOLLOW;
        let dir = Dir::openat(&top.dir, name.as_c_str(), flags, Mode::empty());
        top.names.push(name);
        match dir {
            Ok(dir) => self.open.push(OpenDir {
                dir,
                names: Vec::new(),
            }),
            // Removed or replaced in the meantime: the next step tries to unlink the name again.
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => {}
            Err(errno) => return Err(errno),
        }
        Ok(())
    }
}

/// Reads at most [`BATCH`] names from the start of a directory. The names that earlier calls returned have been removed
/// by then.
fn read(dir: &mut Dir) -> Result<Vec<CString>, Errno> {
    let mut names = Vec::new();
    for entry in dir.iter().take(BATCH) {
        let name = entry?.file_name().to_owned();
        if !matches!(name.as_bytes(), b"." | b"..") {
            names.push(name);
        }
    }
    Ok(names)
}

/// Removes a file, a link or an empty directory. False for a directory that is not empty.
fn unlink(dir: &Dir, name: &CString) -> Result<bool, Errno> {
    match unlinkat(dir, name.as_c_str(), UnlinkatFlags::NoRemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => return Ok(true),
        Err(Errno::EISDIR) => {}
        Err(errno) => return Err(errno),
    }
    match unlinkat(dir, name.as_c_str(), UnlinkatFlags::RemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => Ok(true),
        // Not empty, or no longer a directory: the caller tries to enter it, and then to unlink it again.
        Err(Errno::ENOTEMPTY | Errno::EEXIST | Errno::ENOTDIR) => Ok(false),
        Err(errno) => Err(errno),
    }
}

fn c_name(name: &OsStr) -> Result<CString, ConnectError> {
    CString::new(name.as_bytes())
        .or_else(|_| error(ConnectCode::InvalidArgument, "a path contains a zero byte"))
}
