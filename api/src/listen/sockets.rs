//! Listening sockets of a server: its public addresses, the cluster listener and the internal socket.

use std::fs::{self, Permissions};
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::task::Poll;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::{Instant, sleep, sleep_until};

use crate::handover::{Given, Role};

/// How long an address may stay in use after the previous server process was killed: a child between fork and exec holds
/// copies of its listeners, and a client on this host that retries a refused connection can connect a socket to itself,
/// which then occupies the port.
const LAST_HOLDER: Duration = Duration::from_secs(2);
/// Pause between two attempts to bind an address.
const BIND_PAUSE: Duration = Duration::from_millis(5);
/// Delay after a failed `accept`, which usually fails for lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A listening socket could not be bound to an address.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}")]
pub struct ListenError {
    address: String,
    #[source]
    source: io::Error,
}

/// Listening sockets. Dropping a call of [`Sockets::accept`] closes none of them and loses no connection.
#[derive(Debug)]
pub struct Sockets {
    public: Vec<TcpListener>,
    /// See [`super::internal`]; `None` in tests.
    internal: Option<UnixListener>,
    /// The cluster listener. `None` outside a cluster.
    cluster: Option<TcpListener>,
    /// The socket to poll first. Rotates, so that a busy one cannot starve the others.
    first: usize,
    not_before: Option<Instant>,
}

/// A connection that was accepted.
pub(super) enum Arrival {
    Public(TcpStream, SocketAddr),
    Internal(UnixStream),
    /// A connection from another node, if its certificate proves it.
    Cluster(TcpStream, SocketAddr),
}

/// Binds all addresses; if one cannot be bound, none stays bound. If an address is in use, waits until it is free, for
/// at most [`LAST_HOLDER`].
///
/// # Errors
/// Returns [`ListenError`] with the first address that cannot be bound.
pub async fn bind(addresses: &[SocketAddr]) -> Result<Vec<TcpListener>, ListenError> {
    let deadline = Instant::now() + LAST_HOLDER;
    let mut listeners = Vec::with_capacity(addresses.len());
    for &address in addresses {
        let listener = loop {
            match TcpListener::bind(address).await {
                Ok(listener) => break listener,
                Err(e) if e.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                    sleep(BIND_PAUSE).await;
                }
                Err(source) => {
                    return Err(ListenError {
                        address: address.to_string(),
                        source,
                    });
                }
            }
        };
        listeners.push(listener);
    }
    Ok(listeners)
}

/// Binds the internal socket at `path`, replacing one that a previous server left behind.
fn bind_internal(path: &Path) -> Result<UnixListener, ListenError> {
    let bound = || {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        fs::set_permissions(path, Permissions::from_mode(0o600))?;
        Ok(listener)
    };
    bound().map_err(|source| ListenError {
        address: path.display().to_string(),
        source,
    })
}

impl Sockets {
    #[must_use]
    pub fn new(public: Vec<TcpListener>, internal: Option<UnixListener>) -> Self {
        Self {
            public,
            internal,
            cluster: None,
            first: 0,
            not_before: None,
        }
    }

    /// Takes over sockets from a predecessor.
    ///
    /// # Errors
    /// Returns an error if a descriptor is not a socket that the runtime can use.
    pub fn inherit(given: &mut Given) -> io::Result<Self> {
        let listening = given.take_all(Role::Listen).into_iter().map(|fd| {
            let listener = std::net::TcpListener::from(fd);
            listener.set_nonblocking(true)?;
            TcpListener::from_std(listener)
        });
        let public = listening.collect::<io::Result<Vec<_>>>()?;
        let internal = given.take(Role::Internal).map(|fd| {
            let listener = std::os::unix::net::UnixListener::from(fd);
            listener.set_nonblocking(true)?;
            UnixListener::from_std(listener)
        });
        let cluster = given.take(Role::Cluster).map(|fd| {
            let listener = std::net::TcpListener::from(fd);
            listener.set_nonblocking(true)?;
            TcpListener::from_std(listener)
        });
        let mut sockets = Self::new(public, internal.transpose()?);
        sockets.cluster = cluster.transpose()?;
        Ok(sockets)
    }

    /// Binds the cluster listener, unless it was handed over. Does nothing without an address.
    ///
    /// # Errors
    /// Returns [`ListenError`] if the address cannot be bound.
    pub async fn with_cluster(mut self, address: Option<SocketAddr>) -> Result<Self, ListenError> {
        let bound = self.cluster.as_ref().and_then(|l| l.local_addr().ok());
        if bound != address {
            self.cluster = match address {
                Some(address) => bind(&[address]).await?.pop(),
                None => None,
            };
        }
        Ok(self)
    }

    /// Binds the internal socket at `path`, unless it was handed over. The caller must hold the lock of the state
    /// directory.
    ///
    /// # Errors
    /// Returns [`ListenError`] if the socket cannot be bound.
    pub fn with_internal(mut self, path: &Path) -> Result<Self, ListenError> {
        if self.internal.is_none() {
            self.internal = Some(bind_internal(path)?);
        }
        Ok(self)
    }

    #[must_use]
    pub fn with_public(mut self, public: Vec<TcpListener>) -> Self {
        self.public = public;
        self
    }

    /// Copies of all sockets, for a successor.
    ///
    /// # Errors
    /// Returns an error if a descriptor cannot be duplicated.
    pub fn copies(&self) -> io::Result<Vec<(Role, OwnedFd)>> {
        let mut copies = Vec::new();
        for listener in &self.public {
            copies.push((Role::Listen, listener.as_fd().try_clone_to_owned()?));
        }
        if let Some(internal) = &self.internal {
            copies.push((Role::Internal, internal.as_fd().try_clone_to_owned()?));
        }
        if let Some(cluster) = &self.cluster {
            copies.push((Role::Cluster, cluster.as_fd().try_clone_to_owned()?));
        }
        Ok(copies)
    }

    /// The addresses of the public sockets.
    ///
    /// # Errors
    /// Returns an error if the kernel does not name an address.
    pub fn addresses(&self) -> io::Result<Vec<SocketAddr>> {
        self.public.iter().map(TcpListener::local_addr).collect()
    }

    /// Waits for the next connection. If the future is dropped, no connection is lost.
    pub(super) async fn accept(&mut self) -> Arrival {
        loop {
            if let Some(at) = self.not_before {
                sleep_until(at).await;
                self.not_before = None;
            }
            match poll_fn(|cx| self.poll_accept(cx)).await {
                Ok(arrival) => return arrival,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection: retrying");
                    self.not_before = Some(Instant::now() + ACCEPT_PAUSE);
                }
            }
        }
    }

    fn poll_accept(&mut self, cx: &mut std::task::Context<'_>) -> Poll<io::Result<Arrival>> {
        if let Some(internal) = &self.internal
            && let Poll::Ready(accepted) = internal.poll_accept(cx)
        {
            return Poll::Ready(accepted.map(|(stream, _)| Arrival::Internal(stream)));
        }
        if let Some(cluster) = &self.cluster
            && let Poll::Ready(accepted) = cluster.poll_accept(cx)
        {
            return Poll::Ready(accepted.map(|(stream, peer)| Arrival::Cluster(stream, peer)));
        }
        let count = self.public.len();
        for at in (0..count).map(|n| (self.first + n) % count) {
            if let Poll::Ready(accepted) = self.public[at].poll_accept(cx) {
                self.first = at + 1;
                return Poll::Ready(accepted.map(|(stream, peer)| Arrival::Public(stream, peer)));
            }
        }
        Poll::Pending
    }
}
