//! An instance's directory in the bpffs, where its programs and maps outlive the server.
//!
//! ```text
//! PINS/INSTANCE/             locked by the server that owns it
//!   LAYOUT-TAPS-FLOWS/       maps: a server with the same layout and sizes takes them over
//!     programs-HASH/         programs on these maps: a server with the same programs and settings takes them over
//!   links/tap-INDEX-IFINDEX  link of the program on a TAP
//!   links/uplink-IFINDEX     link of the program on an uplink
//!   links/resolver-IFINDEX   link of the program on the resolver's device
//! ```

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    mount::{MsFlags, mount},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};

use crate::error::{IsolationError, system, unsuitable};

/// The conventional mount point.
const BPFFS: &str = "/sys/fs/bpf";
/// How long to wait for the lock. The kernel needs time to close the descriptors of a killed server, and a child between
/// fork and exec holds copies of them.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between two attempts to lock.
const LOCK_PAUSE: Duration = Duration::from_millis(2);

/// The locked directory of an instance.
#[derive(Debug)]
pub(crate) struct InstanceDir {
    path: PathBuf,
    _lock: Flock<File>,
}

impl InstanceDir {
    /// Creates and locks the directory; mounts a bpffs if `pins` is not in one.
    pub(crate) fn open(pins: &Path, instance: &str) -> Result<Self, IsolationError> {
        let path = pins.join(instance);
        ensure_bpffs(pins)?;
        let failed = |source| system(format!("create {}", path.display()), source);
        let deadline = Instant::now() + LOCK_TIMEOUT;
        loop {
            fs::create_dir_all(&path).map_err(failed)?;
            let directory = match File::open(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound && Instant::now() < deadline => {
                    continue;
                }
                opened => opened.map_err(failed)?,
            };
            let Some(lock) = lock(directory, deadline) else {
                return Err(unsuitable(
                    format!("another server uses {}", path.display()),
                    "stop that server, or give this one another state directory",
                ));
            };
            // The server that held the lock removes the directory when it ends. A lock on the removed directory excludes
            // no other server.
            if is_at(&lock, &path) {
                fs::create_dir_all(path.join("links")).map_err(failed)?;
                return Ok(Self { path, _lock: lock });
            }
        }
    }

    pub(crate) fn links(&self) -> PathBuf {
        self.path.join("links")
    }

    /// The link of the program on the resolver's device.
    pub(crate) fn resolver_link(&self, ifindex: u32) -> PathBuf {
        self.links().join(format!("resolver-{ifindex}"))
    }

    /// Indices of the resolver's devices that have a link.
    pub(crate) fn resolvers(&self) -> Vec<u32> {
        let entries = fs::read_dir(self.links()).into_iter().flatten().flatten();
        entries
            .filter_map(|entry| {
                let name = entry.file_name();
                name.to_str()?.strip_prefix("resolver-")?.parse().ok()
            })
            .collect()
    }

    /// Creates the directory of the maps and removes the maps of other layouts and sizes.
    pub(crate) fn make_maps_dir(&self, name: &str) -> Result<PathBuf, IsolationError> {
        let maps = self.path.join(name);
        fs::create_dir_all(&maps).map_err(|e| system(format!("create {}", maps.display()), e))?;
        self.remove_others(&maps);
        Ok(maps)
    }

    fn remove_others(&self, keep: &Path) {
        let Ok(entries) = fs::read_dir(&self.path) else {
            return;
        };
        for path in entries.flatten().map(|entry| entry.path()) {
            if path != keep && path != self.links() {
                // The next server tries again.
                let _retried_at_next_start = fs::remove_dir_all(path);
            }
        }
    }

    /// Removes the directory with all links and maps. Must be called only when no TAP is left.
    pub(crate) fn remove(&self) {
        let _retried_at_next_start = fs::remove_dir_all(&self.path);
    }
}

/// Whether `path` leads to this open directory.
fn is_at(directory: &File, path: &Path) -> bool {
    let identity = |meta: fs::Metadata| (meta.dev(), meta.ino());
    let (open, named) = (directory.metadata(), fs::metadata(path));
    open.is_ok_and(|open| named.is_ok_and(|named| identity(open) == identity(named)))
}

/// `None` if another process still holds the lock at the deadline, or if locking fails.
fn lock(mut directory: File, deadline: Instant) -> Option<Flock<File>> {
    loop {
        match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Some(lock),
            Err((again, Errno::EWOULDBLOCK)) if Instant::now() < deadline => directory = again,
            Err(_) => return None,
        }
        thread::sleep(LOCK_PAUSE);
    }
}

fn ensure_bpffs(pins: &Path) -> Result<(), IsolationError> {
    let existing = pins.ancestors().find(|path| path.exists());
    if existing.is_some_and(|path| statfs(path).is_ok_and(|s| s.filesystem_type() == BPF_FS_MAGIC))
    {
        return Ok(());
    }
    let mount_point = if pins.starts_with(BPFFS) {
        Path::new(BPFFS)
    } else {
        pins
    };
    let failed = |error: io::Error| {
        unsuitable(
            format!(
                "{} is not in a bpffs, and mounting one failed: {error}",
                pins.display()
            ),
            format!("mount -t bpf bpf {}", mount_point.display()),
        )
    };
    fs::create_dir_all(mount_point).map_err(failed)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let data = Some("mode=700");
    mount(Some("bpf"), mount_point, Some("bpf"), flags, data).map_err(|e| failed(e.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that ends removes the directory while its successor waits for the lock.
    #[test]
    fn a_lock_is_taken_only_on_a_directory_that_still_exists() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("instance");
        let soon = || Instant::now() + Duration::from_millis(50);
        fs::create_dir(&path).unwrap();
        let first = lock(File::open(&path).unwrap(), soon()).unwrap();
        assert!(is_at(&first, &path));
        assert!(lock(File::open(&path).unwrap(), soon()).is_none());
        let waiting = File::open(&path).unwrap();
        fs::remove_dir(&path).unwrap();
        drop(first);
        let late = lock(waiting, soon()).unwrap();
        assert!(!is_at(&late, &path));
        fs::create_dir(&path).unwrap();
        assert!(!is_at(&late, &path));
    }
}
