//! Start and stop of the server. [`run`] opens the state directory, the certificate and the keys, takes the lock of the
//! state directory, binds the addresses, and opens the network, the pool (which finds the sandboxes of the previous
//! server process) and the registry, in this order. The lock precedes the addresses, because a killed server that still
//! exits holds both. From then on clients' connections wait instead of being refused. Work that no client waits for
//! (removing leftovers, loading templates, warm slots) begins after that.
//!
//! After SIGTERM or SIGINT the server refuses to create sandboxes, completes in-flight requests (for at most
//! [`crate::listen::limits::DRAIN`]) and pending changes of sandboxes (then for at most `SETTLE`), and finally, as
//! `--on-exit` directs, leaves the running sandboxes to the next server process or kills them.

use std::{
    fs, io,
    net::SocketAddr,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use ipnet::IpNet;
use pool::{OnClose, Pool, PoolConfig, PoolError, StateLock};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::{info, warn};

use crate::{
    auth::{Auth, Authenticator, KeyError, KeyFile, watch_keys},
    control::{self, Control},
    listen::{self, Dispatch, Limits, ListenError, Server},
    network::{self, NetworkError, NetworkSpec},
    proxy::{Hosts, Proxy},
    registry::{Registry, sample_all},
    telemetry::Telemetry,
    tls::{self, TlsError},
};

/// Time that pending changes of sandboxes have to complete after the listener has stopped.
const SETTLE: Duration = Duration::from_secs(60);
/// Exit code after a second signal.
const EXIT_WITHOUT_DRAIN: i32 = 130;

/// The validated configuration of a server.
#[derive(Debug)]
pub struct ServeSpec {
    /// Addresses to bind.
    pub listen: Vec<SocketAddr>,
    pub pool: PoolConfig,
    /// Domain below which sandboxes have host names, with the server's port unless the port is 443. `None`: no domain
    /// is configured; requests name their sandbox by headers, or, unless authentication is off, by a host name
    /// `<port>-<id>` below any domain.
    pub domain: Option<String>,
    /// Reverse proxies whose `X-Forwarded-For` is trusted.
    pub trusted_proxies: Vec<IpNet>,
    /// `None`: plain HTTP.
    pub tls: Option<TlsFiles>,
    pub auth: Auth,
    /// Maximum timeout that a client can set for a sandbox, in seconds.
    pub max_timeout_s: u32,
    pub on_exit: OnClose,
    /// `None`: sandboxes have no network.
    pub network: Option<NetworkSpec>,
}

/// PEM files of the server's certificate.
#[derive(Debug)]
pub struct TlsFiles {
    /// The certificate chain, leaf first.
    pub certificates: PathBuf,
    /// The private key of the leaf certificate.
    pub key: PathBuf,
}

/// Why the server could not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Keys(#[from] KeyError),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error(transparent)]
    Network(#[from] NetworkError),
    #[error("cannot open the pool")]
    Pool(#[source] PoolError),
    #[error("cannot install handlers for SIGTERM and SIGINT")]
    Signals(#[source] io::Error),
}

/// Why a state directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error(
        "cannot create or open the state directory {}: run as root, or name another directory with --state",
        path.display()
    )]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Other users could read the secrets in the directory.
    #[error(
        "other users can access the state directory {} (owner {owner}, mode {mode:o}): \
         chown it to the server's user and chmod it to 700",
        path.display()
    )]
    Open {
        path: PathBuf,
        /// The uid of the directory's owner.
        owner: u32,
        /// The permission bits of the directory.
        mode: u32,
    },
}

/// Creates the state directory if it does not exist.
///
/// # Errors
/// Returns [`StateError::Open`] if the directory belongs to another user or gives access to other users, and
/// [`StateError::Io`] if it cannot be created or examined.
pub fn open_state(path: &Path) -> Result<(), StateError> {
    let failed = |source| StateError::Io {
        path: path.to_owned(),
        source,
    };
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o700);
    builder.create(path).map_err(failed)?;
    let meta = fs::metadata(path).map_err(failed)?;
    let (owner, mode) = (meta.uid(), meta.mode() & 0o7777);
    if owner != nix::unistd::geteuid().as_raw() || mode & 0o077 != 0 {
        let path = path.to_owned();
        return Err(StateError::Open { path, owner, mode });
    }
    Ok(())
}

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// Returns [`ServeError`] if the server cannot start. Once started, it always returns `Ok`.
pub async fn run(spec: ServeSpec) -> Result<(), ServeError> {
    open_state(&spec.pool.state)?;
    let mut signals = Signals::new().map_err(ServeError::Signals)?;
    let tls = match &spec.tls {
        Some(files) => Some(tls::load(&files.certificates, &files.key)?),
        None => None,
    };
    let keys = KeyFile::of(&spec.pool.state);
    let authenticator = Arc::new(authenticator(&spec, &keys)?);
    let lock = lock(&spec.pool.state).await?;
    let listeners = listen::bind(&spec.listen).await?;
    let limits = limits(&spec);
    let mut config = spec.pool.clone();
    let mut network = None;
    // The kernel charges entries of eBPF maps to the cgroup of the process that created the maps. Guests cause such
    // entries, so the maps are created before the pool moves this process into the server's own cgroup.
    if let Some(wanted) = &spec.network {
        let (isolation, opened) =
            network::open(wanted, &config.state, config.max_sandboxes).await?;
        config.network = Some(isolation);
        network = Some(opened);
    }
    let opened = Pool::open_locked(config, lock).await;
    let (pool, recovered, ended) = opened.map_err(ServeError::Pool)?;
    let refused = network.as_ref().map(|network| network.log.clone());
    let registry = Registry::open(pool.clone(), recovered.alive);
    tokio::spawn(registry.clone().forget_ended(ended, refused));
    tokio::spawn(sample_all(registry.clone()));
    if !authenticator.is_open() {
        tokio::spawn(watch_keys(keys, authenticator.clone()));
    }
    let hosts = Hosts::new(spec.domain.as_deref().map(without_port));
    // Without keys, only the check of `Host` keeps web pages of other origins from reaching sandboxes by DNS rebinding.
    let hosts = if authenticator.is_open() {
        hosts.strict()
    } else {
        hosts
    };
    let app = Arc::new(Control {
        registry: registry.clone(),
        pool: pool.clone(),
        authenticator,
        telemetry: Telemetry::shared(),
        domain: spec.domain.clone(),
        network,
        max_timeout_s: spec.max_timeout_s,
    });
    let proxy = Proxy::new(registry);
    let dispatch = Dispatch::new(hosts, proxy, control::router(app));
    for address in &spec.listen {
        info!(%address, tls = spec.tls.is_some(), "serving");
    }
    let server = Server::new(dispatch, tls, limits);
    server
        .serve(listeners, stop(&mut signals, pool.clone()))
        .await;
    close(pool, spec.on_exit).await;
    Ok(())
}

async fn lock(state: &Path) -> Result<StateLock, ServeError> {
    let state = state.to_owned();
    let taken = tokio::task::spawn_blocking(move || StateLock::take(&state)).await;
    let panicked = |e: tokio::task::JoinError| PoolError::Failed {
        what: "lock the state directory",
        why: e.to_string(),
    };
    taken
        .map_err(panicked)
        .and_then(|lock| lock)
        .map_err(ServeError::Pool)
}

/// Raises the limit of open files to its hard limit and derives the connection limits from it. If it cannot be raised,
/// the default connection limits apply.
fn limits(spec: &ServeSpec) -> Limits {
    let limits = match listen::raise_file_limit() {
        Ok(files) => Limits::within(files),
        Err(why) => {
            warn!(
                why = %why,
                "cannot raise the limit of open files (RLIMIT_NOFILE): \
                 under load, connections may fail for lack of descriptors"
            );
            Limits::default()
        }
    };
    Limits {
        trusted_proxies: spec.trusted_proxies.clone().into(),
        ..limits
    }
}

fn authenticator(spec: &ServeSpec, keys: &KeyFile) -> Result<Authenticator, ServeError> {
    let Auth::Keys { rate } = spec.auth else {
        warn!("authentication is off: every client on this host can control every sandbox");
        return Ok(Authenticator::open());
    };
    let keys = keys.read()?;
    if keys.iter().all(|key| key.revoked_unix_s.is_some()) {
        warn!(
            "no API key exists, so every request will be rejected: create a key with `cube-api key new`"
        );
    }
    if spec.tls.is_none() && spec.listen.iter().any(|a| !a.ip().is_loopback()) {
        warn!(
            "API keys and tokens cross the network unencrypted: use --tls-cert and --tls-key, \
             or a reverse proxy that terminates TLS"
        );
    }
    Ok(Authenticator::with_keys(keys, rate))
}

fn without_port(domain: &str) -> &str {
    domain.split_once(':').map_or(domain, |(name, _)| name)
}

/// Completes on the first SIGTERM or SIGINT. From then on no sandbox is created, and a second signal makes the process
/// exit at once.
async fn stop(signals: &mut Signals, pool: Pool) {
    let name = signals.next().await;
    info!(
        signal = name,
        "stopping: draining requests and changes of sandboxes"
    );
    // `drain` refuses new sandboxes at once; `close` waits until pending changes have completed.
    tokio::spawn(async move { pool.drain().await });
    if let Ok(mut again) = Signals::new() {
        tokio::spawn(async move {
            let name = again.next().await;
            warn!(
                signal = name,
                "second signal received: exiting without draining"
            );
            std::process::exit(EXIT_WITHOUT_DRAIN);
        });
    }
}

async fn close(pool: Pool, on_exit: OnClose) {
    if tokio::time::timeout(SETTLE, pool.drain()).await.is_err() {
        warn!(
            timeout_s = SETTLE.as_secs(),
            "changes of sandboxes did not complete in time: the next server process recovers or removes these sandboxes"
        );
    }
    pool.close(on_exit).await;
    info!("stopped");
}

/// The signals that stop the server.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_state_directory_is_created_private_and_one_open_to_others_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("a/b");
        open_state(&state).unwrap();
        let mode = fs::metadata(&state).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        fs::set_permissions(&state, fs::Permissions::from_mode(0o750)).unwrap();
        let refused = open_state(&state);
        assert!(matches!(refused, Err(StateError::Open { mode: 0o750, .. })));
    }
}
