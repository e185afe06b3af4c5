//! System calls of the devices without a safe wrapper: vectored I/O on guest memory, entropy, TAP requests.
#![expect(
    unsafe_code,
    reason = "the kernel accesses guest memory through iovecs, so that no byte is copied twice"
)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::libc;
use vm_memory::VolatileSlice;

use super::buffers::MAX_SEGMENTS;

/// Reads once into guest memory. Returns the number of bytes read, 0 at the end of the file.
pub(super) fn readv(fd: BorrowedFd<'_>, into: &[VolatileSlice<'_>]) -> io::Result<usize> {
    let (iovecs, count) = iovecs(into);
    // SAFETY: the kernel writes to `count` areas, each inside mapped guest memory: vm-memory makes a `VolatileSlice`
    // only after its bounds check, and `into` borrows the mapping until the call returns. No reference into guest
    // memory exists, so aliasing rules do not apply to it.
    let done = unsafe { libc::readv(fd.as_raw_fd(), iovecs.as_ptr(), count) };
    bytes(done)
}

/// Writes from guest memory once. Returns the number of bytes written.
pub(super) fn writev(fd: BorrowedFd<'_>, from: &[VolatileSlice<'_>]) -> io::Result<usize> {
    let (iovecs, count) = iovecs(from);
    // SAFETY: as in `readv`: every area is mapped guest memory that `from` borrows until the call returns, and the
    // kernel only reads it.
    let done = unsafe { libc::writev(fd.as_raw_fd(), iovecs.as_ptr(), count) };
    bytes(done)
}

/// Writes `first` and then guest memory in one call. Returns the number of bytes written.
pub(super) fn write_behind(
    fd: BorrowedFd<'_>,
    first: &[u8],
    from: &[VolatileSlice<'_>],
) -> io::Result<usize> {
    let (behind, count) = iovecs(from);
    let mut all = [behind[0]; MAX_SEGMENTS + 1];
    all[0].iov_base = first.as_ptr().cast_mut().cast();
    all[0].iov_len = first.len();
    all[1..].copy_from_slice(&behind);
    // SAFETY: as in `writev`. The additional area is `first`, which is borrowed until the call returns, and the kernel
    // only reads it.
    let done = unsafe { libc::writev(fd.as_raw_fd(), all.as_ptr(), count + 1) };
    bytes(done)
}

/// Reads once from `offset` of a file into guest memory.
pub(super) fn preadv(
    fd: BorrowedFd<'_>,
    into: &[VolatileSlice<'_>],
    offset: u64,
) -> io::Result<usize> {
    let (iovecs, count) = iovecs(into);
    let offset = file_offset(offset)?;
    // SAFETY: as in `readv`: every area is mapped guest memory that `into` borrows until the call returns.
    let done = unsafe { libc::preadv(fd.as_raw_fd(), iovecs.as_ptr(), count, offset) };
    bytes(done)
}

/// Writes from guest memory once to `offset` of a file.
pub(super) fn pwritev(
    fd: BorrowedFd<'_>,
    from: &[VolatileSlice<'_>],
    offset: u64,
) -> io::Result<usize> {
    let (iovecs, count) = iovecs(from);
    let offset = file_offset(offset)?;
    // SAFETY: as in `readv`: every area is mapped guest memory that `from` borrows until the call returns, and the
    // kernel only reads it.
    let done = unsafe { libc::pwritev(fd.as_raw_fd(), iovecs.as_ptr(), count, offset) };
    bytes(done)
}

/// Fills the start of `into` from the host kernel's random pool without blocking. Returns the number of bytes.
pub(super) fn random(into: &VolatileSlice<'_>) -> io::Result<usize> {
    let guard = into.ptr_guard_mut();
    // SAFETY: the kernel writes at most `into.len()` bytes to mapped guest memory, which `into` borrows and `guard`
    // keeps mapped until the call returns.
    let done = unsafe { libc::getrandom(guard.as_ptr().cast(), guard.len(), libc::GRND_NONBLOCK) };
    bytes(done)
}

/// The flags of a TAP (`IFF_…` of `linux/if_tun.h`).
pub(super) fn tap_flags(tap: BorrowedFd<'_>) -> io::Result<i32> {
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_flags: 0 },
    };
    // SAFETY: TUNGETIFF writes one `ifreq`. `request` is one, and it outlives the call.
    let outcome = unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNGETIFF, &raw mut request) };
    check(outcome)?;
    // SAFETY: `ifru_flags` was initialized above, and TUNGETIFF stores the flags in that member; any bit pattern is a
    // valid `c_short`.
    Ok(i32::from(unsafe { request.ifr_ifru.ifru_flags }))
}

/// Sets which offloads the reader of a TAP's frames accepts (`TUN_F_…`).
pub(super) fn set_tap_offloads(tap: BorrowedFd<'_>, offloads: u32) -> io::Result<()> {
    // SAFETY: TUNSETOFFLOAD takes its argument by value and no pointer; the descriptor is borrowed until the call
    // returns.
    let outcome = unsafe {
        libc::ioctl(
            tap.as_raw_fd(),
            libc::TUNSETOFFLOAD,
            libc::c_ulong::from(offloads),
        )
    };
    check(outcome)
}

/// The iovecs of at most [`MAX_SEGMENTS`] slices. Further slices are left out; the caller then sees a short transfer.
fn iovecs(slices: &[VolatileSlice<'_>]) -> ([libc::iovec; MAX_SEGMENTS], libc::c_int) {
    let mut iovecs = [libc::iovec {
        iov_base: std::ptr::null_mut(),
        iov_len: 0,
    }; MAX_SEGMENTS];
    let mut count: libc::c_int = 0;
    for (iovec, slice) in iovecs.iter_mut().zip(slices) {
        // The guard can be dropped at once: it keeps nothing mapped, since the crate's Xen mappings are disabled.
        let guard = slice.ptr_guard_mut();
        iovec.iov_base = guard.as_ptr().cast();
        iovec.iov_len = guard.len();
        count += 1;
    }
    (iovecs, count)
}

fn file_offset(offset: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput.into())
}

fn bytes(outcome: isize) -> io::Result<usize> {
    usize::try_from(outcome).map_err(|_| io::Error::last_os_error())
}

fn check(outcome: libc::c_int) -> io::Result<()> {
    if outcome < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Creates a TAP in the calling thread's network namespace, configured like the TAP that a client hands to a VM.
#[cfg(test)]
pub(super) fn open_tap(name: &str) -> io::Result<std::os::fd::OwnedFd> {
    let mut options = std::fs::OpenOptions::new();
    let tun = options.read(true).write(true).open("/dev/net/tun")?;
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru {
            ifru_flags: i16::try_from(flags).unwrap(),
        },
    };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = i8::try_from(from).unwrap();
    }
    // SAFETY: TUNSETIFF reads and writes one `ifreq`. `request` is one, and it outlives the call.
    let outcome = unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    check(outcome)?;
    let len = 12;
    // SAFETY: TUNSETVNETHDRSZ reads one int from a pointer. `len` is an int and outlives the call.
    let outcome = unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const len) };
    check(outcome)?;
    Ok(tun.into())
}
