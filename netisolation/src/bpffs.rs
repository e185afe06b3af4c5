//! An instance's directory in the bpffs, where its programs and maps outlive the server.
//!
//! ```text
//! PINS/INSTANCE/             locked by the server that owns it
//!   LAYOUT-TAPS-FLOWS/       maps: a server with the same layout and sizes takes them over
//!   links/tap-INDEX-IFINDEX  link of the program on a TAP
//!   links/uplink-IFINDEX     link of the program on an uplink
//! ```

use std::{
    fs::{self, File},
    io,
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
/// How long to wait for the lock. If a server is killed between fork and exec of a child, the child holds the lock
/// until exec closes its descriptors.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

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
        fs::create_dir_all(path.join("links")).map_err(failed)?;
        let lock = lock(File::open(&path).map_err(failed)?).ok_or_else(|| {
            unsuitable(
                format!("another server uses {}", path.display()),
                "stop that server, or give this one another state directory",
            )
        })?;
        Ok(Self { path, _lock: lock })
    }

    pub(crate) fn links(&self) -> PathBuf {
        self.path.join("links")
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

/// `None` if another process still holds the lock after [`LOCK_TIMEOUT`], or if locking fails.
fn lock(mut directory: File) -> Option<Flock<File>> {
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Some(lock),
            Err((again, Errno::EWOULDBLOCK)) if Instant::now() < deadline => directory = again,
            Err(_) => return None,
        }
        thread::sleep(LOCK_TIMEOUT / 100);
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
