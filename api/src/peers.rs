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
mod client;
pub mod wire;

// What nodes publish of themselves, and see of each other.
mod machinery;
mod publish;
mod roster;

// What every node has: templates, secrets, and what was deleted.
pub(crate) mod templates;
pub mod transfer;

mod secrets;

pub(crate) mod moves;

pub(crate) mod metrics;

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use axum::body::{Body, Bytes};
use axum::http::{HeaderName, HeaderValue, Request, Response};
use builds::owner::BuildsError;
use cluster::{Cluster, ClusterError, Health, NodeId, NodeState, Route, Tagged, View};
use http_body_util::{BodyExt, Limited};
use model::SandboxId;
use serde::de::DeserializeOwned;
use tasks::boxed;
use tokio::sync::{Semaphore, watch};

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
    auth::{Bucket, Rate, presented_sum, remove_keys},
    node::settings::{Dir, Settings},
    proxy::{Refusal, Relay, Upload, head},
    registry::check_signed,
};
use authority::{Authority, AuthorityError};
use hyper::{StatusCode, body::Incoming};
use templates::Templates;
use transfer::{Fetch, FileList, Offers, TransferError, TransferLimits};

/// The client's address of a forwarded request. Accepted on the cluster listener only.
pub const CLIENT: HeaderName = HeaderName::from_static("x-cube-client");
/// SHA-256 of the client's API key, sent instead of the key. Accepted on the cluster listener only, where the
/// connection authenticates the node. The owner checks that the key is still valid and looks up its scopes. The key
/// itself never leaves the node that received the request.
pub const KEY: HeaderName = HeaderName::from_static("x-cube-key");
/// Marks a request that must not be forwarded again. Accepted on the cluster listener only.
pub const LAST_HOP: HeaderName = HeaderName::from_static("x-cube-last-hop");
/// Timeout of a request to another node.
const ASK: Duration = Duration::from_secs(5);
/// Timeout of a request for which another node hashes files or sends a chunk.
const SUM: Duration = Duration::from_secs(900);
const SEND: Duration = Duration::from_secs(60);
/// Maximum number of concurrent cluster-wide lookups of signed file URLs, which clients send without a key.
const SIGNED: usize = 64;
/// How long a node may be unreachable while this one waits for files from it.
const GONE: Duration = Duration::from_secs(10);
/// How long a node may be unreachable while a client's request waits for its response. Longer than a reload takes.
const LEFT: Duration = Duration::from_secs(3);
/// Rate limit of cluster-wide lookups for requests without a key: signed file URLs that name no sandbox, and uploads
/// for templates that are not on this node. Each lookup costs every node a search.
const KEYLESS: Rate = Rate {
    per_second: 50,
    burst: 200,
};
/// Maximum size of a response in bytes.
pub(crate) const MAX_ANSWER: usize = 8 << 20;
const MAX_REFUSAL: usize = 4 << 10;

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

    /// Forwards a request of `from` to a node unchanged. `host` is the host that the request names. If the response
    /// upgrades the connection, `held` is kept until the upgraded connection ends.
    ///
    /// # Errors
    /// Returns [`Refusal::NodeFailed`] if there is no response.
    pub(crate) async fn forward(
        &self,
        node: &NodeId,
        request: Request<Upload>,
        from: SocketAddr,
        host: &str,
        held: impl Send + 'static,
    ) -> Result<Response<Body>, Refusal> {
        let is_forwarded = request.extensions().get::<Arc<Peer>>().is_some();
        let (relay, mut request) = Relay::of(request, host);
        mark(request.headers_mut(), from, is_forwarded);
        let failed = |why: PeerError| {
            let why = model::chain(&why);
            tracing::warn!(%node, why, "cannot forward a request to another node");
            Refusal::NodeFailed { why }
        };
        let sent = self.send_while_there(node, request.map(Body::new)).await;
        let response = relay.response(sent.map_err(failed)?, held, Body::new);
        response.ok_or_else(|| Refusal::NodeFailed {
            why: format!("node {node} switched protocols without an upgrade request"),
        })
    }

    /// Sends a control-plane request whose body is in memory or comes from this node's router.
    ///
    /// # Errors
    /// Returns [`PeerError`] if there is no response.
    pub(crate) async fn pass(
        &self,
        node: &NodeId,
        request: Request<Body>,
        from: SocketAddr,
        host: &str,
    ) -> Result<Response<Body>, PeerError> {
        let (mut parts, body) = request.into_parts();
        let is_forwarded = parts.extensions.get::<Arc<Peer>>().is_some();
        let key = key_for(&parts.headers, is_forwarded);
        head::to_successor(&mut parts, host, None);
        mark(&mut parts.headers, from, is_forwarded);
        name_key(&mut parts.headers, key);
        let request = Request::from_parts(parts, body);
        let response = self.send_while_there(node, request).await?;
        let (mut parts, body) = response.into_parts();
        head::to_client(&mut parts);
        Ok(Response::from_parts(parts, Body::new(body)))
    }

    /// Sends a request and gives up after the node has been unreachable for [`LEFT`]. A host that loses power closes no
    /// connections, and TCP would wait for a quarter of an hour.
    async fn send_while_there(
        &self,
        node: &NodeId,
        request: Request<Body>,
    ) -> Result<Response<Incoming>, PeerError> {
        self.while_there(node, LEFT, self.0.client.send(node, request))
            .await
    }

    /// The result of a request to a node, or an error once the node has been unreachable for `limit` without
    /// interruption.
    async fn while_there<T>(
        &self,
        node: &NodeId,
        limit: Duration,
        asked: impl Future<Output = Result<T, PeerError>>,
    ) -> Result<T, PeerError> {
        tokio::select! {
            answer = asked => answer,
            () = gone(self.0.cluster.views(), node, limit) => Err(PeerError::Away {
                node: node.clone(),
                limit_s: limit.as_secs(),
            }),
        }
    }

    /// Finds a node that serves requests for the template with this id or name. With `is_by_copies`, a node that has a
    /// copy qualifies while the template's home is unreachable.
    pub(crate) async fn with_template(&self, name: &str, is_by_copies: bool) -> Option<NodeId> {
        let asked = wire::TemplateName {
            name: name.to_owned(),
            is_by_copies,
        };
        let found = self.ask_all::<bool>("/cluster/template", &asked, |has| *has);
        found.await.map(|(node, _)| node)
    }

    /// Finds the sandbox whose token signed a file URL, and its node.
    pub(crate) async fn signer(
        &self,
        query: &str,
        operation: &'static str,
    ) -> Option<(NodeId, SandboxId)> {
        let asked = wire::SignedUrl {
            query: query.to_owned(),
            operation: operation.to_owned(),
        };
        check_signed(query).ok()?;
        let _asking = self.0.signed.acquire().await.ok()?;
        let found = self.ask_all::<Option<SandboxId>>("/cluster/signed", &asked, Option::is_some);
        let (node, id) = found.await?;
        Some((node, id?))
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

    /// Sends a request to all nodes at the same time and returns the first matching response.
    async fn ask_all<T: DeserializeOwned + Send + 'static>(
        &self,
        path: &'static str,
        asked: &impl serde::Serialize,
        is_wanted: impl Fn(&T) -> bool,
    ) -> Option<(NodeId, T)> {
        let body = serde_json::to_vec(asked).ok()?;
        let mut answers = tokio::task::JoinSet::new();
        for node in self.others() {
            let (peers, request) = (self.clone(), question("POST", path, body.clone()));
            answers.spawn(boxed(async move {
                (peers.ask::<T>(&node, request).await, node)
            }));
        }
        while let Some(done) = answers.join_next().await {
            match done {
                Ok((Ok(answer), node)) if is_wanted(&answer) => return Some((node, answer)),
                Ok((Err(why), _)) => {
                    tracing::debug!(why = %model::chain(&why), "no response from another node")
                }
                Ok((Ok(_), _)) | Err(_) => {}
            }
        }
        None
    }

    /// Sends a notification to all other nodes at the same time and returns those that did not confirm it, with
    /// reasons.
    async fn unconfirmed<F>(&self, tell: impl Fn(Self, NodeId) -> F) -> Vec<(NodeId, String)>
    where
        F: Future<Output = Result<(), String>> + Send + 'static,
    {
        let mut told = tokio::task::JoinSet::new();
        for node in self.others() {
            let answer = tell(self.clone(), node.clone());
            told.spawn(boxed(
                async move { answer.await.map_err(|why| (node, why)) },
            ));
        }
        let mut unconfirmed = Vec::new();
        while let Some(done) = told.join_next().await {
            if let Ok(Err(by)) = done {
                unconfirmed.push(by);
            }
        }
        unconfirmed
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

    /// Lists the files that a node offers under a key.
    ///
    /// # Errors
    /// Returns [`TransferError::NotOffered`], or the errors of the request.
    pub(crate) async fn list_files(
        &self,
        node: &NodeId,
        key: &str,
    ) -> Result<FileList, TransferError> {
        let question = question("GET", &format!("/cluster/files/{key}"), Vec::new());
        let (status, bytes) = self.read_long(node, question, MAX_ANSWER, SUM).await?;
        if status == StatusCode::NOT_FOUND {
            let (node, key) = (node.clone(), key.to_owned());
            return Err(TransferError::NotOffered { node, key });
        }
        Ok(answer_of(node, status, &bytes)?)
    }

    /// Fetches the files that a node offers into a directory that nothing else uses. Returns the number of bytes
    /// received. Continues from files that an interrupted attempt left there.
    ///
    /// # Errors
    /// Returns [`TransferError`]. Files fetched so far are kept for the next attempt.
    pub(crate) async fn fetch_files(
        &self,
        node: &NodeId,
        key: &str,
        list: &FileList,
        dir: &std::path::Path,
    ) -> Result<u64, TransferError> {
        let source = Remote {
            peers: self.clone(),
            node: node.clone(),
        };
        let fetch = Fetch { key, list, dir };
        fetch.run(&source, &self.0.rate, self.0.transfers).await
    }

    /// Sends one of this node's own requests to another node.
    ///
    /// # Errors
    /// Returns [`PeerError`] if no response of the expected form arrives in time.
    pub(crate) async fn ask<T: DeserializeOwned>(
        &self,
        node: &NodeId,
        request: Request<Body>,
    ) -> Result<T, PeerError> {
        let (status, bytes) = self.read(node, request, MAX_ANSWER, ASK).await?;
        answer_of(node, status, &bytes)
    }

    /// Like [`Self::read`], for responses that may take long. A server that is stopped (SIGSTOP) keeps its connections
    /// but loses its lease, so this gives up after [`GONE`] without a lease.
    async fn read_long(
        &self,
        node: &NodeId,
        request: Request<Body>,
        most: usize,
        limit: Duration,
    ) -> Result<(StatusCode, Bytes), PeerError> {
        self.while_there(node, GONE, self.read(node, request, most, limit))
            .await
    }

    /// Sends a request and reads a response of at most `most` bytes within `limit`.
    async fn read(
        &self,
        node: &NodeId,
        request: Request<Body>,
        most: usize,
        limit: Duration,
    ) -> Result<(StatusCode, Bytes), PeerError> {
        let asked = async {
            let response = self.0.client.send(node, request).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), most).collect().await;
            let body = body.map_err(|why| malformed(node, why.to_string()))?;
            Ok((status, body.to_bytes()))
        };
        let late = |_| PeerError::Late {
            node: node.clone(),
            limit_s: limit.as_secs(),
        };
        tokio::time::timeout(limit, asked).await.map_err(late)?
    }
}

/// Returns when a node has been unreachable for `limit` without interruption.
async fn gone(mut views: watch::Receiver<Arc<View>>, node: &NodeId, limit: Duration) {
    loop {
        let left = views.wait_for(|view| !view.nodes.contains_key(node));
        let mut is_open = left.await.is_ok();
        if is_open {
            let back = views.wait_for(|view| view.nodes.contains_key(node));
            match tokio::time::timeout(limit, back).await {
                Ok(back) => is_open = back.is_ok(),
                Err(_) => return,
            }
        }
        if !is_open {
            // The view no longer changes.
            std::future::pending::<()>().await;
        }
    }
}

fn malformed(node: &NodeId, why: String) -> PeerError {
    PeerError::Malformed {
        node: node.clone(),
        why,
    }
}

fn answer_of<T: DeserializeOwned>(
    node: &NodeId,
    status: StatusCode,
    bytes: &Bytes,
) -> Result<T, PeerError> {
    if !status.is_success() {
        let text: String = String::from_utf8_lossy(bytes).chars().take(300).collect();
        return Err(malformed(node, format!("status {status}: {text}")));
    }
    serde_json::from_slice(bytes).map_err(|why| malformed(node, why.to_string()))
}

/// A node from which files are fetched.
#[derive(Clone)]
struct Remote {
    peers: Peers,
    node: NodeId,
}

impl transfer::Source for Remote {
    fn node(&self) -> &NodeId {
        &self.node
    }

    async fn get(&self, path: String, most: usize) -> Result<(StatusCode, Bytes), PeerError> {
        let question = question("GET", &path, Vec::new());
        // Refusals carry a text.
        let most = most.max(MAX_REFUSAL);
        self.peers.read_long(&self.node, question, most, SEND).await
    }
}

/// Sets the client's address, replacing any that the client sent, and marks the second hop.
fn mark(headers: &mut axum::http::HeaderMap, from: SocketAddr, is_forwarded: bool) {
    // Requests for sandboxes need no API key. This header is valid only if this node has set it, so the client's is
    // removed.
    headers.remove(KEY);
    headers.remove(LAST_HOP);
    if is_forwarded {
        headers.insert(LAST_HOP, HeaderValue::from_static("1"));
    }
    headers.remove(CLIENT);
    if let Ok(value) = HeaderValue::try_from(from.to_string()) {
        headers.insert(CLIENT, value);
    }
}

/// The key of a control-plane request, either from the node that forwarded it or from the client.
fn key_for(headers: &axum::http::HeaderMap, is_forwarded: bool) -> Option<HeaderValue> {
    if is_forwarded {
        return headers.get(KEY).cloned();
    }
    HeaderValue::try_from(presented_sum(headers)?).ok()
}

/// Replaces the key with its hash.
fn name_key(headers: &mut axum::http::HeaderMap, key: Option<HeaderValue>) {
    remove_keys(headers);
    if let Some(key) = key {
        headers.insert(KEY, key);
    }
}

/// A request to another node, for [`Peers::ask`].
pub(crate) fn question(method: &str, path: &str, body: Vec<u8>) -> Request<Body> {
    let mut request = Request::new(Body::from(body));
    *request.method_mut() = method.parse().unwrap_or_default();
    *request.uri_mut() = path.parse().unwrap_or_default();
    let json = HeaderValue::from_static("application/json");
    let headers = request.headers_mut();
    headers.insert(axum::http::header::CONTENT_TYPE, json);
    headers.insert(
        axum::http::header::HOST,
        HeaderValue::from_static("node.cube.internal"),
    );
    request
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use cluster::{CpuKind, Node};
    use model::Platform;

    use super::*;

    fn view(nodes: &[&str]) -> Arc<View> {
        let node = |name: &&str| Node {
            id: name.parse().unwrap(),
            identity: String::new(),
            address: String::new(),
            incarnation: "0".parse().unwrap(),
            platform: Platform::Ring3,
            cpu: CpuKind::default(),
            version: String::new(),
        };
        let nodes = nodes.iter().map(node).map(|node| (node.id.clone(), node));
        Arc::new(View {
            nodes: Arc::new(nodes.collect::<BTreeMap<_, _>>()),
            ..View::default()
        })
    }

    #[test]
    fn a_forwarded_request_names_the_key_of_the_client_and_does_not_have_it() {
        let mut headers = axum::http::HeaderMap::new();
        headers.insert("authorization", HeaderValue::from_static("Bearer secret"));
        headers.insert(KEY, HeaderValue::from_static("of the client"));
        let sum = presented_sum(&headers).unwrap();
        let key = key_for(&headers, false);
        mark(&mut headers, ([10, 0, 0, 1], 1).into(), false);
        name_key(&mut headers, key);
        assert_eq!(headers[KEY], sum);
        assert!(!format!("{headers:?}").contains("secret"), "{headers:?}");
        // The second hop sends the hash of the same key.
        let key = key_for(&headers, true);
        assert_eq!(key.as_ref(), Some(&headers[KEY]));
        // A request for a sandbox has no key.
        mark(&mut headers, ([10, 0, 0, 1], 1).into(), true);
        assert_eq!(headers.get(KEY), None);
        name_key(&mut headers, key);
        assert_eq!(headers[KEY], sum);
    }

    #[tokio::test]
    async fn only_a_node_that_stays_away_is_gone() {
        let (views, seen) = watch::channel(view(&["a", "b"]));
        let node: NodeId = "a".parse().unwrap();
        let (short, long) = (Duration::from_millis(20), Duration::from_secs(600));
        let mut gone_soon = Box::pin(gone(seen.clone(), &node, short));
        let mut gone_late = Box::pin(gone(seen, &node, long));
        // The node is reachable.
        let waited = tokio::time::timeout(3 * short, &mut gone_soon).await;
        assert!(waited.is_err());
        views.send_replace(view(&["b"]));
        let waited = tokio::time::timeout(3 * short, &mut gone_late).await;
        assert!(waited.is_err(), "it may return");
        let waited = tokio::time::timeout(Duration::from_secs(10), gone_soon).await;
        assert!(waited.is_ok());
        views.send_replace(view(&["a"]));
        drop(views);
        let waited = tokio::time::timeout(3 * short, gone_late).await;
        assert!(waited.is_err(), "it has returned");
    }
}
