//! Where connections come from.

use std::{
    fs, io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::net::UnixListener,
    },
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, Backlog, SockFlag, SockType, VsockAddr, accept4, bind, getpeername, listen,
        socket,
    },
};

use crate::sys;

/// A burst of connections fits; the next one is refused as if nobody listened.
const BACKLOG: i32 = 1024;

/// A socket that listens.
pub(crate) struct Listener {
    socket: OwnedFd,
    peers: Peers,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Peers {
    /// Who may open the socket's file.
    UnixUsers,
    /// The host alone: programs in the guest that reach vsock over its loopback are turned away.
    Host,
}

/// The socket cannot be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListenError {
    #[error("cannot listen on vsock port {port}")]
    Vsock {
        port: u16,
        #[source]
        source: Errno,
    },
    #[error("cannot listen on {path}")]
    Unix {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl Listener {
    /// On every address of the guest.
    pub(crate) fn vsock(port: u16) -> Result<Self, ListenError> {
        let failed = |source| ListenError::Vsock { port, source };
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Vsock, SockType::Stream, flags, None).map_err(failed)?;
        let address = VsockAddr::new(libc::VMADDR_CID_ANY, u32::from(port));
        bind(socket.as_raw_fd(), &address).map_err(failed)?;
        listen(&socket, Backlog::new(BACKLOG).map_err(failed)?).map_err(failed)?;
        Ok(Self {
            socket,
            peers: Peers::Host,
        })
    }

    /// On a path. A socket that is left there is replaced.
    pub(crate) fn unix(path: &Path) -> Result<Self, ListenError> {
        let failed = |source| ListenError::Unix {
            path: path.to_owned(),
            source,
        };
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            Ok(()) | Err(_) => {}
        }
        let socket = UnixListener::bind(path).map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        Ok(Self {
            socket: socket.into(),
            peers: Peers::UnixUsers,
        })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The next connection, non-blocking; `None` when nobody waits, or one came that is not let in.
    pub(crate) fn accept(&self) -> Option<OwnedFd> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = accept4(self.socket.as_raw_fd(), flags).ok().map(sys::own)?;
        (self.peers == Peers::UnixUsers || is_host(&socket)).then_some(socket)
    }
}

fn is_host(socket: &OwnedFd) -> bool {
    let peer = getpeername::<VsockAddr>(socket.as_raw_fd());
    peer.is_ok_and(|address| address.cid() == libc::VMADDR_CID_HOST)
}
