//! The server's interface to a cluster.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use model::SandboxId;
use tokio::sync::{broadcast, mpsc, oneshot, watch};

use crate::{
    AccountsError, Candidate, ClusterEvent, EtcdConfig, EtcdConfigError, HomeKey, Load, Member,
    MemberVerifier, Needs, Node, NodeId, NodeState, Owned, Owner, OwnerChange, OwnerError, Replica,
    Route, Tags, TemplateId, View,
    admission::{self, Keys},
    driver::{Driver, Order, Sent, Status, now_ms},
    engine::{Engine, Input, Standing, Timing},
    etcd::Etcd,
    keys::{self, Key},
    placement::{next_random, place},
    registrar::{Plan, check_versions, transact},
    store::{Answer, Fault, Request},
};

/// A cheap, cloneable handle.
#[derive(Clone, Debug)]
pub enum Cluster {
    /// A single server. Nothing is spawned or sent, and every method returns at once.
    Alone(Arc<Alone>),
    Etcd(Arc<Membership>),
}

/// A server without a cluster.
#[derive(Debug)]
pub struct Alone {
    this: NodeId,
    views: watch::Sender<Arc<View>>,
    events: broadcast::Sender<ClusterEvent>,
}

/// A server's membership in a cluster. After the last handle is dropped, the lease expires by itself.
#[derive(Debug)]
pub struct Membership {
    this: NodeId,
    lease: Duration,
    home_key: HomeKey,
    member: Member,
    store: Arc<Etcd>,
    orders: mpsc::UnboundedSender<Order>,
    load: watch::Sender<Load>,
    views: watch::Receiver<Arc<View>>,
    events: broadcast::Sender<ClusterEvent>,
    status: watch::Receiver<Status>,
    sent: Sent,
    random: AtomicU64,
}

/// A member's configuration, from its state directory.
#[derive(Clone, Debug)]
pub struct JoinConfig {
    pub etcd: EtcdConfig,
    /// Time to live of the node's lease: 10 s, or more on hosts with slow disks. It determines how soon other nodes
    /// notice a crash.
    pub lease: Duration,
    pub home_key: HomeKey,
    /// From [`found`] or [`Registrar::admit`].
    pub member: Member,
    /// Verifier of the cluster's authority.
    pub verifier: MemberVerifier,
}

/// The age and validity of the view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Health {
    /// Time since etcd last responded. `None` if it never has, zero without a cluster.
    pub last_contact: Option<Duration>,
    /// Whether this node's lease is valid and its record is in place.
    pub registered: bool,
    /// Revision of the view.
    pub revision: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    #[error(transparent)]
    Config(#[from] EtcdConfigError),
    #[error("etcd at {endpoints} does not respond: {reason}")]
    Unreachable { endpoints: String, reason: String },
    #[error("etcd {found} is too old: 3.5.13 or later is needed")]
    OldEtcd { found: String },
    #[error("etcd has no cluster: run `cube cluster init` on the first node")]
    NoCluster,
    #[error(transparent)]
    Accounts(#[from] AccountsError),
    #[error(
        "etcd has a cluster of format {0}, which this release does not support: see \"Upgrade of a cluster\" in docs/operate/cluster.md"
    )]
    OtherFormat(u32),
    #[error("etcd already has a cluster")]
    Founded,
    #[error("another host is node {0}: choose another name, or remove that node first")]
    NameTaken(NodeId),
    #[error("node {0} is not a member of this cluster")]
    NotMember(NodeId),
    #[error("no free slot: the cluster has {0} members")]
    Full(usize),
    #[error("node {0} is alive: drain and stop it first")]
    NodeLives(NodeId),
    #[error("no response from etcd: the outcome is unknown, so repeat the command")]
    Unknown,
    #[error(
        "no node with the key of the cluster's authority has responded, and only such a node can admit and remove nodes: {0}"
    )]
    NoAuthority(String),
    #[error("this server is not part of a cluster")]
    Alone,
}

/// Time limit of the first registration. A server that cannot reach etcd then still serves its own sandboxes.
const FIRST: Duration = Duration::from_secs(5);
/// Number of events that a slow receiver may lag behind.
const EVENTS: usize = 1024;

impl Cluster {
    /// A server without a cluster.
    #[must_use]
    pub fn alone(this: Node) -> Self {
        let id = this.id.clone();
        let view = View {
            this: Some(id.clone()),
            nodes: Arc::new(BTreeMap::from([(id.clone(), this)])),
            ..View::default()
        };
        Self::Alone(Arc::new(Alone {
            this: id,
            views: watch::Sender::new(Arc::new(view)),
            events: broadcast::Sender::new(1),
        }))
    }

    /// Registers `this` in the cluster and keeps it registered. Returns when the node is registered, or after five
    /// seconds if etcd does not respond: the server can then serve its own sandboxes, and registers later.
    ///
    /// # Errors
    /// Returns an error if etcd is too old, the node is not a member, another host has its name, or the configuration
    /// is wrong.
    pub async fn join(config: JoinConfig, this: Node) -> Result<Self, ClusterError> {
        let store = Arc::new(Etcd::open(&config.etcd)?);
        if let Err(failure) = check_versions(&store).await {
            match failure {
                ClusterError::Unreachable { .. } => {
                    tracing::warn!(
                        "cannot register in the cluster: {}: retrying",
                        model::chain(&failure)
                    );
                }
                other => return Err(other),
            }
        }
        let id = this.id.clone();
        let mut seed = now_ms() ^ (u64::from(std::process::id()) << 32);
        let instance = next_random(&mut seed);
        let lease_ms = u64::try_from(config.lease.as_millis()).unwrap_or(u64::MAX);
        let engine = Engine::new(
            Timing::with_lease(lease_ms),
            this,
            instance,
            config.verifier,
        );
        let (orders, receiver) = mpsc::unbounded_channel();
        let (load, loads) = watch::channel(Load::default());
        let (views, view) = watch::channel(Arc::new(engine.view().clone()));
        let (standing, status) = watch::channel(Status {
            standing: Standing::Pending,
            last_contact: None,
            renewed: None,
        });
        let events = broadcast::Sender::new(EVENTS);
        let sent = Sent::default();
        let driver = Driver {
            engine,
            store: Arc::clone(&store),
            orders: receiver,
            answers: orders.downgrade(),
            load: loads,
            views,
            events: events.clone(),
            status: standing,
            sent: Arc::clone(&sent),
        };
        tokio::spawn(driver.run());
        let membership = Membership {
            this: id,
            lease: config.lease,
            home_key: config.home_key,
            member: config.member,
            store,
            orders,
            load,
            views: view,
            events,
            status,
            sent,
            random: AtomicU64::new(seed),
        };
        membership.first_registration().await?;
        Ok(Self::Etcd(Arc::new(membership)))
    }

    #[must_use]
    pub fn this(&self) -> &NodeId {
        match self {
            Self::Alone(alone) => &alone.this,
            Self::Etcd(membership) => &membership.this,
        }
    }

    /// The current view. Costs one read lock.
    #[must_use]
    pub fn view(&self) -> Arc<View> {
        match self {
            Self::Alone(alone) => Arc::clone(&alone.views.borrow()),
            Self::Etcd(membership) => Arc::clone(&membership.views.borrow()),
        }
    }

    /// Changes of the view. The receiver always has the latest. Never changes without a cluster.
    #[must_use]
    pub fn views(&self) -> watch::Receiver<Arc<View>> {
        match self {
            Self::Alone(alone) => alone.views.subscribe(),
            Self::Etcd(membership) => membership.views.clone(),
        }
    }

    /// Events from now on. A receiver that lags more than 1024 events behind loses the oldest. It should then compare
    /// with the view.
    #[must_use]
    pub fn events(&self) -> broadcast::Receiver<ClusterEvent> {
        match self {
            Self::Alone(alone) => alone.events.subscribe(),
            Self::Etcd(membership) => membership.events.subscribe(),
        }
    }

    #[must_use]
    pub fn health(&self) -> Health {
        match self {
            Self::Alone(_) => Health {
                last_contact: Some(Duration::ZERO),
                registered: true,
                revision: 0,
            },
            Self::Etcd(membership) => {
                let status = *membership.status.borrow();
                let age = |at: u64| Duration::from_millis(now_ms().saturating_sub(at));
                Health {
                    last_contact: status.last_contact.map(age),
                    registered: status.standing == Standing::Registered,
                    revision: membership.views.borrow().revision,
                }
            }
        }
    }

    /// Whether this node may start or accept a move now: its lease was renewed less than half a lease ago, by its own
    /// clock. Always true without a cluster. This only avoids requests that would fail. The compare-and-swap of the
    /// record decides.
    #[must_use]
    pub fn may_act_as_owner(&self) -> bool {
        match self {
            Self::Alone(_) => true,
            Self::Etcd(membership) => {
                let renewed = membership.status.borrow().renewed;
                let age = |at: u64| Duration::from_millis(now_ms().saturating_sub(at));
                renewed.is_some_and(|at| age(at) < membership.lease / 2)
            }
        }
    }

    /// A new sandbox id from random bytes. In a cluster, its home is this node.
    #[must_use]
    pub fn mint(&self, random: [u8; 19]) -> SandboxId {
        match self {
            Self::Alone(_) => SandboxId::from_random(random),
            Self::Etcd(membership) => {
                let mut first = [0; 14];
                first.copy_from_slice(&random[..14]);
                membership.home_key.id(membership.member.slot, first)
            }
        }
    }

    /// Where `id` is served. Check this node's own sandboxes first, because ids from before the cluster have no home.
    #[must_use]
    pub fn route(&self, id: &SandboxId) -> Route {
        match self {
            Self::Alone(_) => Route::Here,
            Self::Etcd(membership) => {
                let view = Arc::clone(&membership.views.borrow());
                view.route(id, &membership.home_key)
            }
        }
    }

    /// The nodes to try for a create, best first. Only this node without a cluster.
    #[must_use]
    pub fn place(&self, needs: &Needs) -> Vec<Candidate> {
        match self {
            Self::Alone(alone) => vec![Candidate {
                node: alone.this.clone(),
                address: None,
            }],
            Self::Etcd(membership) => {
                let view = Arc::clone(&membership.views.borrow());
                let mut random = membership.random.fetch_add(1, Ordering::Relaxed);
                let sent = membership.sent.lock();
                let sent = sent.unwrap_or_else(PoisonError::into_inner);
                let pending = |node: &NodeId| sent.get(node).copied().unwrap_or(0);
                place(&view, needs, pending, next_random(&mut random))
            }
        }
    }

    /// Counts a create that was sent to `node`, until that node publishes its next load.
    pub fn sent(&self, node: &NodeId) {
        if let Self::Etcd(membership) = self {
            let sent = membership.sent.lock();
            let mut sent = sent.unwrap_or_else(PoisonError::into_inner);
            *sent.entry(node.clone()).or_default() += 1;
        }
    }

    /// Sets the load to publish. Written at most once a second, and only if it differs. Returns at once.
    pub fn publish_load(&self, load: Load) {
        if let Self::Etcd(membership) = self {
            membership.load.send_if_modified(|before| {
                let is_new = *before != load;
                *before = load;
                is_new
            });
        }
    }

    /// Publishes that this node can clone from `template`. Published again after the loss of a lease. Returns at once.
    pub fn add_replica(&self, template: TemplateId, replica: Replica) {
        let key = Key::Replica(template, self.this().clone());
        self.input(Input::Publish(key, Some(keys::encode(&replica))));
    }

    pub fn remove_replica(&self, template: &TemplateId) {
        let key = Key::Replica(template.clone(), self.this().clone());
        self.input(Input::Publish(key, None));
    }

    /// Publishes that this node changes `template`, and the builds that its tags refer to. `None` withdraws this.
    /// Published again after the loss of a lease. Returns at once: etcd has it once it appears in the view. If there
    /// are more tags than a value can hold, they are not published, and all copies count as current.
    pub fn publish_tags(&self, template: TemplateId, tags: Option<&Tags>) {
        let key = Key::Tags(template, self.this().clone());
        let value = tags.map(keys::encode);
        let value = value.filter(|value| value.len() <= keys::MAX_VALUE);
        self.input(Input::Publish(key, value));
    }

    /// Cordons, drains or uncordons a member.
    pub async fn set_node_state(
        &self,
        node: &NodeId,
        state: NodeState,
    ) -> Result<(), ClusterError> {
        let store = self.store().ok_or(ClusterError::Alone)?;
        let plan = |keys: &Keys| Ok(Plan::Do(keys.set_state(node, state)?, ()));
        transact(store, node, plan).await
    }

    /// Reads an owner record from etcd, not from the view.
    pub async fn owner(&self, id: &SandboxId) -> Result<Option<Owned>, OwnerError> {
        let store = self.store().ok_or(OwnerError::Alone)?;
        match store.ask(Request::Get(Key::Owner(id.clone()))).await {
            Ok(Answer::Got { entry, .. }) => admission::owned(entry.as_ref()),
            _ => Err(OwnerError::Unavailable),
        }
    }

    /// Changes the record of `id` as this node, if its revision is still that of `expected` (`None`: no record).
    /// Returns the new record, or `None` after [`OwnerChange::End`].
    pub async fn change_owner(
        &self,
        id: &SandboxId,
        expected: Option<&Owned>,
        change: OwnerChange,
    ) -> Result<Option<Owned>, OwnerError> {
        let store = self.store().ok_or(OwnerError::Alone)?;
        let (txn, next) = admission::owner_txn(self.this(), id, expected, &change)?;
        for input in inputs_before(id, expected, next.as_ref()) {
            self.input(input);
        }
        let answer = store.ask(Request::Txn(txn)).await;
        let changed = changed(answer, next);
        self.input(input_after(id, &changed));
        changed
    }

    /// Reports a record that this node holds, as stored in its pool's records at the start (revision 0), or as read by
    /// [`Cluster::owner`]. Changes by [`Cluster::change_owner`] are tracked automatically. The cluster reports
    /// [`ClusterEvent::Superseded`] and [`ClusterEvent::Forgotten`], and rewrites the records of running sandboxes if
    /// etcd has lost them.
    pub fn hold(&self, id: SandboxId, owner: Owner, revision: u64) {
        self.input(Input::Hold(id, owner, revision));
    }

    /// Revokes the lease, so that the other nodes see this one leave at once. For a planned stop. The handle's view no
    /// longer changes.
    pub async fn leave(&self) {
        let Self::Etcd(membership) = self else {
            return;
        };
        let (reply, lease) = oneshot::channel();
        // Without the task, no lease is being renewed.
        let _ = membership.orders.send(Order::Stop(reply));
        if let Ok(Some(lease)) = lease.await {
            // If this fails, the lease expires by itself.
            let _ = membership.store.ask(Request::Revoke(lease)).await;
        }
    }

    fn store(&self) -> Option<&Etcd> {
        match self {
            Self::Alone(_) => None,
            Self::Etcd(membership) => Some(&membership.store),
        }
    }

    fn input(&self, input: Input) {
        if let Self::Etcd(membership) = self {
            // After `leave` there is no task.
            let _ = membership.orders.send(Order::Input(input));
        }
    }
}

impl Membership {
    /// Waits for the registration. If the name is taken, it may be by this host before its reboot, whose lease will
    /// expire.
    async fn first_registration(&self) -> Result<(), ClusterError> {
        let started = tokio::time::Instant::now();
        let mut status = self.status.clone();
        loop {
            let standing = status.borrow_and_update().standing;
            let limit = match standing {
                Standing::Registered => return Ok(()),
                Standing::NotMember => return Err(ClusterError::NotMember(self.this.clone())),
                Standing::Pending => FIRST,
                Standing::NameTaken | Standing::Replaced => self.lease * 2,
            };
            let changed = tokio::time::timeout_at(started + limit, status.changed()).await;
            match (changed, standing) {
                (Ok(Ok(())), _) => {}
                (_, Standing::NameTaken | Standing::Replaced) => {
                    return Err(ClusterError::NameTaken(self.this.clone()));
                }
                _ => return Ok(()),
            }
        }
    }
}

/// Inputs that the engine must receive before a record is changed to `next`.
pub(crate) fn inputs_before(
    id: &SandboxId,
    expected: Option<&Owned>,
    next: Option<&Owner>,
) -> Vec<Input> {
    let Some(next) = next else {
        // It has ended, whatever the response is.
        return vec![Input::Release(id.clone())];
    };
    let mut inputs = Vec::new();
    if next.offered_to.is_some() {
        // If the response is lost, only the taker can tell the outcome of the offer. The record must not be rewritten.
        let revision = expected.map_or(0, |expected| expected.revision);
        inputs.push(Input::Hold(id.clone(), next.clone(), revision));
    }
    inputs.push(Input::Changing(id.clone()));
    inputs
}

pub(crate) fn input_after(id: &SandboxId, changed: &Result<Option<Owned>, OwnerError>) -> Input {
    match changed {
        Ok(Some(Owned { owner, revision })) => Input::Hold(id.clone(), owner.clone(), *revision),
        Ok(None) => Input::Release(id.clone()),
        Err(_) => Input::Settled(id.clone()),
    }
}

/// The input for the outcome of the compare-and-swap that writes `next`.
pub(crate) fn changed(
    answer: Result<Answer, Fault>,
    next: Option<Owner>,
) -> Result<Option<Owned>, OwnerError> {
    match answer {
        Ok(Answer::Txn {
            revision,
            succeeded: true,
        }) => Ok(next.map(|owner| Owned { owner, revision })),
        Ok(Answer::Txn {
            succeeded: false, ..
        }) => Err(OwnerError::Changed),
        Err(Fault::Refused | Fault::NoLease) => Err(OwnerError::Unavailable),
        Ok(_) | Err(Fault::Unknown) => Err(OwnerError::Unknown),
    }
}
