//! The engine: the parts of a server that only one process can have at a time, which are the sandboxes' network, the
//! pool, and their tasks. A handover closes it in the old process and opens it in the new one.

use std::{io, path::Path, sync::Arc, time::Duration};

use builds::{
    bases::Bases,
    grant::Authority,
    owner::Builds,
    run::{COMMAND_LIMIT, Executor, ExecutorSpec},
    store::{Contents, Store},
    uploads::Uploads,
};
use model::SandboxId;
use netisolation::{EventLog, Isolation, ResolverSockets};
use pool::{Ids, OnClose, Pool, StateLock};
use tasks::{boxed, on_thread};
use tokio::{sync::mpsc, task::JoinSet};

use super::{BuildsSpec, ServeError, ServeSpec};
use crate::{
    auth::{Authenticator, KeyFile, watch_keys},
    control::{self, Control},
    egress::{self, Alerts, Egress, EgressError},
    events::{self, Events, Found},
    listen::Backend,
    network,
    node::OwnNode,
    peers::{
        NodeMachinery, follow_status,
        metrics::log_events,
        moves::{Moves, tend},
        publish, renew,
        templates::{self, Parts},
        watch_roster,
    },
    proxy::Proxy,
    registry::{Registry, sample_all},
    secrets::Secrets,
    telemetry::Telemetry,
};

/// How long threads that read the network's state may hold it after the pool has closed.
const RELEASE: Duration = Duration::from_secs(10);
const RELEASE_POLL: Duration = Duration::from_millis(2);
/// Time for the resolver to finish DNS queries that it has received. All requests wait during this time, and a guest
/// can query names whose servers do not respond.
const RESOLVE: Duration = Duration::from_secs(1);

/// The opened parts. After it is dropped, the pool keeps running until its last handle is dropped.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) pool: Pool,
    pub(super) builds: Builds,
    pub(super) egress: Option<Egress>,
    pub(super) events: events::Running,
    moves: Option<Moves>,
    isolation: Option<Isolation>,
    resolver: Option<network::Serving>,
    /// Background tasks such as the resolver and the sampler. Aborted when this value is dropped.
    tasks: JoinSet<()>,
}

impl Engine {
    /// Opens network, pool and registry, in this order, and returns them with the backend for requests. `sockets` come
    /// from a previously released engine.
    ///
    /// # Errors
    /// Returns [`ServeError::Network`] or [`ServeError::Pool`].
    pub(super) async fn open(
        spec: &ServeSpec,
        lock: StateLock,
        authenticator: Arc<Authenticator>,
        sockets: Option<ResolverSockets>,
    ) -> Result<(Self, Backend<Registry>), ServeError> {
        let mut tasks = JoinSet::new();
        let mut config = spec.pool.clone();
        // Opened first, because the operator may have configured a wrong key.
        let secrets = Secrets::open(&config.state, &spec.secrets_key)?;
        let (mut network, mut resolver) = (None, None);
        let alerts = spec
            .network
            .as_ref()
            .and_then(|network| network.alert.clone());
        let opened = Events::open(&config.state, control::TEAM).map_err(ServeError::Events)?;
        let (events, history) = opened;
        let alerts = Alerts::start(alerts, Some(events.clone())).map_err(EgressError::Alerts)?;
        let alerts = Some(alerts);
        let mut prepared = None;
        // The kernel charges entries of eBPF maps to the cgroup of the process that created the maps. Guests cause such
        // entries, so the maps must be created before the pool moves this process into the server's own cgroup.
        if let Some(wanted) = &spec.network {
            let (state, most) = (&config.state, config.max_sandboxes);
            let (isolation, opened, serving) =
                network::open(wanted, state, most, sockets, alerts.clone(), &mut tasks).await?;
            config.network = Some(isolation);
            if let Some(egress) = &wanted.proxy {
                let ready = egress::Prepared::new(egress, state, alerts.clone())?;
                config.ca_bundle = Some(ready.ca_bundle().into());
                prepared = Some(ready);
            }
            (network, resolver) = (Some(opened), Some(serving));
        }
        let peers = match &spec.cluster {
            Some(cluster) => Some(cluster.join().await.map_err(ServeError::Cluster)?),
            None => None,
        };
        if let Some(peers) = &peers {
            let cluster = peers.cluster().clone();
            config.ids = Ids::new(move |random| cluster.mint(random));
        }
        let isolation = config.network.clone();
        let keys = KeyFile::of(&config.state);
        let (state, disk_reserve) = (config.state.clone(), config.disk_reserve);
        let disk_limit = config.limits.layer;
        let (reported, changes) = mpsc::unbounded_channel();
        config.changes = Some(reported);
        let opened = Pool::open_locked(config, lock).await;
        let (pool, recovered, ended) = opened.map_err(ServeError::Pool)?;
        let refused = network.as_ref().map(|network| network.log.clone());
        let found = Found::new(&recovered, changes);
        let moves = peers
            .as_ref()
            .map(|peers| Moves::new(peers.clone(), pool.clone(), &state));
        let opener = moves.clone().map(Moves::opener);
        let registry = Registry::open(pool.clone(), recovered.alive, opener);
        let egress = match (prepared, &isolation) {
            (Some(prepared), Some(isolation)) => {
                let forbidden = network
                    .as_ref()
                    .map(|network| network.egress.forbidden.clone());
                let (seat, handed) = network::proxied(isolation, forbidden.unwrap_or_default());
                let (registry, secrets) = (registry.clone(), secrets.clone());
                Some(prepared.start(registry, secrets, seat, handed, &mut tasks))
            }
            (Some(_) | None, _) => None,
        };
        let forget = forget(refused, egress.clone(), alerts);
        tasks.spawn(boxed(registry.clone().forget_ended(ended, forget)));
        tasks.spawn(boxed(sample_all(registry.clone())));
        if !authenticator.is_open() {
            tasks.spawn(boxed(watch_keys(keys, authenticator.clone())));
        }
        let node = OwnNode::open(spec.node.clone(), &state)?;
        tasks.spawn(boxed(node.clone().measure()));
        let stored = open_builds(&state, disk_reserve.0, &spec.builds);
        let (stored, uploads, authority) = stored.map_err(ServeError::Builds)?;
        let images = state.join("builds").join("images");
        let bases = Bases::open(pool.clone(), images, disk_reserve, spec.images.clone()).await;
        let executor = ExecutorSpec {
            dir: state.join("builds"),
            quota: spec.builds.cache_quota,
            egress: spec.builds.egress,
            run_limit: COMMAND_LIMIT,
        };
        let executor = Executor::open(pool.clone(), bases, executor).await;
        let machinery = NodeMachinery {
            pool: pool.clone(),
            executor: executor.clone(),
            peers: peers.clone(),
        };
        let running = spec.builds.running;
        let builds = Builds::open(stored, uploads, authority, machinery, running, &mut tasks);
        let named = builds.clone();
        let templates = move |pool_id: &str| {
            let catalog = named.catalog();
            let id = catalog.id_for_clients(pool_id).to_owned();
            (id, control::build_id(pool_id))
        };
        let forbidden = spec.webhooks_forbidden.clone();
        let lives = events.start(history, found, Box::new(templates), forbidden);
        let app = Arc::new(Control {
            events,
            registry: registry.clone(),
            pool: pool.clone(),
            builds: builds.clone(),
            secrets: secrets.clone(),
            egress: egress.clone(),
            authenticator: Arc::clone(&authenticator),
            telemetry: Telemetry::shared(),
            node: node.clone(),
            peers: peers.clone(),
            moves: moves.clone(),
            state_dir: state.clone(),
            reports: spec.reports.clone(),
            domain: spec.domain.clone(),
            network,
            max_timeout_s: spec.max_timeout_s,
            disk_limit,
            is_tls: spec.tls.is_some(),
        });
        let proxy = Proxy::new(registry);
        let tended = proxy.clone();
        tasks.spawn(boxed(async move { tended.close_expired().await }));
        let mut engine = Self {
            pool,
            builds,
            egress,
            events: lives,
            moves: moves.clone(),
            isolation,
            resolver,
            tasks,
        };
        let backend = Backend::new(proxy, control::router(Arc::clone(&app)));
        let backend = backend.with_keys(Arc::clone(&authenticator));
        let (Some(peers), Some(moves)) = (peers, moves) else {
            return Ok((engine, backend));
        };
        let tasks = &mut engine.tasks;
        let (pool, builds) = (engine.pool.clone(), engine.builds.clone());
        tasks.spawn(boxed(publish(peers.clone(), pool, builds, node.clone())));
        tasks.spawn(boxed(follow_status(peers.clone(), node.clone())));
        let parts = Parts {
            builds: engine.builds.clone(),
            executor: executor.clone(),
            node,
            dir: state.join("builds").join("copies"),
        };
        tasks.spawn(boxed(templates::follow(peers.clone(), parts)));
        tasks.spawn(boxed(log_events(peers.clone())));
        tasks.spawn(boxed(renew(peers.clone())));
        tasks.spawn(boxed(watch_roster(peers.clone(), authenticator, secrets)));
        tasks.spawn(boxed(tend(moves.clone())));
        let internal = control::internal_router(app, peers.clone(), moves.clone(), executor);
        Ok((engine, backend.with_peers(peers, moves, internal)))
    }

    /// Closes everything for the next process. Sandboxes keep running. When it returns, this process acts on no
    /// deadline, writes no record, serves no DNS query, and holds no memory of templates. Returns the sockets in which
    /// DNS queries wait for the next engine.
    pub(super) async fn release(self) -> Option<ResolverSockets> {
        let Self {
            pool,
            builds: _,
            egress: _,
            events,
            moves,
            isolation,
            resolver,
            mut tasks,
        } = self;
        if let Some(moves) = moves {
            moves.stop().await;
        }
        let resolved = async {
            if let Some(resolver) = resolver
                && tokio::time::timeout(RESOLVE, resolver.stop())
                    .await
                    .is_err()
            {
                tracing::info!(
                    "some DNS queries of sandboxes got no response: the guests will repeat them"
                );
            }
        };
        tokio::join!(resolved, pool.close(OnClose::HandOver));
        events.stop().await;
        tasks.shutdown().await;
        let isolation = isolation?;
        let sockets = isolation.resolver_sockets();
        if let Err(error) = &sockets {
            tracing::error!(%error, "cannot keep the DNS sockets of the sandboxes: queries will be lost");
        }
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
        let dropped = on_thread(move || drop(isolation)).await;
        if let Err(error) = dropped {
            tracing::error!(%error, "cannot close the network of the sandboxes");
        }
        sockets.ok()
    }
}

/// Removes what the network and the proxy have recorded of a sandbox that has ended.
fn forget(
    refused: Option<EventLog>,
    egress: Option<Egress>,
    alerts: Option<Alerts>,
) -> impl Fn(&SandboxId) {
    move |id| {
        if let Some(egress) = &egress {
            egress.cut(id);
            egress.calls.log.forget(id);
        }
        if let Some(refused) = &refused {
            refused.forget(id);
        }
        if let Some(alerts) = &alerts {
            alerts.forget(id);
        }
    }
}

/// Opens the builds that previous servers have left on disk.
fn open_builds(
    state: &Path,
    disk_reserve: u64,
    spec: &BuildsSpec,
) -> io::Result<((Store, Contents), Uploads, Authority)> {
    let (store, contents) = Store::open(state.join("builds"))?;
    let authority = Authority::new(&store.upload_key()?);
    let uploads = Uploads::open(store.files(), disk_reserve, spec.upload_quota.0)?;
    Ok(((store, contents), uploads, authority))
}
