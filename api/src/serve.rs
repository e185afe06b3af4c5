//! The server as a whole: everything is opened in order, serves, and is closed in the reverse order.
//!
//! State directory, keys, pool (which takes over the sandboxes of the server before), registry, listeners. When it is
//! told to stop nothing new is created, requests under way end (bounded by [`crate::listen::limits::DRAIN`]), changes of
//! sandboxes are completed, and what runs is left to the next server or ended.

use std::{
    fs, io,
    net::SocketAddr,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use ipnet::IpNet;
use pool::{Pool, PoolConfig, PoolError};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::{info, warn};

use crate::{
    auth::{Door, KeyError, KeyFile, Rate, watch_keys},
    control::{self, Control},
    listen::{self, Dispatch, Limits, ListenError, Server},
    network::{self, NetworkError, NetworkSpec},
    proxy::{Hosts, Proxy},
    registry::{Registry, sample_all},
    telemetry::Telemetry,
    tls::{self, TlsError},
};

/// How long changes of sandboxes may take once the server is told to stop.
const SETTLE: Duration = Duration::from_secs(60);
/// Whoever asks twice does not want to wait.
const IMPATIENT: i32 = 130;

/// What is served, checked.
#[derive(Debug)]
pub struct ServeSpec {
    /// Addresses to listen at.
    pub listen: Vec<SocketAddr>,
    /// The pool, with the state directory in it.
    pub pool: PoolConfig,
    /// Domain of the sandboxes' host names, with its port unless that is 443.
    pub domain: Option<String>,
    /// Peers that speak for others.
    pub trusted_proxies: Vec<IpNet>,
    /// Absent: plain HTTP.
    pub tls: Option<TlsFiles>,
    /// Of each key; absent: nobody is asked for a key.
    pub rate: Option<Rate>,
    /// Longest timeout of a sandbox, in seconds.
    pub max_timeout_s: u32,
    /// What happens to running sandboxes at the end.
    pub on_exit: OnExit,
    /// Absent: sandboxes have no network.
    pub network: Option<NetworkSpec>,
}

/// A certificate and its key, in PEM.
#[derive(Debug)]
pub struct TlsFiles {
    /// The chain, the server's own first.
    pub certificates: PathBuf,
    /// The key.
    pub key: PathBuf,
}

/// What happens to running sandboxes when the server stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnExit {
    /// They go on; the next server takes them over.
    Keep,
    /// They end.
    Kill,
}

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The state directory.
    #[error(transparent)]
    State(#[from] StateError),
    /// The keys.
    #[error(transparent)]
    Keys(#[from] KeyError),
    /// The certificate.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// An address.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The sandboxes' network.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// The pool.
    #[error("the pool cannot be opened")]
    Pool(#[source] PoolError),
    /// No way to be told to stop.
    #[error("cannot wait for signals")]
    Signals(#[source] io::Error),
}

/// Why a state directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// It cannot be made or looked at.
    #[error("cannot use the state directory {}: run as root, or name another with --state", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Others can read secrets in it.
    #[error(
        "the state directory {} is open to others (owner {owner}, mode {mode:o}): chown and chmod 700 it",
        path.display()
    )]
    Open {
        /// Which.
        path: PathBuf,
        /// Its owner's number.
        owner: u32,
        /// Its permission bits.
        mode: u32,
    },
}

/// Makes a state directory if need be; one that others can enter is refused.
///
/// # Errors
/// See [`StateError`].
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
/// Something cannot be opened. Once it serves, it ends well.
pub async fn run(spec: ServeSpec) -> Result<(), ServeError> {
    open_state(&spec.pool.state)?;
    let mut signals = Signals::new().map_err(ServeError::Signals)?;
    let tls = match &spec.tls {
        Some(files) => Some(tls::load(&files.certificates, &files.key)?),
        None => None,
    };
    let keys = KeyFile::of(&spec.pool.state);
    let door = Arc::new(open_door(&spec, &keys)?);
    let listeners = listen::bind(&spec.listen).await?;
    let limits = limits(&spec);
    let mut config = spec.pool.clone();
    let mut network = None;
    // Before the pool moves this process into a control group of its own: entries of maps count where the maps were
    // made, and guests cause them.
    if let Some(wanted) = &spec.network {
        let (isolation, opened) =
            network::open(wanted, &config.state, config.max_sandboxes).await?;
        config.network = Some(isolation);
        network = Some(opened);
    }
    let opened = Pool::open(config).await;
    let (pool, recovered, ended) = opened.map_err(ServeError::Pool)?;
    let log = network.as_ref().map(|network| network.log.clone());
    let registry = Registry::open(pool.clone(), recovered, ended, log);
    tokio::spawn(sample_all(registry.clone(), pool.clone()));
    if spec.rate.is_some() {
        tokio::spawn(watch_keys(keys, door.clone()));
    }
    let app = Arc::new(Control {
        registry: registry.clone(),
        pool: pool.clone(),
        door,
        telemetry: Telemetry::shared(),
        domain: spec.domain.clone(),
        network,
        max_timeout_s: spec.max_timeout_s,
    });
    let hosts = Hosts::new(spec.domain.as_deref().map(without_port));
    let hosts = match spec.rate {
        Some(_) => hosts,
        None => hosts.strict(),
    };
    let proxy = Proxy::new(registry.clone());
    let dispatch = Dispatch::new(hosts, proxy, control::router(app));
    for address in &spec.listen {
        info!(%address, tls = spec.tls.is_some(), "serving");
    }
    let server = Server::new(dispatch, tls, limits);
    server
        .serve(listeners, stop(&mut signals, registry.clone()))
        .await;
    close(pool, &registry, spec.on_exit).await;
    Ok(())
}

/// As many connections as there may be open files for.
fn limits(spec: &ServeSpec) -> Limits {
    let limits = match listen::raise_file_limit() {
        Ok(files) => Limits::within(files),
        Err(why) => {
            warn!(why = %why, "the limit of open files stays as it is");
            Limits::default()
        }
    };
    Limits {
        trusted_proxies: spec.trusted_proxies.clone().into(),
        ..limits
    }
}

fn open_door(spec: &ServeSpec, keys: &KeyFile) -> Result<Door, ServeError> {
    let Some(rate) = spec.rate else {
        warn!("nobody is asked for a key");
        return Ok(Door::open());
    };
    let keys = keys.read()?;
    if keys.iter().all(|key| key.revoked_unix_s.is_some()) {
        warn!("there are no keys, so nobody is let in: make one with `cube-api key new`");
    }
    if spec.tls.is_none() && spec.listen.iter().any(|a| !a.ip().is_loopback()) {
        warn!(
            "keys and tokens cross the network unencrypted: use --tls-cert, or a proxy that does"
        );
    }
    Ok(Door::locked(keys, rate))
}

fn without_port(domain: &str) -> &str {
    domain.split_once(':').map_or(domain, |(name, _)| name)
}

/// Until the server is told to stop. From then on nothing is created, and a second signal ends the program.
async fn stop(signals: &mut Signals, registry: Registry) {
    let name = signals.next().await;
    info!(signal = name, "stopping");
    // Its first effect is what is wanted here: no new sandboxes.
    tokio::spawn(async move { registry.drain().await });
    if let Ok(mut again) = Signals::new() {
        tokio::spawn(async move {
            let name = again.next().await;
            warn!(signal = name, "told twice to stop: ending at once");
            std::process::exit(IMPATIENT);
        });
    }
}

async fn close(pool: Pool, registry: &Registry, on_exit: OnExit) {
    if tokio::time::timeout(SETTLE, registry.drain())
        .await
        .is_err()
    {
        warn!("changes of sandboxes are still under way; the next server sweeps what is half done");
    }
    pool.close(on_exit == OnExit::Kill).await;
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
    fn a_state_directory_is_made_private_and_an_open_one_refused() {
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
