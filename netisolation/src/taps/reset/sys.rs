//! ioctls on a TAP's descriptor (kernel documentation, `networking/tuntap.rst`), and membarrier(2).
#![expect(unsafe_code, reason = "these calls have no safe wrappers")]

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use nix::libc;

/// `linux/membarrier.h`.
const MEMBARRIER_CMD_GLOBAL: libc::c_int = 1;

/// Flags of the TAP: IFF_TAP, IFF_VNET_HDR, IFF_PERSIST and others.
pub(crate) fn tap_flags(tap: BorrowedFd<'_>) -> io::Result<libc::c_short> {
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_flags: 0 },
    };
    // SAFETY: TUNGETIFF writes one `ifreq`, which `request` is, and it outlives the call.
    check(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNGETIFF, &raw mut request) })?;
    // SAFETY: TUNGETIFF stored the flags in this member, and any value is an integer; `request` lives on.
    Ok(unsafe { request.ifr_ifru.ifru_flags })
}

/// Length of the `virtio_net_hdr` before each frame, in bytes.
pub(super) fn header_len(tap: BorrowedFd<'_>) -> io::Result<libc::c_int> {
    read(tap, libc::TUNGETVNETHDRSZ)
}

/// Limit on frames sent into the kernel and not yet processed, in bytes.
pub(super) fn send_buffer(tap: BorrowedFd<'_>) -> io::Result<libc::c_int> {
    read(tap, libc::TUNGETSNDBUF)
}

pub(super) fn set_header_len(tap: BorrowedFd<'_>, bytes: libc::c_int) -> io::Result<()> {
    // SAFETY: TUNSETVNETHDRSZ reads one int, which `bytes` is until the call returns.
    check(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const bytes) })
}

/// Turns all offloads off: the kernel delivers frames segmented and with complete checksums.
pub(super) fn set_no_offloads(tap: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: TUNSETOFFLOAD takes its argument by value and no pointer; the descriptor is borrowed until it returns.
    check(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETOFFLOAD, 0) })
}

/// Waits until every RCU read-side critical section that is running now has ended.
pub(super) fn wait_for_rcu_readers() -> io::Result<()> {
    // SAFETY: membarrier takes three numbers and no pointer.
    let outcome = unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) };
    if outcome < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

fn read(tap: BorrowedFd<'_>, request: libc::Ioctl) -> io::Result<libc::c_int> {
    let mut value: libc::c_int = 0;
    // SAFETY: the callers' requests, TUNGETVNETHDRSZ and TUNGETSNDBUF, write one int, which `value` is until the call
    // returns.
    check(unsafe { libc::ioctl(tap.as_raw_fd(), request, &raw mut value) })?;
    Ok(value)
}

fn check(outcome: libc::c_int) -> io::Result<()> {
    if outcome < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
