//! Reload: replaces the server with a new process without refusing connections or interrupting streams.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use netisolation::ResolverSockets;
use pool::StateLock;
use tokio::time::timeout;
use tracing::{info, warn};

use super::{ServeError, ServeSpec, Signals, engine::Engine};
use crate::{
    auth::Authenticator,
    handover::{Given, HandoverError, Role, Successor},
    listen::{Gate, INTERNAL, Recipient, Server, Sockets},
    registry::Registry,
    systemd::{self, State},
};

/// Time for a new process to become ready to take over.
const PREPARE: Duration = Duration::from_secs(60);
/// Time for pending changes of sandboxes to finish. Requests that would change a sandbox wait during this time.
const SETTLE: Duration = Duration::from_secs(30);
/// Time for a new process to start serving after it has received everything. All requests wait during this time.
const TAKE_OVER: Duration = Duration::from_secs(60);
/// Time for a process that has handed over to finish its connections.
const FINISH: Duration = Duration::from_secs(24 * 3600);

/// The parts of the server that a reload needs.
pub(super) struct Reloader<'a> {
    pub(super) spec: &'a ServeSpec,
    pub(super) program: PathBuf,
    pub(super) lock: &'a StateLock,
    pub(super) authenticator: &'a Arc<Authenticator>,
    pub(super) gate: Gate<Registry>,
}

/// The outcome of a failed reload.
pub(super) enum Failed {
    /// The server continues to serve.
    Kept(HandoverError),
    /// The server cannot reopen the parts that it closed for the new process.
    Lost(ServeError),
}

impl Reloader<'_> {
    /// Starts a new process and hands everything over. Returns its process id. From then on, requests are forwarded to
    /// it. After [`Failed::Kept`], this process serves requests as before.
    pub(super) async fn run(
        &self,
        engine: &mut Option<Engine>,
        server: &mut Server<Registry>,
        sockets: &mut Sockets,
        signals: &mut Signals,
    ) -> Result<u32, Failed> {
        info!(program = %self.program.display(), "reloading: starting a new server process");
        systemd::notify(State::Reloading);
        let begun = async {
            tokio::select! {
                prepared = self.prepare(engine) => prepared,
                _ = signals.next() => Err(HandoverError::Stopping),
            }
        };
        let begun = server.accept_until(sockets, begun).await;
        let outcome = match begun {
            Ok((mut successor, control)) => {
                let outcome = server
                    .serve_until(self.hand_over(engine, &mut successor, sockets))
                    .await;
                drop(control);
                outcome.map(|()| successor.pid())
            }
            Err(why) => Err(Failed::Kept(why)),
        };
        if let (Err(Failed::Kept(_)), Some(engine)) = (&outcome, engine) {
            engine.builds.go_on().await;
        }
        outcome
    }

    /// Starts the new process, and lets changes of sandboxes finish. The returned guard blocks further ones.
    async fn prepare(
        &self,
        engine: &Option<Engine>,
    ) -> Result<(Successor, tokio::sync::OwnedRwLockWriteGuard<()>), HandoverError> {
        let mut successor = Successor::start(&self.program)?;
        successor.prepared(PREPARE).await?;
        let settled = async {
            let control = self.gate.close_control().await;
            if let Some(engine) = engine {
                // A build changes sandboxes all the time, and its executor cannot move to another process.
                engine.builds.stop().await;
                engine.pool.settle().await;
            }
            control
        };
        match timeout(SETTLE, settled).await {
            Ok(control) => Ok((successor, control)),
            Err(_) => Err(HandoverError::Busy(SETTLE.as_secs())),
        }
    }

    fn given(&self, sockets: &Sockets, dns: Option<&ResolverSockets>) -> io::Result<Given> {
        let mut given = Given::default();
        if let Some(dns) = dns {
            given.add_resolver(dns.try_clone()?);
        }
        for (role, fd) in sockets.copies()? {
            given.add(role, fd);
        }
        given.add(Role::Lock, self.lock.try_clone()?.into());
        Ok(given)
    }

    async fn hand_over(
        &self,
        engine: &mut Option<Engine>,
        successor: &mut Successor,
        sockets: &Sockets,
    ) -> Result<(), Failed> {
        let settled = async {
            let recipient = self.gate.close_traffic().await;
            if let Some(engine) = engine {
                engine.pool.settle().await;
            }
            recipient
        };
        let busy = |_| Failed::Kept(HandoverError::Busy(SETTLE.as_secs()));
        let mut recipient = timeout(SETTLE, settled).await.map_err(busy)?;
        let dns = match engine.take() {
            Some(engine) => engine.release().await,
            None => None,
        };
        let taken_over = match self.given(sockets, dns.as_ref()) {
            Ok(given) => successor.take_over(given, TAKE_OVER).await,
            Err(error) => Err(HandoverError::Channel(error)),
        };
        match taken_over {
            Ok(()) => {
                let path = self.spec.pool.state.join(INTERNAL);
                *recipient = Recipient::Successor(path);
                Ok(())
            }
            Err(why) => {
                warn!(error = %model::chain(&why), "the new server process did not take over: this process reopens the engine");
                successor.end();
                let lock = self.lock.try_clone().map_err(ServeError::Lock);
                let lock = lock.map_err(Failed::Lost)?;
                let authenticator = Arc::clone(self.authenticator);
                let opened = Engine::open(self.spec, lock, authenticator, dns).await;
                let (opened, backend) = opened.map_err(Failed::Lost)?;
                *engine = Some(opened);
                *recipient = Recipient::Backend(Arc::new(backend));
                Err(Failed::Kept(why))
            }
        }
    }
}

/// Finishes the connections of a server that has handed over, for at most [`FINISH`] or until a signal.
pub(super) async fn finish(mut server: Server<Registry>, signals: &mut Signals, successor: u32) {
    server.move_clients_over();
    info!(
        successor,
        connections = server.open_connections(),
        "handed over: finishing the open connections"
    );
    tokio::select! {
        () = server.finish() => {
            info!("all connections have ended: exiting");
            return;
        }
        () = tokio::time::sleep(FINISH) => {}
        signal = signals.next() => info!(signal, "stopping"),
    }
    warn!(
        connections = server.open_connections(),
        "closing the remaining connections"
    );
    server.close().await;
}
