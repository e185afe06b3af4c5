//! Other nodes of a cluster: where a sandbox is served, how requests get there, and how unavailable nodes are reported.
//!
//! ```text
//! client ─► any node ─► dispatch, spread ─► Peers::find ─► here
//!                                              └─► PeerClient ─ mTLS, HTTP/1.1 ─► cluster listener of the owner ─► here
//! ```
//! A request that arrives on the cluster listener is served by this node. The only exception is a request for a sandbox
//! that has moved: it is forwarded once more, because the views of two nodes may differ briefly. Forwarded requests can
//! arrive only on that listener, so a client cannot mark a request as forwarded by setting a header.
//!
//! Invariants:
//! - A create must not write to etcd or wait for it.
//! - A request that a node may have received must not be sent to another node, unless the first node refused it.
//! - A host must be treated as a member only if it is one: the name and the key in its certificate are compared with
//!   the members of the current view, in both directions.

// How a host becomes a node.
mod spec;

pub mod authority;
pub mod join;
pub mod tls;

// Requests to another node, and from one.
mod ask;
mod client;
mod forward;
pub mod wire;

// State that nodes publish, and read from each other.
mod machinery;
mod publish;
mod roster;

// State that every node has: templates, secrets and deletions.
pub(crate) mod templates;
pub mod transfer;

mod secrets;

pub(crate) mod moves;

pub(crate) mod metrics;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use axum::http::HeaderName;
use builds::owner::BuildsError;
use cluster::{Cluster, ClusterError, Health, NodeId, NodeState, Route, Tagged};
use model::SandboxId;
use tokio::sync::Semaphore;

pub(crate) use ask::{MAX_ANSWER, question};
pub use client::{PeerClient, PeerError};
pub(crate) use machinery::NodeMachinery;
pub(crate) use publish::{follow_status, publish, published_name, renew};
pub(crate) use roster::watch as watch_roster;
pub use roster::{PeerState, Roster, Seen};
pub(crate) use secrets::merge as merge_secrets;
pub use spec::ClusterSpec;
pub(crate) use spec::registrar;
pub use tls::{Peer, PeerTls};

use crate::{
    auth::{Bucket, Rate},
    node::settings::{Dir, Settings},
    proxy::Refusal,
};
use authority::{Authority, AuthorityError};
use templates::Templates;
use transfer::{Offers, TransferLimits};

/// The client's address of a forwarded request. Accepted on the cluster listener only.
pub const CLIENT: HeaderName = HeaderName::from_static("x-cube-client");
/// SHA-256 of the client's API key, sent instead of the key. Accepted on the cluster listener only, where the
/// connection authenticates the node. The owner checks that the key is still valid and looks up its scopes. The key
/// itself never leaves the node that received the request.
pub const KEY: HeaderName = HeaderName::from_static("x-cube-key");
/// Marks a request that must not be forwarded again. Accepted on the cluster listener only.
pub const LAST_HOP: HeaderName = HeaderName::from_static("x-cube-last-hop");
/// Maximum number of concurrent cluster-wide lookups of signed file URLs, which clients send without a key.
const SIGNED: usize = 64;
/// Rate limit of cluster-wide lookups for requests without a key: signed file URLs that name no sandbox, and uploads
/// for templates that are not on this node. Each lookup costs every node a search.
const KEYLESS: Rate = Rate {
    per_second: 50,
    burst: 200,
};

/// The other nodes. Clones refer to the same cluster.
#[derive(Clone, Debug)]
pub struct Peers(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    cluster: Cluster,
    client: PeerClient,
    tls: PeerTls,
    roster: Roster,
    dir: Dir,
    settings: Settings,
    transfers: TransferLimits,
    offers: Offers,
    /// Limits the rate at which this node fetches files.
    rate: transfer::Rate,
    templates: Templates,
    /// Limits concurrent lookups of signed URLs.
    signed: Semaphore,
    keyless: Mutex<Bucket>,
}

/// The place where a sandbox is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// This node, if any.
    Here,
    Node(NodeId),
    /// A node that is unreachable.
    Away(NodeId),
}

impl Peers {
    #[must_use]
    pub fn new(
        cluster: Cluster,
        tls: PeerTls,
        dir: Dir,
        settings: Settings,
        transfers: TransferLimits,
    ) -> Self {
        let client = PeerClient::new(cluster.clone(), tls.clone());
        Self(Arc::new(Inner {
            cluster,
            client,
            tls,
            roster: Roster::default(),
            templates: Templates::new(&dir),
            dir,
            settings,
            transfers,
            keyless: Mutex::new(Bucket::full(KEYLESS, Instant::now())),
            offers: Offers::new(transfers),
            rate: transfer::Rate::new(transfers.rate),
            signed: Semaphore::new(SIGNED),
        }))
    }

    #[must_use]
    pub fn cluster(&self) -> &Cluster {
        &self.0.cluster
    }

    #[must_use]
    pub fn roster(&self) -> &Roster {
        &self.0.roster
    }

    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.0.settings
    }

    #[must_use]
    pub fn this(&self) -> &NodeId {
        self.0.cluster.this()
    }

    #[must_use]
    pub fn health(&self) -> Health {
        self.0.cluster.health()
    }

    pub(crate) fn dir(&self) -> &Dir {
        &self.0.dir
    }

    pub(crate) fn tls(&self) -> &PeerTls {
        &self.0.tls
    }

    /// The authority, if its key is on this node.
    pub(crate) fn authority(&self) -> Result<Authority, authority::AuthorityError> {
        Authority::load(&self.0.dir, &self.0.settings.cluster)
    }

    /// Removes a member whose node is down. Requires the authority's key on this node.
    pub(crate) async fn remove_here(&self, node: &NodeId) -> Result<(), ClusterError> {
        let registrar = spec::registrar(&self.0.dir, &self.0.settings);
        let elsewhere = |why: AuthorityError| ClusterError::NoAuthority(model::chain(&why));
        registrar.map_err(elsewhere)?.remove(node).await?;
        tracing::warn!(%node, "removed a node from the cluster: replace every secret that its host has seen, as docs/operate/cluster.md lists");
        Ok(())
    }

    /// Removes a member whose node is down, through the node that has the authority's key.
    ///
    /// # Errors
    /// Returns [`ClusterError::NoAuthority`] if that node does not respond, or its reason for refusing.
    pub(crate) async fn remove(&self, node: &NodeId) -> Result<(), ClusterError> {
        let mut outcome = self.remove_here(node).await;
        let body = serde_json::to_vec(node).unwrap_or_default();
        for other in self.others() {
            if !matches!(outcome, Err(ClusterError::NoAuthority(_))) {
                break;
            }
            let question = question("POST", "/cluster/remove", body.clone());
            outcome = match self.ask(&other, question).await {
                Ok(wire::Removal::Removed) => Ok(()),
                Ok(wire::Removal::NotMember) => Err(ClusterError::NotMember(node.clone())),
                Ok(wire::Removal::Lives) => Err(ClusterError::NodeLives(node.clone())),
                Ok(wire::Removal::Failed(why)) => Err(ClusterError::NoAuthority(why)),
                Err(why) => Err(ClusterError::NoAuthority(model::chain(&why))),
            };
        }
        outcome
    }

    /// The member at the other end of a connection, or `None` if it is not a member.
    #[must_use]
    pub fn member<'a>(&self, peer: &'a Peer) -> Option<&'a NodeId> {
        // The member may have been removed since the connection was opened.
        peer.find(&self.0.cluster.view().members)
    }

    /// Finds where a sandbox is served that is not on this node.
    #[must_use]
    pub fn find(&self, id: &SandboxId) -> Place {
        match self.0.cluster.route(id) {
            Route::Here | Route::Unknown => Place::Here,
            Route::Node { node, .. } => Place::Node(node),
            Route::Away { node } => Place::Away(node),
        }
    }

    /// The node to which a sandbox has moved, unless it is this one.
    #[must_use]
    pub fn moved(&self, id: &SandboxId) -> Option<NodeId> {
        let view = self.0.cluster.view();
        let node = view.owners.get(id).map(|owned| &owned.owner.node)?;
        let is_other = node != self.this() && view.nodes.contains_key(node);
        is_other.then(|| node.clone())
    }

    /// All reachable nodes except this one.
    #[must_use]
    pub fn others(&self) -> Vec<NodeId> {
        let view = self.0.cluster.view();
        let others = view.nodes.keys().filter(|node| *node != self.this());
        others.cloned().collect()
    }

    /// The other ready node with the most free memory.
    #[must_use]
    pub(crate) fn open_node(&self) -> Option<NodeId> {
        let view = self.0.cluster.view();
        let others = self.others().into_iter();
        let open = others.filter(|node| view.state(node) == NodeState::Ready);
        open.max_by_key(|node| view.loads.get(node).map(|load| load.memory_free_mib))
    }

    /// Whether a node is reachable, in this node's view.
    #[must_use]
    pub fn is_there(&self, node: &NodeId) -> bool {
        self.0.cluster.view().nodes.contains_key(node)
    }

    /// Whether the home of a template has another build under a tag than this node.
    #[must_use]
    pub(crate) fn is_outdated(&self, tagged: &Tagged) -> bool {
        self.cluster().view().is_outdated(self.this(), tagged)
    }

    /// The response to a request for a sandbox on an unreachable node.
    #[must_use]
    pub fn away(&self, node: &NodeId, id: &SandboxId) -> Refusal {
        let seen = self.0.roster.last(node, id);
        Refusal::NodeAway {
            id: id.clone(),
            node: node.to_string(),
            last: seen.map_or_else(
                || "its last state is not known".to_owned(),
                |(state, at)| format!("it was {state} at {at}"),
            ),
        }
    }

    /// Counts one cluster-wide lookup for a request without a key.
    ///
    /// # Errors
    /// Returns [`Refusal::TooManyKeyless`] if the rate exceeds [`KEYLESS`].
    pub(crate) fn spend_keyless(&self) -> Result<(), Refusal> {
        let taken = self.keyless().take(KEYLESS, Instant::now());
        taken.map_err(|_| Refusal::TooManyKeyless)
    }

    /// Takes back the count of a lookup that found what its request named: only guesses are limited.
    pub(crate) fn refund_keyless(&self) {
        self.keyless().give_back(KEYLESS);
    }

    fn keyless(&self) -> MutexGuard<'_, Bucket> {
        let locked = self.0.keyless.lock();
        locked.unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn templates(&self) -> &Templates {
        &self.0.templates
    }

    /// Records on all nodes that a template is deleted. After it returns, every node that responded has stopped using
    /// the template.
    ///
    /// # Errors
    /// Returns an error if the deletion cannot be stored.
    pub(crate) async fn delete_template(&self, id: &str) -> Result<(), BuildsError> {
        self.templates().delete(self.dir(), id).await?;
        self.announce_deletion(id).await;
        Ok(())
    }

    /// The nodes on which sandboxes can be cloned from a template, in this node's view.
    #[must_use]
    pub(crate) fn nodes_with(&self, template: &str) -> Vec<String> {
        let view = self.cluster().view();
        let nodes = template.parse().ok();
        let nodes = nodes.and_then(|id| view.replicas.get(&id));
        nodes.map_or_else(Vec::new, |nodes| {
            nodes.keys().map(NodeId::to_string).collect()
        })
    }

    /// The files that this node offers to others.
    pub(crate) fn offers(&self) -> &Offers {
        &self.0.offers
    }
}

/// The status of a node in E2B's terms.
#[must_use]
pub fn status_of(state: NodeState) -> rest::NodeStatus {
    use rest::NodeStatus;
    match state {
        NodeState::Ready => NodeStatus::Ready,
        NodeState::Cordoned => NodeStatus::Standby,
        NodeState::Draining | NodeState::Moving => NodeStatus::Draining,
    }
}

/// The cluster state for a status that a client can set.
#[must_use]
pub fn state_of(status: rest::NodeStatus) -> Option<NodeState> {
    use rest::NodeStatus;
    match status {
        NodeStatus::Ready => Some(NodeState::Ready),
        NodeStatus::Standby => Some(NodeState::Cordoned),
        NodeStatus::Draining => Some(NodeState::Draining),
        NodeStatus::Connecting | NodeStatus::Unhealthy => None,
    }
}
