//! Accepts connections, terminates TLS, speaks HTTP/1.1 and HTTP/2, and passes each request to [`Dispatch`].
//!
//! ```text
//! accept (one task per address) ─► admit (owns the permits) ─► conn (one task per connection) ─► dispatch
//!                                     ▲       │                  │   ▲
//!                                     │       └──── evicted ─────┼───┘
//!                                     └───── permit released ────┘
//! ```
//! Invariants: no client exceeds the [`limits`] on resources and on time. At the total limit, the module `eviction`
//! makes room for clients that hold few connections.

mod activity;
mod clients;
mod conn;
mod dispatch;
mod eviction;
pub mod limits;
mod peer;
mod permits;

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{setsockopt, sockopt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

pub use dispatch::Dispatch;
pub use limits::Limits;
pub use peer::TrustedProxies;

use crate::proxy::Routes;
use clients::ClientLimiter;
use eviction::Full;
use permits::Permits;

/// Maximum number of accepted connections that wait for admission.
const ACCEPTED: usize = 64;
/// How long an address may stay in use after the previous server process was killed: a child between fork and exec holds
/// copies of its listeners, and a client on this host that retries a refused connection can connect a socket to itself,
/// which then occupies the port.
const LAST_HOLDER: Duration = Duration::from_secs(2);
/// Pause between two attempts to bind an address.
const BIND_PAUSE: Duration = Duration::from_millis(5);
/// Delay after a failed `accept`, which usually fails for lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// TCP keep-alive: first probe after a minute of silence, then one every ten seconds; the sixth lost probe ends the
/// connection.
const PROBE_AFTER_S: u32 = 60;
const PROBE_EVERY_S: u32 = 10;
const PROBES: u32 = 6;
/// Interval of the log line that counts refused connections.
const REFUSED_EVERY: Duration = Duration::from_secs(10);

/// A listening socket cannot be bound to an address.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}")]
pub struct ListenError {
    address: SocketAddr,
    #[source]
    source: io::Error,
}

/// The parts of a server that all of its connections share.
#[derive(Debug)]
pub struct Server<R> {
    tls: Option<TlsSettings>,
    limits: Limits,
    clients: ClientLimiter,
    dispatch: Dispatch<R>,
}

/// Gives the acceptor a `Debug` implementation.
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
                    tokio::time::sleep(BIND_PAUSE).await;
                }
                Err(source) => return Err(ListenError { address, source }),
            }
        };
        listeners.push(listener);
    }
    Ok(listeners)
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
    /// `tls`: `None` for plain HTTP.
    pub fn new(
        dispatch: Dispatch<R>,
        tls: Option<Arc<rustls::ServerConfig>>,
        limits: Limits,
    ) -> Self {
        let mut dispatch = dispatch;
        dispatch.set_body_pause(limits.body_pause);
        let clients =
            ClientLimiter::new(limits.trusted_proxies.clone(), limits.connections_of_peer);
        Self {
            clients,
            tls: tls.map(|config| TlsSettings(TlsAcceptor::from(config))),
            limits,
            dispatch,
        }
    }

    /// Serves until `stop` completes, then waits until all connections have ended, for at most [`Limits::drain`], and
    /// closes the rest.
    pub async fn serve(self, listeners: Vec<TcpListener>, stop: impl Future<Output = ()>) {
        let server = Arc::new(self);
        let (accepted, mut arriving) = mpsc::channel(ACCEPTED);
        // Dropping the set aborts the accept tasks and the task that closes expired proxy connections.
        let mut always = JoinSet::new();
        for listener in listeners {
            always.spawn(accept(listener, accepted.clone()));
        }
        let tended = Arc::clone(&server);
        always.spawn(async move { tended.dispatch.proxy().close_expired().await });
        let (back, mut returned) = mpsc::unbounded_channel();
        let mut permits = Permits::new(&server.limits, back);
        let mut refusals = Refusals::default();
        let (stopping, is_stopping) = watch::channel(false);
        let mut connections = JoinSet::new();
        let mut stop = std::pin::pin!(stop);
        loop {
            tokio::select! {
                biased;
                () = &mut stop => break,
                Some(id) = returned.recv() => permits.release(id),
                // Reaps finished tasks; each connection logs its own errors.
                Some(_) = connections.join_next() => {}
                Some((stream, address)) = arriving.recv() => {
                    match permits.acquire(address.ip()) {
                        Ok(permit) => {
                            let server = Arc::clone(&server);
                            let stopping = is_stopping.clone();
                            connections.spawn(conn::serve(server, stream, address, permit, stopping));
                        }
                        Err(full) => refusals.count(address, full),
                    }
                }
            }
        }
        drop((always, arriving));
        stopping.send_replace(true);
        let drained = async {
            while permits.taken() > 0
                && let Some(id) = returned.recv().await
            {
                permits.release(id);
            }
        };
        if tokio::time::timeout(server.limits.drain, drained)
            .await
            .is_err()
        {
            let left = permits.taken();
            tracing::warn!(
                left,
                drain_s = server.limits.drain.as_secs(),
                "drain timed out: closing the remaining connections"
            );
        }
        connections.shutdown().await;
    }
}

async fn accept(listener: TcpListener, accepted: mpsc::Sender<(TcpStream, SocketAddr)>) {
    loop {
        match listener.accept().await {
            Ok(arrived) => {
                if accepted.send(arrived).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection: trying again");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
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
        tracing::warn!(refused, last = %address, "connections refused: too many connections {whose}");
        self.last_logged = Some(Instant::now());
    }
}

/// Enables TCP keep-alive, so that the kernel detects clients that disappeared without closing their connection.
fn probe(stream: &TcpStream) -> nix::Result<()> {
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    setsockopt(stream, sockopt::TcpKeepIdle, &PROBE_AFTER_S)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &PROBE_EVERY_S)?;
    setsockopt(stream, sockopt::TcpKeepCount, &PROBES)
}
