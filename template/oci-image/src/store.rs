//! Blobs and images on disk, addressed by content.
//!
//! ```text
//! DIR/lock                 held by the process that owns the store
//! DIR/drafts/              unfinished files; removed when the store is opened
//! DIR/blobs/HEX            a manifest, config or layer with this SHA-256
//! DIR/images/HEX           a root image; the key is the caller's
//! ```
//! A file is written as a draft, synced and renamed to its place, and the directory is synced: after a crash it is
//! either complete or missing. Files are removed only when the quota is exceeded, the least recently used first. The
//! time of use is the file's modification time. A file is never removed while a [`Lease`] holds it, nor while it has
//! another hard link: a template that outlives this process keeps its root image with [`Lease::link`].
//!
//! Files that are being written count towards the quota before their first byte ([`Reservation`]), so concurrent writes
//! never exceed it. The free space of the disk limits them in the same way.

use std::{
    collections::HashMap,
    fs::{self, File, OpenOptions},
    io::{self, Seek, Write},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::SystemTime,
};

use nix::sys::statvfs::statvfs;

use crate::digest::Digest;

/// A store that this process owns. Clones share the store.
#[derive(Clone, Debug)]
pub struct Store {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    quota: u64,
    /// Disk space that must remain free, in bytes.
    disk_reserve: u64,
    drafts: AtomicU64,
    held: Mutex<Held>,
    _lock: File,
}

/// Files and space that cannot be removed or reserved.
#[derive(Debug, Default)]
struct Held {
    leases: HashMap<Object, usize>,
    /// Bytes of all reservations.
    reserved: u64,
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
    #[error("blob {wanted} has different content: {found}")]
    Digest { wanted: Digest, found: Digest },
    #[error("blob {digest} has {found} bytes, but its descriptor says {wanted}")]
    Size {
        digest: Digest,
        wanted: u64,
        found: u64,
    },
    #[error(
        "images in use leave {free} of {quota} bytes for a file of {needed} bytes: remove images or raise the quota"
    )]
    Full { needed: u64, free: u64, quota: u64 },
    #[error(
        "the disk of {} has no room for {needed} bytes beyond its reserve: free some space on it",
        dir.display()
    )]
    DiskFull { needed: u64, dir: PathBuf },
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
        Self::open_with_reserve(dir, quota, 0)
    }

    /// Like [`Store::open`], but keeps `disk_reserve` bytes of the disk free.
    ///
    /// # Errors
    /// Returns the errors of [`Store::open`].
    pub fn open_with_reserve(
        dir: &Path,
        quota: u64,
        disk_reserve: u64,
    ) -> Result<Self, StoreError> {
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
                disk_reserve,
                drafts: AtomicU64::new(0),
                held: Mutex::default(),
                _lock: lock,
            }),
        })
    }

    /// Takes a lease on a file of the store and marks it as used now. `None` if the store does not have it.
    #[must_use]
    pub fn take(&self, object: Object) -> Option<Lease> {
        // The lease must come first: it protects the file from the collector.
        let lease = self.lease(object);
        let file = File::open(lease.path()).ok()?;
        // Best effort: without the time of use, the file is removed earlier.
        let _ = file.set_modified(SystemTime::now());
        Some(lease)
    }

    fn lease(&self, object: Object) -> Lease {
        *self.held().leases.entry(object).or_default() += 1;
        Lease {
            store: self.clone(),
            object,
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        let held = self.inner.held.lock();
        held.unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves a part of the quota. First makes room for it.
    ///
    /// # Errors
    /// Returns [`StoreError::Full`] if files in use and other reservations leave too little of the quota.
    pub fn reserve(&self, bytes: u64) -> Result<Reservation, StoreError> {
        let mut reservation = Reservation {
            store: self.clone(),
            bytes: 0,
        };
        reservation.grow_to(bytes)?;
        Ok(reservation)
    }

    /// Begins a file with a reservation of `size` bytes.
    ///
    /// # Errors
    /// Returns [`StoreError::Full`] as [`Store::reserve`] does.
    pub fn draft(&self, size: u64) -> Result<Draft, StoreError> {
        let reservation = self.reserve(size)?;
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
            reservation,
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

    /// Removes the least recently used files without a lease, until `needed` bytes fit into the quota.
    fn collect(&self, held: &Held, needed: u64) -> Result<(), StoreError> {
        let mut used = held.reserved;
        let mut removable = Vec::new();
        for (name, object) in [
            ("blobs", Object::Blob as fn(Digest) -> Object),
            ("images", Object::Image),
        ] {
            for file in self.usage(name)? {
                used += file.bytes;
                let digest = format!("sha256:{}", file.name).parse().ok();
                let is_leased = digest.is_some_and(|d| held.leases.contains_key(&object(d)));
                if !is_leased && !file.has_other_names {
                    removable.push(file);
                }
            }
        }
        let quota = self.inner.quota;
        // All of the space is usable if no other program uses more of the disk.
        let disk = (used - held.reserved) + self.writable()?;
        let disk = disk.saturating_sub(self.inner.disk_reserve);
        let fits = |used: u64| used.saturating_add(needed) <= quota.min(disk);
        let freed: u64 = removable.iter().map(|file| file.bytes).sum();
        // No file is removed unless enough can be freed.
        if (used - freed).saturating_add(needed) > quota {
            return Err(StoreError::Full {
                needed,
                free: quota.saturating_sub(used - freed),
                quota,
            });
        }
        if !fits(used - freed) {
            let dir = self.inner.dir.clone();
            return Err(StoreError::DiskFull { needed, dir });
        }
        removable.sort_by_key(|file| file.used);
        for file in removable {
            if fits(used) {
                break;
            }
            fs::remove_file(&file.path).map_err(failed("remove", &file.path))?;
            used -= file.bytes;
        }
        Ok(())
    }

    /// Space used by drafts plus the free space of the disk, including its reserve, in bytes.
    fn writable(&self) -> Result<u64, StoreError> {
        let dir = &self.inner.dir;
        let disk = statvfs(dir).map_err(|e| failed("examine the disk of", dir)(e.into()))?;
        let free = disk.blocks_available().saturating_mul(disk.fragment_size());
        let drafts = self.usage("drafts")?;
        let drafts: u64 = drafts.iter().map(|draft| draft.bytes).sum();
        Ok(free + drafts)
    }

    fn usage(&self, name: &str) -> Result<Vec<Usage>, StoreError> {
        use std::os::unix::fs::MetadataExt;
        let dir = self.inner.dir.join(name);
        let mut found = Vec::new();
        for entry in fs::read_dir(&dir).map_err(failed("read", &dir))? {
            let entry = entry.map_err(failed("read", &dir))?;
            // Another program may remove the file concurrently.
            let Ok(metadata) = entry.metadata() else {
                continue;
            };
            found.push(Usage {
                path: entry.path(),
                name: entry.file_name().to_string_lossy().into_owned(),
                // Holes of images take no space.
                bytes: metadata.blocks() * 512,
                has_other_names: metadata.nlink() > 1,
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
    has_other_names: bool,
    used: SystemTime,
}

/// A reserved part of the quota. Dropping it releases the part.
#[derive(Debug)]
pub struct Reservation {
    store: Store,
    bytes: u64,
}

impl Reservation {
    /// Raises the reservation to `bytes`, if it is smaller.
    ///
    /// # Errors
    /// Returns [`StoreError::Full`] if files in use and other reservations leave too little of the quota.
    pub fn grow_to(&mut self, bytes: u64) -> Result<(), StoreError> {
        let more = bytes.saturating_sub(self.bytes);
        if more > 0 {
            // Locked while files are removed, so that no lease on one of them begins.
            let mut held = self.store.held();
            self.store.collect(&held, more)?;
            held.reserved += more;
            self.bytes = bytes;
        }
        Ok(())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.store.held().reserved -= self.bytes;
    }
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

    /// Adds a hard link to the file, on the store's file system. The store keeps the file as long as the link exists,
    /// even after a restart. The caller syncs the directory.
    ///
    /// # Errors
    /// Returns an error if the link cannot be made.
    pub fn link(&self, path: &Path) -> Result<(), StoreError> {
        fs::hard_link(self.path(), path).map_err(failed("create", path))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let leases = &mut self.store.held().leases;
        if let Some(count) = leases.get_mut(&self.object) {
            *count -= 1;
            if *count == 0 {
                leases.remove(&self.object);
            }
        }
    }
}

/// A file that is being written. Dropping the draft removes it.
#[derive(Debug)]
pub struct Draft {
    store: Store,
    path: PathBuf,
    file: File,
    reservation: Reservation,
    written: u64,
}

impl Draft {
    /// Appends bytes of a blob.
    ///
    /// # Errors
    /// Returns an error if the write fails.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        self.reservation
            .grow_to(self.written + bytes.len() as u64)?;
        self.file
            .write_all(bytes)
            .map_err(failed("write", &self.path))?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// Starts again with an empty file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be truncated.
    pub fn restart(&mut self) -> Result<(), StoreError> {
        let cut = self.file.set_len(0).and_then(|()| self.file.rewind());
        cut.map_err(failed("cut", &self.path))?;
        self.written = 0;
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

    /// Moves the file to its place, if it has the expected size and digest.
    ///
    /// # Errors
    /// Returns an error if it does not, or a file operation fails.
    pub fn finish_blob(self, digest: Digest, size: u64) -> Result<Lease, StoreError> {
        let path = self.path.clone();
        self.finish_blob_by(digest, size, |file| {
            Digest::of_file(file).map_err(failed("read", &path))
        })
    }

    /// Like [`Draft::finish_blob`], with `sum` to compute the digest of the file.
    ///
    /// # Errors
    /// Returns the errors of [`Draft::finish_blob`] and of `sum`.
    pub fn finish_blob_by<E: From<StoreError>>(
        self,
        digest: Digest,
        size: u64,
        sum: impl FnOnce(&File) -> Result<Digest, E>,
    ) -> Result<Lease, E> {
        if self.written != size {
            let (wanted, found) = (size, self.written);
            return Err(StoreError::Size {
                digest,
                wanted,
                found,
            }
            .into());
        }
        // A new descriptor, because this one may write.
        let file = File::open(&self.path).map_err(failed("open", &self.path))?;
        let (wanted, found) = (digest, sum(&file)?);
        if found != wanted {
            return Err(StoreError::Digest { wanted, found }.into());
        }
        Ok(self.finish(Object::Blob(digest))?)
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
        // Best effort: fails if the draft was renamed. The next start removes leftovers.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests;
