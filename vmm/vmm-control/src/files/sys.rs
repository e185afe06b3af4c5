//! The ioctl by which a client configures a TAP.
#![expect(unsafe_code, reason = "an ioctl request without a safe wrapper")]

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use nix::libc;

/// Sets the length in bytes of the header before each frame of a TAP (TUNSETVNETHDRSZ).
pub(super) fn set_tap_header_len(tap: BorrowedFd<'_>, len: i32) -> io::Result<()> {
    // SAFETY: TUNSETVNETHDRSZ reads one int from a pointer. `len` is an int and lives until the call returns; the
    // descriptor is borrowed, so it stays open that long.
    let outcome = unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const len) };
    match outcome {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
