//! Pseudo-terminals: one end for a process and its descendants, one for the agent.
//!
//! The process's end is the controlling terminal of its session, so keys such as ^C generate signals, and closing the
//! agent's end sends SIGHUP to the session.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use envd::{ConnectCode, ConnectError, PtySize};
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, FdFlag, OFlag, fcntl},
    pty::openpty,
    unistd::{Uid, fchown, geteuid},
};

use crate::{sys, users::User};

/// A size in characters; zero means unknown.
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

/// Opens a terminal. Returns the agent's end, non-blocking, and the process's end, owned by `user`.
pub(crate) fn open(size: Size, user: &User) -> Result<(OwnedFd, OwnedFd), Errno> {
    let ends = openpty(None, None)?;
    for end in [&ends.master, &ends.slave] {
        // No process can be started before the flag is set: the agent has one thread.
        fcntl(end, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    }
    fcntl(&ends.master, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    resize(ends.master.as_fd(), size)?;
    if geteuid().is_root() {
        // Like login(1), so that the user can open the terminal by name. The group stays as set by the devpts
        // mount.
        fchown(
            ends.slave.as_fd(),
            Some(Uid::from_raw(user.credentials.uid)),
            None,
        )?;
    }
    Ok((ends.master, ends.slave))
}

/// Changes the size. The foreground process group gets SIGWINCH.
pub(crate) fn resize(ours: BorrowedFd<'_>, size: Size) -> Result<(), Errno> {
    sys::set_window_size(ours, size.rows, size.cols)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_above_u16_are_refused() {
        let size = |rows, cols| Size::check(PtySize { cols, rows });
        assert_eq!(size(24, 80), Ok(Size { rows: 24, cols: 80 }));
        assert!(size(0, 0).is_ok());
        assert!(size(65_535, 65_535).is_ok());
        assert!(size(65_536, 80).is_err());
        assert!(size(24, u32::MAX).is_err());
    }
}
