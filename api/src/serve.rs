//! Start and stop of the server. [`run`] opens the certificate and the keys, takes the lock of the state directory,
//! binds the addresses, and opens the [`engine`]: the network, the pool (which finds the sandboxes of the previous
//! server process) and the registry, in this order. The lock is taken before the addresses, because a killed server
//! that is still exiting holds both. From then on clients' connections wait instead of being refused. Work that no
//! client waits for (removing leftovers, loading templates, warm slots) starts after that.
//!
//! After SIGTERM or SIGINT the server refuses to create sandboxes. It completes in-flight requests (for at most
//! [`crate::listen::limits::DRAIN`]) and then pending changes of sandboxes (for at most `SETTLE`). Finally, depending
//! on `server.on_exit`, it leaves the running sandboxes to the next server process or kills them.
//!
//! After SIGHUP or a request on the internal socket, a new process takes over ([`crate::handover`]), and this one
//! finishes its connections. The new process gets lock and sockets from its predecessor.

mod spec;

mod engine;
mod exports;
mod reload;

mod error;

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use netisolation::ResolverSockets;
use pool::{OnClose, Pool, PoolError, StateLock};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
};
use tracing::{error, info, warn};

use crate::{
    auth::{Auth, Authenticator, KeyFile},
    handover::{self, Given, HandoverError, Predecessor, Role},
    listen::{self, Dispatch, INTERNAL, Limits, Reload, Server, Sockets},
    proxy::Hosts,
    systemd::{self, State},
    tls::{self, Renewal},
};
pub use error::{ServeError, StateError};
pub use spec::{BuildsSpec, ServeSpec, TlsFiles};

use engine::Engine;
use reload::{Failed, Reloader, finish};

/// Time that pending changes of sandboxes have to complete after the listener has stopped.
const SETTLE: Duration = Duration::from_secs(60);
/// Exit code after a second signal.
const EXIT_WITHOUT_DRAIN: i32 = 130;

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

/// Serves until SIGTERM or SIGINT, or until another process has taken over and the connections of this one have ended.
/// `predecessor` is the process that hands over to this one.
///
/// # Errors
/// Returns [`ServeError`] if the server cannot start. Once started, it returns an error only if it can neither hand
/// over nor continue.
pub async fn run(mut spec: ServeSpec, predecessor: Option<Predecessor>) -> Result<(), ServeError> {
    let Some(predecessor) = predecessor else {
        let start = Start::new(&spec)?;
        let lock = lock(&spec.pool.state).await?;
        let mut given = Given::default();
        for listener in std::mem::take(&mut spec.bound) {
            given.add(Role::Listen, listener.into());
        }
        let sockets = start.sockets(&spec, &mut given).await?;
        return start.serve(&spec, lock, sockets, None, None).await;
    };
    let start = match Start::new(&spec) {
        Ok(start) => start,
        Err(why) => {
            predecessor.failed(model::chain(&why)).await;
            return Err(why);
        }
    };
    let mut given = predecessor.prepared().await?;
    let taken = async {
        let lock = given.take(Role::Lock).map(StateLock::from);
        let missing = || HandoverError::Protocol("given without a lock".to_owned());
        Ok::<_, ServeError>((
            lock.ok_or_else(missing)?,
            start.sockets(&spec, &mut given).await?,
        ))
    };
    let taken = taken.await;
    match taken {
        Ok((lock, sockets)) => {
            let dns = given.take_resolver();
            let predecessor = Some(predecessor);
            start.serve(&spec, lock, sockets, dns, predecessor).await
        }
        Err(why) => {
            predecessor.failed(model::chain(&why)).await;
            Err(why)
        }
    }
}

/// Kills all sandboxes that a stopped server has left running, and removes their network and their cgroups. Paused
/// sandboxes, snapshots and templates are kept.
///
/// # Errors
/// Returns [`ServeError`] if the state directory is in use or cannot be opened.
pub async fn end(spec: &ServeSpec) -> Result<(), ServeError> {
    let start = Start::new(spec)?;
    let lock = lock(&spec.pool.state).await?;
    let (engine, backend) = Engine::open(spec, lock, start.authenticator, None).await?;
    drop(backend);
    close(engine, OnClose::EndRunning).await;
    Ok(())
}

/// The parts of a server that several processes can have at the same time.
struct Start {
    program: PathBuf,
    signals: Signals,
    tls: Option<(Arc<rustls::ServerConfig>, Renewal)>,
    authenticator: Arc<Authenticator>,
    limits: Limits,
}

/// Why a server stops serving.
enum Turn {
    /// A signal of this name.
    Stop(&'static str),
    /// SIGHUP, or a request that waits for the outcome.
    Reload(Option<Reload>),
}

impl Start {
    fn new(spec: &ServeSpec) -> Result<Self, ServeError> {
        open_state(&spec.pool.state)?;
        let program = handover::program().map_err(ServeError::Sockets)?;
        let signals = Signals::new().map_err(ServeError::Signals)?;
        let tls = match &spec.tls {
            Some(files) => Some(tls::load(&files.certificates, &files.key)?),
            None => None,
        };
        let keys = KeyFile::of(&spec.pool.state);
        Ok(Self {
            program,
            signals,
            tls,
            authenticator: Arc::new(authenticator(spec, &keys)?),
            limits: limits(spec),
        })
    }

    /// The sockets of a predecessor or of systemd. Creates new ones if there are none.
    async fn sockets(&self, spec: &ServeSpec, given: &mut Given) -> Result<Sockets, ServeError> {
        let inherited = Sockets::inherit(given).map_err(ServeError::Sockets)?;
        let inherited = inherited.with_internal(&spec.pool.state.join(INTERNAL))?;
        let nodes = spec
            .cluster
            .as_ref()
            .map(|cluster| cluster.settings.address);
        let inherited = inherited.with_cluster(nodes).await?;
        let is_bound = !inherited
            .addresses()
            .map_err(ServeError::Sockets)?
            .is_empty();
        if is_bound {
            return Ok(inherited);
        }
        Ok(inherited.with_public(listen::bind(&spec.listen).await?))
    }

    async fn serve(
        self,
        spec: &ServeSpec,
        lock: StateLock,
        mut sockets: Sockets,
        dns: Option<ResolverSockets>,
        predecessor: Option<Predecessor>,
    ) -> Result<(), ServeError> {
        let copy = lock.try_clone().map_err(ServeError::Lock)?;
        let authenticator = Arc::clone(&self.authenticator);
        let opened = Engine::open(spec, copy, authenticator, dns).await;
        let (engine, backend) = match (opened, predecessor) {
            (Ok(opened), predecessor) => {
                if let Some(predecessor) = predecessor {
                    predecessor.serving().await;
                } else {
                    systemd::notify(State::Ready);
                }
                opened
            }
            (Err(why), Some(predecessor)) => {
                predecessor.failed(model::chain(&why)).await;
                return Err(why);
            }
            (Err(why), None) => return Err(why),
        };
        let hosts = Hosts::new(spec.domain.as_deref().map(without_port));
        // Without keys, only the check of `Host` prevents web pages of other origins from reaching sandboxes by DNS
        // rebinding.
        let hosts = if self.authenticator.is_open() {
            hosts.strict()
        } else {
            hosts
        };
        let addresses = sockets.addresses().unwrap_or_default();
        for address in &addresses {
            info!(%address, tls = spec.tls.is_some(), "serving");
        }
        let (domain, is_open) = (spec.domain.as_deref(), self.authenticator.is_open());
        if let Some(variables) = exports::exports(&addresses, spec.tls.is_some(), domain, is_open) {
            info!("for Python, JavaScript and `cube`: {variables}");
        }
        let dispatch = Dispatch::new(hosts, backend);
        let reloader = Reloader {
            spec,
            program: self.program,
            lock: &lock,
            authenticator: &self.authenticator,
            gate: dispatch.gate(),
        };
        let tls = self.tls.map(|(config, renewal)| {
            tasks::spawn(renewal.watch());
            config
        });
        let mut server = Server::new(
            dispatch,
            tls,
            spec.cluster.as_ref().map(|c| c.tls.clone()),
            self.limits,
        );
        let mut reloads = server.take_reloads();
        let mut signals = self.signals;
        let mut engine = Some(engine);
        let signal = loop {
            let turn = next_turn(&mut signals, &mut reloads);
            let reload = match server.accept_until(&mut sockets, turn).await {
                Turn::Stop(signal) => break signal,
                Turn::Reload(reload) => reload,
            };
            let outcome = reloader
                .run(&mut engine, &mut server, &mut sockets, &mut signals)
                .await;
            let told = match &outcome {
                Ok(pid) => Ok(*pid),
                Err(Failed::Kept(why)) => Err(model::chain(why)),
                Err(Failed::Lost(why)) => Err(model::chain(why)),
            };
            if let Ok(pid) = told {
                systemd::notify(State::MovedTo(pid));
            } else {
                systemd::notify(State::Ready);
            }
            if let Some(reload) = reload {
                reload.answer(&told).await;
            }
            match outcome {
                Ok(successor) => {
                    // Further requests get the same result.
                    while let Some(Ok(reload)) = reloads.as_mut().map(mpsc::Receiver::try_recv) {
                        reload.answer(&told).await;
                    }
                    drop((sockets, reloads, lock));
                    finish(server, &mut signals, successor).await;
                    return Ok(());
                }
                Err(Failed::Kept(HandoverError::Stopping)) => break "SIGTERM or SIGINT",
                Err(Failed::Kept(why)) => {
                    error!(why = %model::chain(&why), "the reload failed: this server process continues to serve");
                }
                Err(Failed::Lost(why)) => return Err(why),
            }
        };
        systemd::notify(State::Stopping);
        if let Some(engine) = engine {
            stop(signal, &engine.pool);
            drop(sockets);
            server.close().await;
            close(engine, spec.on_exit).await;
        }
        Ok(())
    }
}

async fn next_turn(signals: &mut Signals, reloads: &mut Option<mpsc::Receiver<Reload>>) -> Turn {
    let asked = async {
        match reloads {
            Some(reloads) => reloads.recv().await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        _ = signals.terminate.recv() => Turn::Stop("SIGTERM"),
        _ = signals.interrupt.recv() => Turn::Stop("SIGINT"),
        _ = signals.hangup.recv() => Turn::Reload(None),
        reload = asked => Turn::Reload(reload),
    }
}

async fn lock(state: &Path) -> Result<StateLock, ServeError> {
    let state = state.to_owned();
    let taken = tasks::on_thread(move || StateLock::take(&state)).await;
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
            "API keys and tokens cross the network unencrypted: set tls.certificate and tls.key, \
             or a reverse proxy that terminates TLS"
        );
    }
    Ok(Authenticator::with_keys(keys, rate))
}

fn without_port(domain: &str) -> &str {
    domain.split_once(':').map_or(domain, |(name, _)| name)
}

/// Handles the first SIGTERM or SIGINT: no more sandboxes are created, and a second signal makes the process exit at
/// once.
fn stop(signal: &'static str, pool: &Pool) {
    info!(
        signal,
        "stopping: draining requests and changes of sandboxes"
    );
    // `drain` refuses new sandboxes at once; `close` waits until pending changes have completed.
    let pool = pool.clone();
    tasks::spawn(async move { pool.drain().await });
    if let Ok(mut again) = Signals::new() {
        tasks::spawn(async move {
            let name = again.next().await;
            warn!(
                signal = name,
                "second signal received: exiting without draining"
            );
            std::process::exit(EXIT_WITHOUT_DRAIN);
        });
    }
}

async fn close(engine: Engine, on_exit: OnClose) {
    let pool = engine.pool.clone();
    if tokio::time::timeout(SETTLE, engine.builds.stop())
        .await
        .is_err()
    {
        warn!("a build did not end in time: the next server process will end it");
    }
    if tokio::time::timeout(SETTLE, pool.drain()).await.is_err() {
        warn!(
            timeout_s = SETTLE.as_secs(),
            "changes of sandboxes did not complete in time: the next server process recovers or removes these sandboxes"
        );
    }
    if let Some(egress) = &engine.egress {
        // Before the pool leaves the cgroup that contains the proxy.
        egress.stop().await;
    }
    pool.close(on_exit).await;
    engine.events.stop().await;
    info!("stopped");
}

/// The signals that stop the server, and the one that reloads it.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// The next signal that stops the server.
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
