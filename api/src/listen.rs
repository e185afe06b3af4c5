//! The server's front door: accepts connections, speaks TLS, HTTP/1.1 and HTTP/2, and has each request
//! answered by [`Dispatch`].
//!
//! ```text
//! accept (one task for each address) ─► admit (owner of the seats) ─► conn (one task for each) ─► dispatch
//!                                          ▲       │                    │   ▲
//!                                          │       └── has to go ───────┼───┘
//!                                          └──────── seat given back ───┘
//! ```
//! What must never happen: a client holding more than [`limits`] allow, for longer than they allow; a client turned
//! away while another has connections to spare.

mod activity;
mod clients;
mod conn;
mod dispatch;
mod eviction;
pub mod limits;
mod seats;

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

pub use clients::TrustedProxies;
pub use dispatch::Dispatch;
pub use limits::Limits;

use crate::proxy::Routes;
use clients::Clients;
use seats::{Full, Seats};

/// Connections that wait for the owner of the seats.
const ACCEPTED: usize = 64;
/// Until the next attempt when no connection can be accepted, mostly for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Probes of a silent client: after a minute, every ten seconds, six times.
const PROBE_AFTER_S: u32 = 60;
const PROBE_EVERY_S: u32 = 10;
const PROBES: u32 = 6;
/// Refused connections are counted in one line of the log for so long.
const REFUSED_EVERY: Duration = Duration::from_secs(10);

/// The server cannot listen.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen at {address}")]
pub struct ListenError {
    address: SocketAddr,
    #[source]
    source: io::Error,
}

/// Everything that serving takes.
#[derive(Debug)]
pub struct Server<R> {
    tls: Option<TlsSettings>,
    limits: Limits,
    clients: Clients,
    dispatch: Dispatch<R>,
}

/// A certificate and what goes with it.
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

/// Binds all addresses or none.
///
/// # Errors
/// Names the address that cannot be bound.
pub async fn bind(addresses: &[SocketAddr]) -> Result<Vec<TcpListener>, ListenError> {
    let mut listeners = Vec::with_capacity(addresses.len());
    for &address in addresses {
        let bound = TcpListener::bind(address).await;
        listeners.push(bound.map_err(|source| ListenError { address, source })?);
    }
    Ok(listeners)
}

/// Lets the process have as many open files as it may: each connection takes one or two.
///
/// # Errors
/// The kernel refuses; the limit stays as it was.
pub fn raise_file_limit() -> io::Result<u64> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    Ok(hard)
}

impl<R: Routes> Server<R> {
    /// Plain HTTP without `tls`.
    pub fn new(
        dispatch: Dispatch<R>,
        tls: Option<Arc<rustls::ServerConfig>>,
        limits: Limits,
    ) -> Self {
        let mut dispatch = dispatch;
        dispatch.set_body_pause(limits.body_pause);
        let clients = Clients::new(limits.trusted_proxies.clone(), limits.connections_of_peer);
        Self {
            clients,
            tls: tls.map(|config| TlsSettings(TlsAcceptor::from(config))),
            limits,
            dispatch,
        }
    }

    /// Serves until `stop` is done, then lets what is under way end, for [`limits::DRAIN`] at most.
    pub async fn serve(self, listeners: Vec<TcpListener>, stop: impl Future<Output = ()>) {
        let server = Arc::new(self);
        let (accepted, mut arriving) = mpsc::channel(ACCEPTED);
        // Accepting and tending end when this is dropped.
        let mut always = JoinSet::new();
        for listener in listeners {
            always.spawn(accept(listener, accepted.clone()));
        }
        let tended = Arc::clone(&server);
        always.spawn(async move { tended.dispatch.proxy().tend().await });
        let (back, mut returned) = mpsc::unbounded_channel();
        let mut seats = Seats::new(&server.limits, back);
        let mut refusals = Refusals::default();
        let (stopping, is_stopping) = watch::channel(false);
        let mut connections = JoinSet::new();
        let mut stop = std::pin::pin!(stop);
        loop {
            tokio::select! {
                biased;
                () = &mut stop => break,
                Some(id) = returned.recv() => seats.give_back(id),
                // Only reaped: each has told its own troubles.
                Some(_) = connections.join_next() => {}
                Some((stream, address)) = arriving.recv() => {
                    match seats.take(address.ip()) {
                        Ok(seat) => {
                            let server = Arc::clone(&server);
                            let told = is_stopping.clone();
                            connections.spawn(conn::serve(server, stream, address, seat, told));
                        }
                        Err(full) => refusals.count(address, full),
                    }
                }
            }
        }
        drop((always, arriving));
        stopping.send_replace(true);
        let drained = async {
            while seats.taken() > 0
                && let Some(id) = returned.recv().await
            {
                seats.give_back(id);
            }
        };
        if tokio::time::timeout(server.limits.drain, drained)
            .await
            .is_err()
        {
            let left = seats.taken();
            tracing::warn!(left, "connections are cut off");
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
                tracing::warn!(%error, "cannot accept");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Connections that were refused: whoever floods the server does not flood its log.
#[derive(Debug, Default)]
struct Refusals {
    told: Option<Instant>,
    since: u64,
}

impl Refusals {
    fn count(&mut self, address: SocketAddr, full: Full) {
        self.since += 1;
        if self.told.is_some_and(|at| at.elapsed() < REFUSED_EVERY) {
            return;
        }
        let whose = match full {
            Full::InAll => "in all",
            Full::OfPeer => "of this client",
        };
        let refused = std::mem::take(&mut self.since);
        tracing::warn!(refused, last = %address, "too many connections {whose}: refused");
        self.told = Some(Instant::now());
    }
}

/// Has the kernel find out about clients that went without a word.
fn probe(stream: &TcpStream) -> nix::Result<()> {
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    setsockopt(stream, sockopt::TcpKeepIdle, &PROBE_AFTER_S)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &PROBE_EVERY_S)?;
    setsockopt(stream, sockopt::TcpKeepCount, &PROBES)
}
