//! Lists a tree down to a depth, each directory before its entries. Links are listed and not followed.

use std::{ffi::OsString, fs, io, path::PathBuf, vec};

use envd::{ConnectCode, ConnectError, EntryInfo};

use super::{
    super::message::error,
    entry::{Names, entry},
    failure::explain,
};
use crate::users::UserDb;

/// Largest estimated memory of a listing in bytes, including names that are not yet examined.
const MAX_WEIGHT: usize = 24 << 20;
/// Estimated memory of an entry and of a name in bytes, without their texts.
const ENTRY: usize = 256;
const NAME: usize = 48;

/// A listing in progress.
pub(crate) struct Listing {
    /// Directories being listed, the outermost first.
    open: Vec<OpenDir>,
    depth: usize,
    entries: Vec<EntryInfo>,
    weight: usize,
    names: Names,
}

struct OpenDir {
    path: PathBuf,
    /// The path in the response.
    shown: PathBuf,
    /// Names that are not yet examined.
    names: vec::IntoIter<OsString>,
}

impl Listing {
    /// Begins at a directory, or a link to one.
    pub(super) fn open(shown: PathBuf, depth: u32) -> Result<Self, ConnectError> {
        let path = fs::canonicalize(&shown).map_err(|e| explain(&shown, &e))?;
        let found = fs::metadata(&path).map_err(|e| explain(&shown, &e))?;
        if !found.is_dir() {
            let message = format!("path is not a directory: {}", shown.display());
            return error(ConnectCode::InvalidArgument, message);
        }
        let mut listing = Self {
            open: Vec::new(),
            depth: usize::try_from(depth.max(1)).unwrap_or(usize::MAX),
            entries: Vec::new(),
            weight: 0,
            names: Names::default(),
        };
        listing.enter(path, shown)?;
        Ok(listing)
    }

    /// Examines at most `count` entries. Returns all entries once the listing is complete.
    pub(super) fn turn(
        &mut self,
        count: usize,
        users: &mut UserDb,
    ) -> Result<Option<Vec<EntryInfo>>, ConnectError> {
        for _ in 0..count {
            let Some(dir) = self.open.last_mut() else {
                return Ok(Some(std::mem::take(&mut self.entries)));
            };
            let Some(name) = dir.names.next() else {
                self.open.pop();
                continue;
            };
            let (path, shown) = (dir.path.join(&name), dir.shown.join(&name));
            let (entry, is_dir) = match entry(&path, &shown, &mut self.names, users) {
                Ok(found) => found,
                // The entry was removed after its name was read.
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(explain(&shown, &e)),
            };
            self.weigh(weight(&entry))?;
            self.entries.push(entry);
            if is_dir && self.open.len() < self.depth {
                self.enter(path, shown)?;
            }
        }
        Ok(None)
    }

    fn enter(&mut self, path: PathBuf, shown: PathBuf) -> Result<(), ConnectError> {
        let mut names = Vec::new();
        let found = match fs::read_dir(&path) {
            Ok(found) => found,
            Err(e) if e.kind() == io::ErrorKind::NotFound && !self.open.is_empty() => return Ok(()),
            Err(e) => return Err(explain(&shown, &e)),
        };
        for entry in found {
            let name = entry.map_err(|e| explain(&shown, &e))?.file_name();
            self.weigh(NAME + name.len())?;
            names.push(name);
        }
        names.sort_unstable();
        self.open.push(OpenDir {
            path,
            shown,
            names: names.into_iter(),
        });
        Ok(())
    }

    fn weigh(&mut self, more: usize) -> Result<(), ConnectError> {
        self.weight += more;
        match self.weight {
            0..=MAX_WEIGHT => Ok(()),
            _ => error(
                ConnectCode::InvalidArgument,
                "the listing is too large, ask for less depth or for parts of it",
            ),
        }
    }
}

/// Estimates the bytes of memory that an entry takes.
pub(crate) fn weight(entry: &EntryInfo) -> usize {
    let metadata = entry.metadata.iter();
    let metadata: usize = metadata.map(|(k, v)| NAME + k.len() + v.len()).sum();
    let target = entry.symlink_target.as_ref().map_or(0, String::len);
    ENTRY + entry.name.len() + entry.path.len() + target + metadata
}
