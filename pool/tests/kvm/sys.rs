//! The unsafe code of these tests.
#![expect(unsafe_code, reason = "an ioctl has no safe interface")]

use std::{fs::File, os::fd::AsRawFd};

nix::ioctl_read!(ext4_shutdown, b'X', 125, u32);

/// EXT4_GOING_FLAGS_NOLOGFLUSH of Linux's `fs/ext4/ext4.h`: nothing more is written, not even the journal.
const NO_LOG_FLUSH: u32 = 2;

/// Makes the ext4 file system of an open file return EIO for each operation, as if its disk were gone.
pub(crate) fn shut_down(file: &File) -> nix::Result<()> {
    let mut flags = NO_LOG_FLUSH;
    // SAFETY: EXT4_IOC_SHUTDOWN reads a u32 through the pointer. `flags` is one, and lives until the call returns.
    unsafe { ext4_shutdown(file.as_raw_fd(), &raw mut flags) }.map(drop)
}
