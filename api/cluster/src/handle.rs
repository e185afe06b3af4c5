//! The seam: what the server asks of a cluster.

use std::{path::PathBuf, sync::Arc, time::Duration};

use model::SandboxId;
use tokio::sync::{broadcast, watch};

use crate::{
    Candidate, ClusterEvent, HomeKey, Load, Member, Needs, Node, NodeId, NodeState, Owned,
    OwnerChange, OwnerError, Replica, Route, TemplateId, View,
};

/// A cheap, cloneable handle.
#[derive(Clone, Debug)]
pub enum Cluster {
    /// One server. Nothing is installed, nothing is sent; every method answers at once.
    Alone(Arc<Alone>),
    Etcd(Arc<Membership>),
}

/// A server without a cluster.
#[derive(Debug)]
pub struct Alone {
    this: NodeId,
    view: Arc<View>,
}

/// A server's place in a cluster. Dropping the last handle stops the task that renews the lease, without revoking it.
#[derive(Debug)]
pub struct Membership {
    this: NodeId,
}

/// How to reach etcd.
#[derive(Clone, Debug)]
pub struct EtcdConfig {
    /// `https://HOST:2379`, or `http://` on loopback only.
    pub endpoints: Vec<String>,
    pub tls: Option<TlsFiles>,
    /// At least 10 s on hosts with slow disks.
    pub lease: Duration,
    pub home_key: HomeKey,
}

/// PEM files of this node: certificate and key signed by the cluster's authority.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    pub authority: PathBuf,
    pub certificate: PathBuf,
    pub key: PathBuf,
}

/// The age and worth of the view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Health {
    /// Time since etcd last answered; `None` if it never has, zero for a server without a cluster.
    pub last_contact: Option<Duration>,
    /// Whether this node's lease holds and its record is in place.
    pub registered: bool,
    /// Revision of the view.
    pub revision: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    #[error("etcd at {endpoints}: {reason}")]
    Unreachable { endpoints: String, reason: String },
    #[error("etcd {found} is too old: 3.5.13 or later is needed")]
    OldEtcd { found: String },
    /// Another host uses this node's name.
    #[error("node {0} lives on another host: choose another name, or remove that node first")]
    NameTaken(NodeId),
    /// The node was never admitted, or it has been removed.
    #[error("node {0} is not a member of this cluster")]
    NotMember(NodeId),
    #[error("no free slot: the cluster has {0} members")]
    Full(usize),
    #[error("node {0} lives: drain and stop it first")]
    NodeLives(NodeId),
    #[error("no answer from etcd: the outcome is unknown")]
    Unknown,
    #[error("this server is not part of a cluster")]
    Alone,
}

impl Cluster {
    /// A server without a cluster.
    #[must_use]
    pub fn alone(this: Node) -> Self {
        let _ = this;
        todo!()
    }

    /// Connects, checks the version of etcd, lists, registers `this`, and starts the task that keeps it registered.
    /// Returns after the first complete view. Later losses of etcd end nothing.
    pub async fn join(config: EtcdConfig, this: Node) -> Result<Self, ClusterError> {
        let _ = (config, this);
        todo!()
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
            Self::Alone(alone) => Arc::clone(&alone.view),
            Self::Etcd(_) => todo!(),
        }
    }

    /// Changes of the view: the receiver always has the latest. Never changes for a server without a cluster.
    #[must_use]
    pub fn views(&self) -> watch::Receiver<Arc<View>> {
        todo!()
    }

    /// Events from now on. A receiver that lags behind by 1024 loses the oldest; compare with the view then.
    #[must_use]
    pub fn events(&self) -> broadcast::Receiver<ClusterEvent> {
        todo!()
    }

    #[must_use]
    pub fn health(&self) -> Health {
        todo!()
    }

    /// Whether this node may begin or accept a move now: its lease was renewed less than half a lease ago, by its own
    /// clock. Always true for a server without a cluster. This saves requests that would fail; the record's
    /// compare-and-swap is what decides.
    #[must_use]
    pub fn may_act_as_owner(&self) -> bool {
        todo!()
    }

    /// A new sandbox id with this node as its home, from random bytes.
    #[must_use]
    pub fn mint(&self, random: [u8; 19]) -> SandboxId {
        let _ = random;
        todo!()
    }

    /// Where `id` is served. Look among this node's own sandboxes first: ids made before the cluster have no home.
    #[must_use]
    pub fn route(&self, id: &SandboxId) -> Route {
        let _ = id;
        todo!()
    }

    /// The nodes to try for a create, best first. This node alone, for a server without a cluster.
    #[must_use]
    pub fn place(&self, needs: &Needs) -> Vec<Candidate> {
        let _ = needs;
        todo!()
    }

    /// Counts a create that was sent to `node`, until that node publishes its next load.
    pub fn sent(&self, node: &NodeId) {
        let _ = node;
    }

    /// The load to publish. Written at most once a second, and only if it differs. Returns at once.
    pub fn publish_load(&self, load: Load) {
        let _ = load;
    }

    /// This node can clone from `template` from now on. Kept over losses of the lease. Returns at once.
    pub fn add_replica(&self, template: TemplateId, replica: Replica) {
        let _ = (template, replica);
    }

    pub fn remove_replica(&self, template: &TemplateId) {
        let _ = template;
    }

    /// Cordons, drains or readies any member.
    pub async fn set_node_state(
        &self,
        node: &NodeId,
        state: NodeState,
    ) -> Result<(), ClusterError> {
        let _ = (node, state);
        todo!()
    }

    /// Reads an owner record from etcd, not from the view.
    pub async fn owner(&self, id: &SandboxId) -> Result<Option<Owned>, OwnerError> {
        let _ = id;
        todo!()
    }

    /// Changes the record of `id` as this node, if its revision is still that of `expected` (`None`: no record).
    /// Returns the new record, `None` after [`OwnerChange::End`].
    pub async fn change_owner(
        &self,
        id: &SandboxId,
        expected: Option<&Owned>,
        change: OwnerChange,
    ) -> Result<Option<Owned>, OwnerError> {
        let _ = (id, expected, change);
        todo!()
    }

    /// What this node holds of the sandboxes with a record, as its pool's records say at the start. The cluster then
    /// follows [`Cluster::change_owner`] itself, reports [`ClusterEvent::Superseded`], and reasserts what etcd has
    /// forgotten.
    pub fn hold(&self, id: SandboxId, owner: crate::Owner) {
        let _ = (id, owner);
    }

    /// Admits a node: reserves its name and a slot. The same name with the same identity returns the record it has.
    pub async fn admit(&self, node: &NodeId, identity: &str) -> Result<Member, ClusterError> {
        let _ = (node, identity);
        todo!()
    }

    /// Removes a member that does not live. Sandboxes that it had are lost from now on.
    pub async fn remove(&self, node: &NodeId) -> Result<(), ClusterError> {
        let _ = node;
        todo!()
    }

    /// Revokes the lease, so that the others see this node leave at once. For a planned stop.
    pub async fn leave(&self) {
        todo!()
    }
}

/// Founds a cluster in an empty etcd: its format, and the first member. `cube cluster init`.
pub async fn found(
    config: &EtcdConfig,
    node: &NodeId,
    identity: &str,
) -> Result<Member, ClusterError> {
    let _ = (config, node, identity);
    todo!()
}
