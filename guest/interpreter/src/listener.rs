//! Where connections come from: a TCP port for programs in the guest, and a vsock port for the host, which
//! saves its requests the way through the agent.

use std::{
    fs::File,
    net::{SocketAddr, TcpListener},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, Backlog, SockFlag, SockType, VsockAddr, bind, listen, setsockopt, socket,
        sockopt,
    },
};

use crate::sys;

const BACKLOG: i32 = 128;

/// Nobody could reach the server.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListenError {
    #[error("cannot listen on {address}")]
    Tcp {
        address: SocketAddr,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot listen on vsock port {port}")]
    Vsock {
        port: u32,
        #[source]
        source: Errno,
    },
}

/// A socket that listens.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: OwnedFd,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Tcp,
    Vsock,
}

impl Listener {
    pub(crate) fn tcp(address: SocketAddr) -> Result<Self, ListenError> {
        let failed = |source| ListenError::Tcp { address, source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(Self {
            socket: listener.into(),
            kind: Kind::Tcp,
        })
    }

    pub(crate) fn vsock(port: u32) -> Result<Self, ListenError> {
        let failed = |source| ListenError::Vsock { port, source };
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Vsock, SockType::Stream, flags, None).map_err(failed)?;
        let any = VsockAddr::new(u32::MAX, port);
        bind(socket.as_raw_fd(), &any).map_err(failed)?;
        listen(&socket, Backlog::new(BACKLOG).map_err(failed)?).map_err(failed)?;
        Ok(Self {
            socket,
            kind: Kind::Vsock,
        })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// One connection, which does not block. To be called when one waits: where none does, Linux 6.1's vsock
    /// sleeps until the next tick.
    pub(crate) fn accept(&self) -> Option<File> {
        let socket = sys::accept(self.fd()).ok()?;
        if self.kind == Kind::Tcp {
            // What leaves in one piece arrives in one piece.
            setsockopt(&socket, sockopt::TcpNoDelay, &true).ok()?;
        }
        Some(File::from(socket))
    }
}
