//! Blobs and images on disk, by content.
//!
//! ```text
//! DIR/lock                 held by the process that owns the store
//! DIR/drafts/              unfinished files; removed when the store is opened
//! DIR/blobs/HEX            a manifest, config or layer with this SHA-256
//! DIR/images/HEX           a root image; the key is the caller's
//! ```
//! A file is written as a draft, synced, renamed to its place, and the directory synced: after a crash it is whole or
//! missing. Files are removed only when the quota is exceeded, the least recently used first, and never while a
//! [`Lease`] holds them. The time of use is the file's time of modification.

use std::{
    collections::HashMap,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::SystemTime,
};

use crate::digest::{Digest, Hasher};

/// A store that this process owns. A handle: clones share the store.
#[derive(Clone, Debug)]
pub struct Store {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    quota: u64,
    drafts: AtomicU64,
    leases: Mutex<HashMap<Object, usize>>,
    _lock: File,
}

/// A file of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Object {
    /// Its content has this digest.
    Blob(Digest),
    /// A root image with this key.
    Image(Digest),
}

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("cannot {action} {}", path.display())]
    File {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("store {} is in use by another process", .0.display())]
    InUse(PathBuf),
    #[error("blob {wanted} has other content: {found}")]
    Digest { wanted: Digest, found: Digest },
    #[error("blob {digest} has {found} bytes, its descriptor {wanted}")]
    Size {
        digest: Digest,
        wanted: u64,
        found: u64,
    },
    #[error(
        "images in use leave {free} of {quota} bytes for a file of {needed}: remove images or raise the quota"
    )]
    Full { needed: u64, free: u64, quota: u64 },
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::File {
        action,
        path,
        source,
    }
}

impl Object {
    fn path(self) -> PathBuf {
        match self {
            Self::Blob(digest) => Path::new("blobs").join(digest.hex()),
            Self::Image(key) => Path::new("images").join(key.hex()),
        }
    }
}

impl Store {
    /// Opens a store, and creates it if it is missing. Removes drafts of a killed process.
    ///
    /// `quota` is the limit for the disk space of all files, in bytes.
    ///
    /// # Errors
    /// Returns an error if another process owns the store, or a file operation fails.
    pub fn open(dir: &Path, quota: u64) -> Result<Self, StoreError> {
        let drafts = dir.join("drafts");
        for part in ["blobs", "images"].map(|name| dir.join(name)) {
            fs::create_dir_all(&part).map_err(failed("create", &part))?;
        }
        let path = dir.join("lock");
        let lock = File::create(&path).map_err(failed("create", &path))?;
        lock.try_lock()
            .map_err(|_| StoreError::InUse(dir.to_owned()))?;
        if drafts.exists() {
            fs::remove_dir_all(&drafts).map_err(failed("remove", &drafts))?;
        }
        fs::create_dir(&drafts).map_err(failed("create", &drafts))?;
        Ok(Self {
            inner: Arc::new(Inner {
                dir: dir.to_owned(),
                quota,
                drafts: AtomicU64::new(0),
                leases: Mutex::new(HashMap::new()),
                _lock: lock,
            }),
        })
    }

    /// Takes a lease on a file of the store and marks it as used now. `None` if the store does not have it.
    #[must_use]
    pub fn take(&self, object: Object) -> Option<Lease> {
        // First the lease: from then on the collector leaves the file alone.
        let lease = self.lease(object);
        let file = File::open(lease.path()).ok()?;
        // Best effort: without the time of use, the file is removed earlier.
        let _ = file.set_modified(SystemTime::now());
        Some(lease)
    }

    fn lease(&self, object: Object) -> Lease {
        *self.leases().entry(object).or_default() += 1;
        Lease {
            store: self.clone(),
            object,
        }
    }

    fn leases(&self) -> std::sync::MutexGuard<'_, HashMap<Object, usize>> {
        let leases = self.inner.leases.lock();
        leases.unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a file of about `size` bytes. Makes room for it first.
    ///
    /// # Errors
    /// Returns [`StoreError::Full`] if files in use leave too little of the quota.
    pub fn draft(&self, size: u64) -> Result<Draft, StoreError> {
        self.collect(size)?;
        let number = self.inner.drafts.fetch_add(1, Ordering::Relaxed);
        let path = self.inner.dir.join("drafts").join(number.to_string());
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path);
        let file = file.map_err(failed("create", &path))?;
        Ok(Draft {
            store: self.clone(),
            path,
            file,
            hasher: Hasher::default(),
            written: 0,
        })
    }

    /// Stores bytes that are in memory.
    ///
    /// # Errors
    /// Returns an error if the bytes do not have this digest, or a file operation fails.
    pub fn put(&self, digest: Digest, bytes: &[u8]) -> Result<Lease, StoreError> {
        if let Some(lease) = self.take(Object::Blob(digest)) {
            return Ok(lease);
        }
        let mut draft = self.draft(bytes.len() as u64)?;
        draft.append(bytes)?;
        draft.finish_blob(digest, bytes.len() as u64)
    }

    /// Removes the least recently used files that no lease holds, until `needed` bytes fit into the quota.
    ///
    /// # Errors
    /// Returns [`StoreError::Full`] if they do not fit without them either.
    pub fn collect(&self, needed: u64) -> Result<(), StoreError> {
        // Held while files are removed, so that no lease is taken on one of them.
        let leases = self.leases();
        let mut used = self
            .usage("drafts")?
            .iter()
            .map(|file| file.bytes)
            .sum::<u64>();
        let mut free_to_go = Vec::new();
        for (name, object) in [
            ("blobs", Object::Blob as fn(Digest) -> Object),
            ("images", Object::Image),
        ] {
            for file in self.usage(name)? {
                used += file.bytes;
                let digest = format!("sha256:{}", file.name).parse().ok();
                let is_held = digest.is_some_and(|d| leases.contains_key(&object(d)));
                if !is_held {
                    free_to_go.push(file);
                }
            }
        }
        free_to_go.sort_by_key(|file| file.used);
        let quota = self.inner.quota;
        for file in free_to_go {
            if used.saturating_add(needed) <= quota {
                break;
            }
            fs::remove_file(&file.path).map_err(failed("remove", &file.path))?;
            used -= file.bytes;
        }
        if used.saturating_add(needed) > quota {
            let free = quota.saturating_sub(used);
            return Err(StoreError::Full {
                needed,
                free,
                quota,
            });
        }
        Ok(())
    }

    fn usage(&self, name: &str) -> Result<Vec<Usage>, StoreError> {
        use std::os::unix::fs::MetadataExt;
        let dir = self.inner.dir.join(name);
        let mut found = Vec::new();
        for entry in fs::read_dir(&dir).map_err(failed("read", &dir))? {
            let entry = entry.map_err(failed("read", &dir))?;
            // A draft may be renamed or removed meanwhile.
            let Ok(metadata) = entry.metadata() else {
                continue;
            };
            found.push(Usage {
                path: entry.path(),
                name: entry.file_name().to_string_lossy().into_owned(),
                // Holes of images take no space.
                bytes: metadata.blocks() * 512,
                used: metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH),
            });
        }
        Ok(found)
    }
}

struct Usage {
    path: PathBuf,
    name: String,
    bytes: u64,
    used: SystemTime,
}

/// Keeps a file in the store as long as it exists.
#[derive(Debug)]
pub struct Lease {
    store: Store,
    object: Object,
}

impl Lease {
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.store.inner.dir.join(self.object.path())
    }

    /// # Errors
    /// Returns an error if the file cannot be opened.
    pub fn open(&self) -> Result<File, StoreError> {
        let path = self.path();
        File::open(&path).map_err(failed("open", &path))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut leases = self.store.leases();
        if let Some(count) = leases.get_mut(&self.object) {
            *count -= 1;
            if *count == 0 {
                leases.remove(&self.object);
            }
        }
    }
}

/// A file that is being written. Dropping it removes it.
#[derive(Debug)]
pub struct Draft {
    store: Store,
    path: PathBuf,
    file: File,
    hasher: Hasher,
    written: u64,
}

impl Draft {
    /// Appends bytes of a blob.
    ///
    /// # Errors
    /// Returns an error if the write fails.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        self.file
            .write_all(bytes)
            .map_err(failed("write", &self.path))?;
        self.hasher.update(bytes);
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// Bytes appended so far.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.written
    }

    /// The file, for writers that need random access.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Moves the appended bytes to their place, if they have the expected size and digest.
    ///
    /// # Errors
    /// Returns an error if they do not, or a file operation fails.
    pub fn finish_blob(mut self, digest: Digest, size: u64) -> Result<Lease, StoreError> {
        if self.written != size {
            return Err(StoreError::Size {
                digest,
                wanted: size,
                found: self.written,
            });
        }
        let found = std::mem::take(&mut self.hasher).finish();
        if found != digest {
            return Err(StoreError::Digest {
                wanted: digest,
                found,
            });
        }
        self.finish(Object::Blob(digest))
    }

    /// Moves an image to its place.
    ///
    /// # Errors
    /// Returns an error if a file operation fails.
    pub fn finish_image(self, key: Digest) -> Result<Lease, StoreError> {
        self.finish(Object::Image(key))
    }

    fn finish(self, object: Object) -> Result<Lease, StoreError> {
        self.file.sync_all().map_err(failed("sync", &self.path))?;
        let lease = self.store.lease(object);
        let place = lease.path();
        fs::rename(&self.path, &place).map_err(failed("create", &place))?;
        let dir = place.parent().unwrap_or(&place);
        let synced = File::open(dir).and_then(|dir| dir.sync_all());
        synced.map_err(failed("sync", dir))?;
        Ok(lease)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // Best effort: fails if the draft was renamed; the next start removes what is left.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const KIB: usize = 1024;

    fn blob(store: &Store, fill: u8, len: usize) -> Result<Lease, StoreError> {
        let bytes = vec![fill; len];
        store.put(Digest::of(&bytes), &bytes)
    }

    fn has(store: &Store, fill: u8, len: usize) -> bool {
        let digest = Digest::of(&vec![fill; len]);
        store.inner.dir.join(Object::Blob(digest).path()).exists()
    }

    #[test]
    fn a_blob_appears_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), 1 << 20).unwrap();
        let digest = Digest::of(b"whole");
        let mut draft = store.draft(5).unwrap();
        draft.append(b"who").unwrap();
        let error = draft.finish_blob(digest, 5).unwrap_err();
        assert!(matches!(error, StoreError::Size { .. }), "{error}");
        let mut draft = store.draft(5).unwrap();
        draft.append(b"whole").unwrap();
        let other = Digest::of(b"other");
        let error = draft.finish_blob(other, 5).unwrap_err();
        assert!(matches!(error, StoreError::Digest { .. }), "{error}");
        assert_eq!(fs::read_dir(dir.path().join("drafts")).unwrap().count(), 0);
        assert!(store.take(Object::Blob(digest)).is_none());
        assert!(store.leases().is_empty());
        let lease = store.put(digest, b"whole").unwrap();
        assert_eq!(fs::read(lease.path()).unwrap(), b"whole");
    }

    #[test]
    fn a_store_has_one_owner_and_loses_the_drafts_of_a_killed_one() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), 1 << 20).unwrap();
        assert!(matches!(
            Store::open(dir.path(), 1),
            Err(StoreError::InUse(_))
        ));
        let mut draft = store.draft(1).unwrap();
        draft.append(b"x").unwrap();
        // As after SIGKILL: the lock is gone and the draft is left.
        std::mem::forget(draft);
        let Store { inner } = store;
        inner._lock.unlock().unwrap();
        let _store = Store::open(dir.path(), 1 << 20).unwrap();
        assert_eq!(fs::read_dir(dir.path().join("drafts")).unwrap().count(), 0);
    }

    #[test]
    fn the_least_recently_used_files_make_room_and_leased_ones_stay() {
        let dir = tempfile::tempdir().unwrap();
        let quota = 64 * KIB as u64;
        let store = Store::open(dir.path(), quota).unwrap();
        let held = blob(&store, 1, 16 * KIB).unwrap();
        let old = SystemTime::now() - Duration::from_secs(3600);
        held.open().unwrap().set_modified(old).unwrap();
        for fill in [2, 3] {
            let lease = blob(&store, fill, 16 * KIB).unwrap();
            let age = Duration::from_secs(60 * u64::from(fill));
            let file = lease.open().unwrap();
            file.set_modified(SystemTime::now() - age).unwrap();
        }
        // Used again, so 3 is not the oldest any more.
        drop(blob(&store, 3, 16 * KIB).unwrap());
        drop(blob(&store, 4, 24 * KIB).unwrap());
        assert!(has(&store, 1, 16 * KIB) && has(&store, 3, 16 * KIB) && has(&store, 4, 24 * KIB));
        assert!(!has(&store, 2, 16 * KIB));
        let error = blob(&store, 5, 60 * KIB).unwrap_err();
        assert!(matches!(error, StoreError::Full { .. }), "{error}");
        drop(held);
        blob(&store, 5, 60 * KIB).unwrap();
        assert!(!has(&store, 1, 16 * KIB));
    }
}
