//! The state directory, and its lock, which one server process hands to the next.

use library::durable::private_dir;
use std::{
    fs::{File, TryLockError},
    io,
    os::fd::OwnedFd,
    path::Path,
    time::{Duration, Instant},
};

use crate::error::PoolError;

/// Directories below the state directory.
pub(crate) const SANDBOXES: &str = "sandboxes";
pub(crate) const TEMPLATES: &str = "templates";
pub(crate) const FORKS: &str = "forks";
pub(crate) const IMAGES: &str = "images";
pub(crate) const VMMS: &str = "vmms";
const LOCK: &str = "lock";
/// Longest path of the state directory in bytes, so that the socket paths below it fit the kernel's limit of 107 bytes.
const MAX_STATE: usize = 60;
/// How long the lock may outlive a killed server. The kernel needs time to close the server's descriptors, and a child
/// process between fork and exec holds copies of them.
const LAST_HOLDER: Duration = Duration::from_secs(5);

/// Directory in which VMMs keep the writable layers of their guests.
pub const SCRATCH: &str = "/var/tmp";

/// The exclusive right to use a state directory. The kernel releases it when the last copy of the descriptor is closed,
/// at the latest when the process exits.
#[derive(Debug)]
pub struct StateLock(pub(crate) File);

impl StateLock {
    /// Takes the lock of the state directory, which is created if it does not exist. Waits for a killed server that is
    /// still exiting.
    ///
    /// # Errors
    /// Returns [`PoolError::Failed`] if the path is too long, if the directory cannot be created, or if another server
    /// uses it.
    pub fn take(state: &Path) -> Result<Self, PoolError> {
        let taken = || {
            if state.as_os_str().len() > MAX_STATE {
                return Err(io::Error::other(format!(
                    "the path is longer than {MAX_STATE} bytes, so the paths of unix sockets below it would be too long"
                )));
            }
            private_dir(state)?;
            lock(&state.join(LOCK), LAST_HOLDER)
        };
        taken().map(Self).map_err(|e| failed(state, &e))
    }

    /// A copy. The directory is locked until all copies, in whatever process, are dropped.
    ///
    /// # Errors
    /// Returns an error if the descriptor cannot be duplicated.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }
}

/// A lock that another process took. The descriptor must be a copy of its [`StateLock`].
impl From<OwnedFd> for StateLock {
    fn from(fd: OwnedFd) -> Self {
        Self(File::from(fd))
    }
}

impl From<StateLock> for OwnedFd {
    fn from(lock: StateLock) -> Self {
        lock.0.into()
    }
}

pub(crate) fn failed(state: &Path, why: &dyn std::fmt::Display) -> PoolError {
    PoolError::Failed {
        what: "open the pool",
        why: format!("{}: {why}", state.display()),
    }
}

/// Takes the lock that keeps other servers away from the state directory. Waits for at most `patience`.
fn lock(path: &Path, patience: Duration) -> io::Result<File> {
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)?;
    let deadline = Instant::now() + patience;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(TryLockError::WouldBlock) => {
                return Err(io::Error::other("another server uses the state directory"));
            }
            Err(TryLockError::Error(e)) => return Err(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_held_until_its_last_copy_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let first = StateLock::take(dir.path()).unwrap();
        let copy = OwnedFd::from(first.try_clone().unwrap());
        drop(first);
        assert!(StateLock::take(dir.path()).is_err(), "two have it");
        drop(StateLock::from(copy));
        StateLock::take(dir.path()).unwrap();
    }

    #[test]
    fn a_lock_is_awaited_until_its_last_holder_exits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let first = lock(&path, LAST_HOLDER).unwrap();
        assert!(lock(&path, Duration::ZERO).is_err(), "two have it");
        let last_holder = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            drop(first);
        });
        assert!(lock(&path, LAST_HOLDER).is_ok(), "it was not waited for");
        last_holder.join().unwrap();
    }
}
