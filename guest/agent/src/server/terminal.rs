//! Terminals: a pair of ends, one for a process and what it starts, one for us.
//!
//! The process's end is the controlling terminal of its session, so that keys make signals and the end of
//! our end hangs everybody up.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use api_types::envd::{ConnectCode, ConnectError, PtySize};
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, FdFlag, OFlag, fcntl},
    pty::openpty,
    unistd::{Uid, fchown, geteuid},
};

use crate::{sys, users::User};

/// A size in characters that a terminal can have; zero means that it is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size {
    rows: u16,
    cols: u16,
}

impl Size {
    pub(crate) fn check(size: PtySize) -> Result<Self, ConnectError> {
        match (u16::try_from(size.rows), u16::try_from(size.cols)) {
            (Ok(rows), Ok(cols)) => Ok(Self { rows, cols }),
            _ => Err(ConnectError::new(
                ConnectCode::InvalidArgument,
                format!("a terminal cannot have {} x {}", size.cols, size.rows),
            )),
        }
    }
}

/// Makes a terminal of that size: our end, which does not block, and the process's, which is the user's.
pub(crate) fn open(size: Size, user: &User) -> Result<(OwnedFd, OwnedFd), Errno> {
    let ends = openpty(None, None)?;
    for end in [&ends.master, &ends.slave] {
        // There is one thread: nothing can be started in between.
        fcntl(end, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    }
    fcntl(&ends.master, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    resize(ends.master.as_fd(), size)?;
    if geteuid().is_root() {
        // As login(1) does: the user may open it again by name. The group stays that of the mount.
        fchown(
            ends.slave.as_fd(),
            Some(Uid::from_raw(user.credentials.uid)),
            None,
        )?;
    }
    Ok((ends.master, ends.slave))
}

/// Changes the size; who runs in the foreground is told by SIGWINCH.
pub(crate) fn resize(ours: BorrowedFd<'_>, size: Size) -> Result<(), Errno> {
    sys::set_window_size(ours, size.rows, size.cols)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_no_terminal_has_are_refused() {
        let size = |rows, cols| Size::check(PtySize { cols, rows });
        assert_eq!(size(24, 80), Ok(Size { rows: 24, cols: 80 }));
        assert!(size(0, 0).is_ok());
        assert!(size(65_535, 65_535).is_ok());
        assert!(size(65_536, 80).is_err());
        assert!(size(24, u32::MAX).is_err());
    }
}
