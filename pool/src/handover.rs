//! State that one server process hands to the next: the lock of the state directory.

use std::{fs::File, io, os::fd::OwnedFd};

use crate::StateLock;

impl StateLock {
    /// Returns a copy. The directory stays locked until all copies, in any process, are dropped.
    ///
    /// # Errors
    /// Returns an error if the descriptor cannot be duplicated.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }
}

/// A lock taken by another process. The descriptor must be a copy of its [`StateLock`].
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
}
