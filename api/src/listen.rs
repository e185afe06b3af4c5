//! Accepts connections, terminates TLS, speaks HTTP/1.1 and HTTP/2, and passes each request to [`Dispatch`].
//!
//! ```text
//! sockets (accept) ─► Server (owns the permits) ─► conn (one task per connection) ─► dispatch ─► gate ─┬─► Backend
//!    │ internal          ▲       │                    │   ▲                                            └─► forward
//!    └─► greeting ───────┤       └────── evicted ─────┼───┘
//!                        └────── permit released ─────┘
//! ```
//! Invariants: no client exceeds the [`limits`] on resources and on time. At the total limit, the module `eviction`
//! makes room for clients that hold few connections. A server that has handed its [`Backend`] over to a successor
//! closes no connection while a request may be in transit. It forwards the request and tells the client to reconnect.

// From a socket to the backend.
mod sockets;

mod activity;
mod conn;
mod dispatch;
mod forward;
mod gate;
mod route;

// Limits, and who is counted.
pub mod limits;

mod clients;
mod eviction;
mod guesses;
mod peer;
mod permits;

mod internal;

use std::future::{Future, pending};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tasks::{Task, boxed};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

pub use dispatch::{Backend, Dispatch};
pub use gate::{Gate, Recipient};
pub use internal::{INTERNAL, Reload, ask_reload};
pub use limits::Limits;
pub use peer::TrustedProxies;
pub use sockets::{ListenError, Sockets, bind};

use crate::peers::{Peer, PeerTls};
use crate::proxy::Routes;
use clients::ClientLimiter;
use conn::Phase;
use eviction::Full;
use internal::Greeting;
use permits::Permits;
use sockets::Arrival;

/// Maximum number of reload requests that wait for a response.
const RELOADS: usize = 16;
/// Interval of the log line that counts refused connections.
const REFUSED_EVERY: Duration = Duration::from_secs(10);

/// The connections of a process and their shared state. Serves only while one of its methods is polled.
#[derive(Debug)]
pub struct Server<R> {
    shared: Arc<Shared<R>>,
    permits: Permits,
    /// Ids of permits that were dropped.
    returned: mpsc::UnboundedReceiver<u64>,
    connections: JoinSet<()>,
    /// Connections to the internal socket that have not been handled yet.
    greetings: JoinSet<Option<Greeting>>,
    phase: watch::Sender<Phase>,
    refusals: Refusals,
    reloads: (mpsc::Sender<Reload>, Option<mpsc::Receiver<Reload>>),
}

/// Origin of a connection.
#[derive(Clone, Debug)]
pub(super) enum Came {
    Client,
    /// The cluster listener. Membership of the peer is checked for each request.
    Node(Arc<Peer>),
}

/// The parts of a server that all of its connections share.
#[derive(Debug)]
struct Shared<R> {
    tls: Option<TlsSettings>,
    /// TLS of the cluster listener.
    nodes: Option<PeerTls>,
    limits: Limits,
    clients: ClientLimiter,
    dispatch: Dispatch<R>,
}

/// Wraps the acceptor to give it a `Debug` implementation.
#[derive(Clone)]
struct TlsSettings(TlsAcceptor);

impl std::fmt::Debug for TlsSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TlsSettings")
    }
}

impl std::ops::Deref for TlsSettings {
    type Target = TlsAcceptor;

    fn deref(&self) -> &TlsAcceptor {
        &self.0
    }
}

/// Raises the soft limit of open files to the hard limit, since each connection needs one or two descriptors. Returns
/// the new limit.
///
/// # Errors
/// Returns an error if `getrlimit` or `setrlimit` fails; the limit is then unchanged.
pub fn raise_file_limit() -> io::Result<u64> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    Ok(hard)
}

impl<R: Routes> Server<R> {
    /// `tls` is `None` for plain HTTP. `nodes` is for connections from other nodes.
    pub fn new(
        dispatch: Dispatch<R>,
        tls: Option<Arc<rustls::ServerConfig>>,
        nodes: Option<PeerTls>,
        limits: Limits,
    ) -> Self {
        let mut dispatch = dispatch;
        dispatch.set_limits(&limits);
        let clients =
            ClientLimiter::new(limits.trusted_proxies.clone(), limits.connections_of_peer);
        let (back, returned) = mpsc::unbounded_channel();
        let permits = Permits::new(&limits, back);
        let (asked, reloads) = mpsc::channel(RELOADS);
        let shared = Arc::new(Shared {
            clients,
            tls: tls.map(|config| TlsSettings(TlsAcceptor::from(config))),
            nodes,
            limits,
            dispatch,
        });
        Self {
            shared,
            permits,
            returned,
            connections: JoinSet::new(),
            greetings: JoinSet::new(),
            phase: watch::Sender::new(Phase::Serving),
            refusals: Refusals::default(),
            reloads: (asked, Some(reloads)),
        }
    }

    /// Reload requests from the internal socket. `None` after the first call.
    pub fn take_reloads(&mut self) -> Option<mpsc::Receiver<Reload>> {
        self.reloads.1.take()
    }

    /// Serves new connections until `stop` completes, then closes like [`Server::close`].
    pub async fn serve(mut self, listeners: Vec<TcpListener>, stop: impl Future<Output = ()>) {
        let mut sockets = Sockets::new(listeners, None);
        self.accept_until(&mut sockets, stop).await;
        drop(sockets);
        self.close().await;
    }

    /// Accepts and serves connections until `until` completes.
    pub async fn accept_until<T>(
        &mut self,
        sockets: &mut Sockets,
        until: impl Future<Output = T>,
    ) -> T {
        self.run(Some(sockets), until).await
    }

    /// Serves the open connections until `until` completes, and accepts no new ones. New clients wait in the backlog of
    /// the listening sockets.
    pub async fn serve_until<T>(&mut self, until: impl Future<Output = T>) -> T {
        self.run(None, until).await
    }

    /// From now on, responds to each HTTP/1.1 request with `Connection: close`, and closes HTTP/2 connections when
    /// their streams have ended. Call it once a successor accepts new connections.
    pub fn move_clients_over(&mut self) {
        self.phase.send_replace(Phase::Moved);
    }

    /// Number of open connections, upgraded ones included.
    #[must_use]
    pub fn open_connections(&self) -> usize {
        self.permits.taken()
    }

    /// Serves until no connection is left. Accepts no new ones.
    pub async fn finish(&mut self) {
        while self.permits.taken() > 0
            && let Some(id) = self.returned.recv().await
        {
            self.permits.release(id);
        }
    }

    /// Waits until all requests have been answered, for at most [`Limits::drain`], and closes the remaining
    /// connections.
    pub async fn close(mut self) {
        self.phase.send_replace(Phase::Stopping);
        self.greetings.shutdown().await;
        let drain = self.shared.limits.drain;
        if tokio::time::timeout(drain, self.finish()).await.is_err() {
            tracing::warn!(
                left = self.permits.taken(),
                drain_s = drain.as_secs(),
                "drain timed out: closing the remaining connections"
            );
        }
        self.connections.shutdown().await;
    }

    async fn run<T>(
        &mut self,
        mut sockets: Option<&mut Sockets>,
        until: impl Future<Output = T>,
    ) -> T {
        let mut until = std::pin::pin!(until);
        loop {
            let accept = async {
                match &mut sockets {
                    Some(sockets) => sockets.accept().await,
                    None => pending().await,
                }
            };
            tokio::select! {
                biased;
                done = &mut until => return done,
                Some(id) = self.returned.recv() => self.permits.release(id),
                // Reaps finished tasks. Each connection logs its own errors.
                Some(_) = self.connections.join_next() => {}
                Some(greeted) = self.greetings.join_next() => match greeted {
                    Ok(Some(Greeting::Forwarded(stream, peer, came))) => {
                        self.admit(peer, |shared, permit, phase| {
                            boxed(conn::serve_forwarded(shared, stream, (peer, came), permit, phase))
                        });
                    }
                    // If too many wait, the connection is closed, and the command reports that.
                    Ok(Some(Greeting::Reload(reload))) => drop(self.reloads.0.try_send(reload)),
                    Ok(None) | Err(_) => {}
                },
                arrival = accept => match arrival {
                    Arrival::Public(stream, peer) => self.admit(peer, |shared, permit, phase| {
                        boxed(conn::serve(shared, stream, peer, permit, phase))
                    }),
                    Arrival::Cluster(stream, peer) => self.admit(peer, |shared, permit, phase| {
                        boxed(conn::serve_node(shared, stream, peer, permit, phase))
                    }),
                    Arrival::Internal(stream) => {
                        self.greetings.spawn(boxed(internal::greeting(stream)));
                    }
                },
            }
        }
    }

    fn admit(
        &mut self,
        peer: SocketAddr,
        serve: impl FnOnce(Arc<Shared<R>>, permits::Permit, watch::Receiver<Phase>) -> Task,
    ) {
        match self.permits.acquire(peer.ip()) {
            Ok(permit) => {
                let connection = serve(Arc::clone(&self.shared), permit, self.phase.subscribe());
                self.connections.spawn(connection);
            }
            Err(full) => self.refusals.count(peer, full),
        }
    }
}

/// Counts refused connections and logs them at a bounded rate, so that a flood of connections does not flood the log.
#[derive(Debug, Default)]
struct Refusals {
    last_logged: Option<Instant>,
    since: u64,
}

impl Refusals {
    fn count(&mut self, address: SocketAddr, full: Full) {
        self.since += 1;
        if self
            .last_logged
            .is_some_and(|at| at.elapsed() < REFUSED_EVERY)
        {
            return;
        }
        let whose = match full {
            Full::Total => "in total",
            Full::PerPeer => "of this client",
        };
        let refused = std::mem::take(&mut self.since);
        tracing::warn!(refused, last = %address, "refused connections: too many connections {whose}");
        self.last_logged = Some(Instant::now());
    }
}
