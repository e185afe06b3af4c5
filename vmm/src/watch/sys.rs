//! System calls of the watch that have no safe wrapper.
#![expect(
    unsafe_code,
    reason = "nix offers neither F_SETOWN_EX nor epoll_pwait2"
)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use nix::libc;
use nix::sys::epoll::{Epoll, EpollEvent};

/// `fcntl` command and owner kind of Linux's `fcntl.h`; the libc crate lacks them.
const F_SETOWN_EX: libc::c_int = 15;
const F_OWNER_TID: libc::c_int = 0;

/// `struct f_owner_ex` of Linux's `fcntl.h`.
#[repr(C)]
struct Owner {
    kind: libc::c_int,
    id: libc::pid_t,
}

/// Makes readiness of `fd` send SIGIO to the calling thread.
pub(super) fn signal_this_thread(fd: BorrowedFd<'_>) -> io::Result<()> {
    let owner = Owner {
        kind: F_OWNER_TID,
        id: nix::unistd::gettid().as_raw(),
    };
    // SAFETY: F_SETOWN_EX reads one `f_owner_ex`; `owner` has that layout (repr(C), two ints) and lives
    // until the call returns. The descriptor is borrowed, so it stays open that long.
    let outcome = unsafe { libc::fcntl(fd.as_raw_fd(), F_SETOWN_EX, &raw const owner) };
    check(outcome)?;
    // SAFETY: F_GETFL takes no pointer. The descriptor is borrowed, so it stays open until it returns.
    let flags = check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) })?;
    // SAFETY: F_SETFL takes an integer and no pointer. The descriptor is borrowed until it returns.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_ASYNC) })?;
    Ok(())
}

/// Waits with `epoll_pwait2`, because guest timers are finer than the milliseconds of `epoll_wait`. Returns the number
/// of events.
pub(super) fn wait(
    epoll: &Epoll,
    events: &mut [EpollEvent],
    timeout: Option<Duration>,
) -> io::Result<usize> {
    let limit = timeout.map(|time| libc::timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(time.subsec_nanos()),
    });
    let limit = limit
        .as_ref()
        .map_or(std::ptr::null(), std::ptr::from_ref::<libc::timespec>);
    // SAFETY: the call writes at most `events.len()` epoll events; `EpollEvent` is a transparent wrapper
    // of one and the slice is exclusively borrowed until the call returns. `limit` is null or points to
    // the timespec above, and the null signal mask means "leave it".
    let outcome = unsafe {
        libc::syscall(
            libc::SYS_epoll_pwait2,
            epoll.0.as_raw_fd(),
            events.as_mut_ptr(),
            events.len(),
            limit,
            std::ptr::null::<libc::sigset_t>(),
            0_usize,
        )
    };
    usize::try_from(outcome).map_err(|_| io::Error::last_os_error())
}

fn check(outcome: libc::c_int) -> io::Result<libc::c_int> {
    if outcome < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(outcome)
}
