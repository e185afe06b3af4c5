//! Space and last use of archives.

use std::{
    collections::HashMap,
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tracing::{error, info};

/// An archive counts as at least this many bytes, so that the quota also bounds their number.
const LEAST: u64 = 4096;

#[derive(Debug)]
pub(super) struct Ledger {
    quota: u64,
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    files: HashMap<PathBuf, Entry>,
    /// Bytes of all files, including those being received.
    bytes: u64,
    /// Counter that orders uses.
    uses: u64,
}

#[derive(Debug)]
struct Entry {
    bytes: u64,
    used: u64,
}

impl Ledger {
    /// A ledger with the files of the previous server. The oldest of them are removed first.
    pub(super) fn new(quota: u64, found: Vec<PathBuf>) -> Self {
        let mut sizes: Vec<_> = found
            .into_iter()
            .filter_map(|path| {
                let meta = fs::metadata(&path).ok()?;
                Some((meta.modified().ok(), path, meta.len()))
            })
            .collect();
        sizes.sort();
        let mut entries = Entries::default();
        for (_, path, bytes) in sizes {
            let bytes = bytes.max(LEAST);
            entries.bytes += bytes;
            entries.enter(path, bytes);
        }
        Self {
            quota,
            entries: Mutex::new(entries),
        }
    }

    pub(super) fn quota(&self) -> u64 {
        self.quota
    }

    pub(super) fn touch(&self, path: &Path) {
        let mut entries = self.entries();
        entries.uses += 1;
        let now = entries.uses;
        if let Some(entry) = entries.files.get_mut(path) {
            entry.used = now;
        }
    }

    /// Forgets the files of a directory, which the caller removes.
    pub(super) fn forget(&self, dir: &Path) {
        let mut entries = self.entries();
        let mut freed = 0;
        entries.files.retain(|path, entry| {
            let goes = path.starts_with(dir);
            freed += if goes { entry.bytes } else { 0 };
            !goes
        });
        entries.bytes -= freed;
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        // No statement that can panic leaves the total wrong.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries {
    fn enter(&mut self, path: PathBuf, bytes: u64) {
        self.uses += 1;
        let used = self.uses;
        if let Some(former) = self.files.insert(path, Entry { bytes, used }) {
            self.bytes -= former.bytes;
        }
    }

    /// Removes the least recently used files until `more` bytes fit.
    fn make_room(&mut self, more: u64, quota: u64) -> bool {
        while self.bytes.saturating_add(more) > quota {
            let oldest = self.files.iter().min_by_key(|(_, entry)| entry.used);
            let Some((path, bytes)) = oldest.map(|(path, entry)| (path.clone(), entry.bytes))
            else {
                return false;
            };
            match fs::remove_file(&path) {
                Err(why) if why.kind() != io::ErrorKind::NotFound => {
                    error!(path = %path.display(), error = %why, "cannot remove an uploaded archive");
                    return false;
                }
                _ => {
                    info!(path = %path.display(), bytes, "removed the least recently used archive")
                }
            }
            self.files.remove(&path);
            self.bytes -= bytes;
        }
        true
    }
}

/// The space of an archive that is being received. Freed on drop.
#[derive(Debug)]
pub(super) struct Charge {
    ledger: Arc<Ledger>,
    bytes: u64,
}

impl Charge {
    pub(super) fn new(ledger: &Arc<Ledger>) -> Self {
        let ledger = Arc::clone(ledger);
        Self { ledger, bytes: 0 }
    }

    /// Reserves space for an archive of `bytes`. Returns `false` if there is not enough.
    pub(super) fn grow_to(&mut self, bytes: u64) -> bool {
        let more = bytes.max(LEAST).saturating_sub(self.bytes);
        let mut entries = self.ledger.entries();
        if !entries.make_room(more, self.ledger.quota) {
            return false;
        }
        entries.bytes += more;
        drop(entries);
        self.bytes += more;
        true
    }

    /// Assigns the space to the file at `path`, replacing an earlier one.
    pub(super) fn keep(mut self, path: PathBuf) {
        let bytes = std::mem::take(&mut self.bytes);
        self.ledger.entries().enter(path, bytes);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.ledger.entries().bytes -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn receive(ledger: &Arc<Ledger>, path: &Path, bytes: u64) -> bool {
        let mut charge = Charge::new(ledger);
        let fits = charge.grow_to(bytes / 2) && charge.grow_to(bytes);
        if fits {
            fs::write(path, "").unwrap();
            charge.keep(path.to_owned());
        }
        fits
    }

    #[test]
    fn the_least_recently_used_archives_go_for_new_ones() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let ledger = Arc::new(Ledger::new(10 * LEAST, Vec::new()));
        assert!(receive(&ledger, &at("a"), 4 * LEAST));
        assert!(receive(&ledger, &at("b"), 4 * LEAST));
        ledger.touch(&at("a"));
        assert!(receive(&ledger, &at("c"), 3 * LEAST));
        assert!(at("a").exists() && !at("b").exists());
        assert!(
            !receive(&ledger, &at("d"), 11 * LEAST),
            "more than the quota"
        );
        // Replacing a file counts it once, and failed uploads do not count.
        for _ in 0..5 {
            assert!(receive(&ledger, &at("e"), 5 * LEAST));
        }
        assert_eq!(ledger.entries().bytes, 5 * LEAST);
        ledger.forget(dir.path());
        assert_eq!(ledger.entries().bytes, 0);
    }

    #[test]
    fn archives_of_a_former_server_count() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        fs::write(&path, "x").unwrap();
        let ledger = Arc::new(Ledger::new(
            2 * LEAST,
            vec![path.clone(), dir.path().join("gone")],
        ));
        assert_eq!(ledger.entries().bytes, LEAST);
        assert!(receive(&ledger, &dir.path().join("b"), 2 * LEAST));
        assert!(!path.exists());
    }
}
