//! Listening sockets: vsock, unix and TCP.

use std::{
    fs, io,
    net::{SocketAddr, TcpListener},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::net::UnixListener,
    },
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    libc,
    sys::socket::{
        AddressFamily, Backlog, SockFlag, SockType, VsockAddr, accept4, bind, getpeername, listen,
        setsockopt, socket, sockopt,
    },
};

use crate::sys;

/// Largest number of pending connections of a vsock listener. The kernel refuses further ones.
const BACKLOG: i32 = 1024;

/// A listening socket.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Unix,
    Tcp,
    Vsock(Peers),
}

/// The vsock peers whose connections are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peers {
    /// Only the host. Connections from programs in the guest, which arrive over vsock loopback, are closed.
    Host,
    Any,
}

/// A listening socket could not be created.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("cannot listen on vsock port {port}")]
    Vsock {
        port: u32,
        #[source]
        source: Errno,
    },
    #[error("cannot listen on {path}")]
    Unix {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot listen on {address}")]
    Tcp {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
}

impl Listener {
    /// Listens on a vsock port, on every context ID of the guest.
    ///
    /// # Errors
    /// Returns [`ListenError::Vsock`] if a system call fails, for example because the kernel has no vsock support or
    /// the port is taken.
    pub fn vsock(port: u32, peers: Peers) -> Result<Self, ListenError> {
        let failed = |source| ListenError::Vsock { port, source };
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Vsock, SockType::Stream, flags, None).map_err(failed)?;
        let address = VsockAddr::new(libc::VMADDR_CID_ANY, port);
        bind(socket.as_raw_fd(), &address).map_err(failed)?;
        listen(&socket, Backlog::new(BACKLOG).map_err(failed)?).map_err(failed)?;
        let kind = Kind::Vsock(peers);
        Ok(Self { socket, kind })
    }

    /// Listens on a unix socket. An existing socket file at `path` is replaced.
    ///
    /// # Errors
    /// Returns [`ListenError::Unix`] if the old file cannot be removed or the path cannot be bound.
    pub fn unix(path: &Path) -> Result<Self, ListenError> {
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
            kind: Kind::Unix,
        })
    }

    /// Listens on a TCP address.
    ///
    /// # Errors
    /// Returns [`ListenError::Tcp`] if the address cannot be bound.
    pub fn tcp(address: SocketAddr) -> Result<Self, ListenError> {
        let failed = |source| ListenError::Tcp { address, source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(Self {
            socket: listener.into(),
            kind: Kind::Tcp,
        })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Accepts one connection and makes it non-blocking. Returns `None` if none is pending, accepting fails, or the
    /// peer is not allowed.
    pub(crate) fn accept(&self) -> Option<OwnedFd> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = accept4(self.socket.as_raw_fd(), flags).ok().map(sys::own)?;
        match self.kind {
            Kind::Vsock(Peers::Host) if !is_host(&socket) => return None,
            // Without this option the kernel would hold back the last segment of a response (Nagle's algorithm).
            Kind::Tcp => setsockopt(&socket, sockopt::TcpNoDelay, &true).ok()?,
            Kind::Vsock(_) | Kind::Unix => {}
        }
        Some(socket)
    }
}

fn is_host(socket: &OwnedFd) -> bool {
    let peer = getpeername::<VsockAddr>(socket.as_raw_fd());
    peer.is_ok_and(|address| address.cid() == libc::VMADDR_CID_HOST)
}
