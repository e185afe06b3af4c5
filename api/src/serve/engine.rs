//! The part of a server that only one process can have: the network of the sandboxes, the pool, and the tasks beside them.
//! A handover closes it in the old process and opens it in the new one.

use std::sync::Arc;
use std::time::Duration;

use netisolation::Isolation;
use pool::{OnClose, Pool, StateLock};
use tokio::task::JoinSet;

use super::{ServeError, ServeSpec};
use crate::{
    auth::{Authenticator, KeyFile, watch_keys},
    control::{self, Control},
    listen::Backend,
    network,
    proxy::Proxy,
    registry::{Registry, sample_all},
    telemetry::Telemetry,
};

/// How long threads that read the network's state may hold it after the pool has closed.
const RELEASE: Duration = Duration::from_secs(10);
const RELEASE_POLL: Duration = Duration::from_millis(2);

/// The opened parts. If it is dropped, the pool goes on until its last handle is dropped.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) pool: Pool,
    isolation: Option<Isolation>,
    /// The resolver, the sampler, and the like; aborted when this value is dropped.
    tasks: JoinSet<()>,
}

impl Engine {
    /// Opens network, pool and registry, in this order, and returns them with what answers requests.
    ///
    /// # Errors
    /// Returns [`ServeError::Network`] or [`ServeError::Pool`].
    pub(super) async fn open(
        spec: &ServeSpec,
        lock: StateLock,
        authenticator: Arc<Authenticator>,
    ) -> Result<(Self, Backend<Registry>), ServeError> {
        let mut tasks = JoinSet::new();
        let mut config = spec.pool.clone();
        let mut network = None;
        // The kernel charges entries of eBPF maps to the cgroup of the process that created the maps. Guests cause such
        // entries, so the maps are created before the pool moves this process into the server's own cgroup.
        if let Some(wanted) = &spec.network {
            let (isolation, opened) =
                network::open(wanted, &config.state, config.max_sandboxes, &mut tasks).await?;
            config.network = Some(isolation);
            network = Some(opened);
        }
        let isolation = config.network.clone();
        let keys = KeyFile::of(&config.state);
        let opened = Pool::open_locked(config, lock).await;
        let (pool, recovered, ended) = opened.map_err(ServeError::Pool)?;
        let refused = network.as_ref().map(|network| network.log.clone());
        let registry = Registry::open(pool.clone(), recovered.alive);
        tasks.spawn(registry.clone().forget_ended(ended, refused));
        tasks.spawn(sample_all(registry.clone()));
        if !authenticator.is_open() {
            tasks.spawn(watch_keys(keys, authenticator.clone()));
        }
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
        let tended = proxy.clone();
        tasks.spawn(async move { tended.close_expired().await });
        let engine = Self {
            pool,
            isolation,
            tasks,
        };
        Ok((engine, Backend::new(proxy, control::router(app))))
    }

    /// Closes everything for the next process. Sandboxes keep running. When this returns, this process acts on no
    /// deadline, writes no record, answers no DNS query, and holds no memory of templates.
    pub(super) async fn release(self) {
        let Self {
            pool,
            isolation,
            mut tasks,
        } = self;
        pool.close(OnClose::HandOver).await;
        tasks.shutdown().await;
        let Some(isolation) = isolation else {
            return;
        };
        let last = async {
            while !isolation.is_last() {
                tokio::time::sleep(RELEASE_POLL).await;
            }
        };
        if tokio::time::timeout(RELEASE, last).await.is_err() {
            tracing::error!(
                "a thread still uses the network of the sandboxes: the handover may fail"
            );
        }
        // Joins threads. Programs, policies, ready TAPs and the resolver's device stay for the next process.
        let dropped = tokio::task::spawn_blocking(move || drop(isolation)).await;
        if let Err(error) = dropped {
            tracing::error!(%error, "cannot close the network of the sandboxes");
        }
    }
}
