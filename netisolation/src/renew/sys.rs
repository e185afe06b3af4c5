//! ioctls of a TAP's descriptor (the kernel's `Documentation/networking/tuntap.rst`), and membarrier(2).
#![expect(unsafe_code, reason = "there are no safe wrappers of these calls")]

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use nix::libc;

/// `linux/membarrier.h`.
const MEMBARRIER_CMD_GLOBAL: libc::c_int = 1;

/// IFF_TAP, IFF_VNET_HDR, IFF_PERSIST and others.
pub(super) fn tap_flags(tap: BorrowedFd<'_>) -> io::Result<libc::c_short> {
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_flags: 0 },
    };
    // SAFETY: TUNGETIFF writes one `ifreq`, which `request` is, and it outlives the call.
    check(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNGETIFF, &raw mut request) })?;
    // SAFETY: TUNGETIFF stored the flags in this member, and any value is an integer; `request` lives on.
    Ok(unsafe { request.ifr_ifru.ifru_flags })
}

/// Bytes of the header before each frame.
pub(super) fn header_len(tap: BorrowedFd<'_>) -> io::Result<libc::c_int> {
    read(tap, libc::TUNGETVNETHDRSZ)
}

/// Bytes of frames on their way into the kernel, at most.
pub(super) fn send_buffer(tap: BorrowedFd<'_>) -> io::Result<libc::c_int> {
    read(tap, libc::TUNGETSNDBUF)
}

pub(super) fn set_header_len(tap: BorrowedFd<'_>, bytes: libc::c_int) -> io::Result<()> {
    // SAFETY: TUNSETVNETHDRSZ reads one int, which `bytes` is until the call returns.
    check(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const bytes) })
}

/// Frames come whole and with checksums.
pub(super) fn set_no_offloads(tap: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: TUNSETOFFLOAD takes its argument by value and no pointer; the descriptor is borrowed until it returns.
    check(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETOFFLOAD, 0) })
}

/// Waits until all that was in a read-side section of RCU is out of it.
pub(super) fn await_readers() -> io::Result<()> {
    // SAFETY: membarrier takes three numbers and no pointer.
    let outcome = unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) };
    if outcome < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

fn read(tap: BorrowedFd<'_>, what: libc::Ioctl) -> io::Result<libc::c_int> {
    let mut value: libc::c_int = 0;
    // SAFETY: TUNGETVNETHDRSZ and TUNGETSNDBUF, the callers' requests, write one int, which `value` is until the call
    // returns.
    check(unsafe { libc::ioctl(tap.as_raw_fd(), what, &raw mut value) })?;
    Ok(value)
}

fn check(outcome: libc::c_int) -> io::Result<()> {
    if outcome < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
