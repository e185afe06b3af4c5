//! The other nodes of a cluster: where a request is served, how it gets there, and what is left of a node that is away.
//!
//! ```text
//! client ─► any node ─► dispatch, spread ─► Peers::find ─► here
//!                                              └─► PeerClient ─ mTLS, HTTP/1.1 ─► cluster listener of the owner ─► here
//! ```
//! A request that arrives over the cluster listener is answered on this node. Only one for a sandbox that has moved is
//! forwarded once more, because the views of two nodes may differ for a moment. That
//! listener is the only way in for such requests; a field of a client cannot mark a request as forwarded.
//!
//! What must never happen:
//! - A create writes to etcd, or waits for it.
//! - A request that a node may have seen is sent to another one, unless that node has answered that it refuses it.
//! - A host that is not a member is treated as one: name and key of certificates are compared with the members of the present
//!   view, in both directions.

// How a host becomes a node.
mod spec;

pub mod authority;
pub mod join;
pub mod settings;
pub mod tls;

// Requests to another node, and from one.
mod client;
pub mod internal;

// What nodes publish of themselves, and see of each other.
mod publish;
mod roster;

// What every node has: templates, secrets, and what was deleted.
pub(crate) mod templates;
pub mod transfer;

pub(crate) mod deleted;
mod secrets;

pub(crate) mod moves;

pub(crate) mod metrics;

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::body::{Body, Bytes};
use axum::http::{HeaderName, HeaderValue, Request, Response};
use cluster::{Cluster, ClusterError, Health, NodeId, NodeState, Route, Tagged, View};
use http_body_util::{BodyExt, Limited};
use model::SandboxId;
use serde::de::DeserializeOwned;
use tokio::sync::{Semaphore, watch};

pub use client::{PeerClient, PeerError};
pub(crate) use internal::router as internal_router;
pub(crate) use publish::{follow_status, publish, renew};
pub(crate) use roster::watch as watch_roster;
pub use roster::{PeerState, Roster, Seen};
pub use spec::ClusterSpec;
pub use tls::{Peer, PeerTls};

use crate::{
    auth::{Bucket, Rate, presented_sum, remove_keys},
    builds::owner::BuildsError,
    proxy::{Refusal, Relay, Upload, head},
    registry::check_signed,
};
use authority::{Authority, AuthorityError};
use hyper::{StatusCode, body::Incoming};
use settings::{Dir, Settings};
use templates::Templates;
use transfer::{Fetch, FileList, Offers, TransferError, TransferLimits};

/// The address of the client of a forwarded request. Other nodes read it on the cluster listener only.
pub const CLIENT: HeaderName = HeaderName::from_static("x-cube-client");
/// SHA-256 of the client's API key, in the place of the key. Read on the cluster listener only, where the connection vouches for
/// the node; the owner looks up whether the key is live, and its scopes. The key itself stays at the node that was asked.
pub const KEY: HeaderName = HeaderName::from_static("x-cube-key");
/// A mark of forwarded requests that are forwarded no further. Read on the cluster listener only.
pub const LAST_HOP: HeaderName = HeaderName::from_static("x-cube-last-hop");
/// How long another node may take to answer a question of this one.
const ASK: Duration = Duration::from_secs(5);
/// How long another node may take to sum files, and to send a chunk.
const SUM: Duration = Duration::from_secs(900);
const SEND: Duration = Duration::from_secs(60);
/// Signed file URLs that the other nodes are asked about at once: clients without a key send them.
const SIGNED: usize = 64;
/// How long a node may be away while this one waits for files of it.
const GONE: Duration = Duration::from_secs(10);
/// How long a node may be away while the answer to a client's request is awaited: longer than a reload takes.
const LEFT: Duration = Duration::from_secs(3);
/// Requests without a key for which this node asks all others, a second: signed file URLs that name no sandbox, and uploads for
/// templates that it does not have. Each costs all nodes a search.
const KEYLESS: Rate = Rate {
    per_second: 50,
    burst: 200,
};
/// Longest answer to a question in bytes.
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
    /// Of what this node fetches.
    rate: transfer::Rate,
    templates: Templates,
    /// For questions about signed URLs.
    signed: Semaphore,
    keyless: Mutex<Bucket>,
}

/// Where a sandbox is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// Here, if anywhere.
    Here,
    Node(NodeId),
    /// At a node that is not there now.
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

    /// Removes a member that does not live, if the authority's key is on this node.
    pub(crate) async fn remove_here(&self, node: &NodeId) -> Result<(), ClusterError> {
        let registrar = spec::registrar(&self.0.dir, &self.0.settings);
        let elsewhere = |why: AuthorityError| ClusterError::NoAuthority(model::chain(&why));
        registrar.map_err(elsewhere)?.remove(node).await?;
        tracing::warn!(%node, "a node was removed: replace what its host has seen, as docs/operate/cluster.md lists");
        Ok(())
    }

    /// Removes a member that does not live, by the node that has the authority's key.
    ///
    /// # Errors
    /// Returns [`ClusterError::NoAuthority`] if that node does not answer, or the reason for which it refuses.
    pub(crate) async fn remove(&self, node: &NodeId) -> Result<(), ClusterError> {
        let mut outcome = self.remove_here(node).await;
        let body = serde_json::to_vec(node).unwrap_or_default();
        for other in self.others() {
            if !matches!(outcome, Err(ClusterError::NoAuthority(_))) {
                break;
            }
            let question = question("POST", "/cluster/remove", body.clone());
            outcome = match self.ask(&other, question).await {
                Ok(internal::Removal::Removed) => Ok(()),
                Ok(internal::Removal::NotMember) => Err(ClusterError::NotMember(node.clone())),
                Ok(internal::Removal::Lives) => Err(ClusterError::NodeLives(node.clone())),
                Ok(internal::Removal::Failed(why)) => Err(ClusterError::NoAuthority(why)),
                Err(why) => Err(ClusterError::NoAuthority(model::chain(&why))),
            };
        }
        outcome
    }

    /// The member at the other end of a connection; `None`: it is none.
    #[must_use]
    pub fn member<'a>(&self, peer: &'a Peer) -> Option<&'a NodeId> {
        // It may have been removed since the connection began.
        peer.find(&self.0.cluster.view().members)
    }

    /// Where a sandbox is served that this node does not have.
    #[must_use]
    pub fn find(&self, id: &SandboxId) -> Place {
        match self.0.cluster.route(id) {
            Route::Here | Route::Unknown => Place::Here,
            Route::Node { node, .. } => Place::Node(node),
            Route::Away { node } => Place::Away(node),
        }
    }

    /// The node that has a sandbox which has moved, if that is not this one.
    #[must_use]
    pub fn moved(&self, id: &SandboxId) -> Option<NodeId> {
        let view = self.0.cluster.view();
        let node = view.owners.get(id).map(|owned| &owned.owner.node)?;
        let is_other = node != self.this() && view.nodes.contains_key(node);
        is_other.then(|| node.clone())
    }

    /// The nodes that are there, without this one.
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

    /// Whether a node is there, as far as this one sees.
    #[must_use]
    pub fn is_there(&self, node: &NodeId) -> bool {
        self.0.cluster.view().nodes.contains_key(node)
    }

    /// Whether the home of a template has another build under a tag than this node.
    #[must_use]
    pub(crate) fn is_outdated(&self, tagged: &Tagged) -> bool {
        self.cluster().view().is_outdated(self.this(), tagged)
    }

    /// What a request for a sandbox of a node that is away is answered with.
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

    /// Forwards a request of `from` to a node, as it came. `host` is the host that the request names. If the response
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
            tracing::warn!(%node, why, "cannot forward a request");
            Refusal::NodeFailed { why }
        };
        let sent = self.send_while_there(node, request.map(Body::new)).await;
        let response = relay.response(sent.map_err(failed)?, held, Body::new);
        response.ok_or_else(|| Refusal::NodeFailed {
            why: format!("node {node} switched protocols without being asked"),
        })
    }

    /// Sends a request of the control plane, whose body is in memory or of this node's router.
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

    /// Sends a request, and gives it up when the node has been away for [`LEFT`]: a host that has lost its power closes no
    /// connection, and TCP would wait for a quarter of an hour.
    async fn send_while_there(
        &self,
        node: &NodeId,
        request: Request<Body>,
    ) -> Result<Response<Incoming>, PeerError> {
        self.while_there(node, LEFT, self.0.client.send(node, request))
            .await
    }

    /// What was asked of a node, unless that has been away for `limit` without a break.
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

    /// A node that answers requests for the template of this id or name. `is_by_copies`: one that has a copy will do, if
    /// the template's home is away.
    pub(crate) async fn with_template(&self, name: &str, is_by_copies: bool) -> Option<NodeId> {
        let asked = internal::TemplateName {
            name: name.to_owned(),
            is_by_copies,
        };
        let found = self.ask_all::<bool>("/cluster/template", &asked, |has| *has);
        found.await.map(|(node, _)| node)
    }

    /// The node of the sandbox whose token signed a file URL, and the sandbox.
    pub(crate) async fn signer(
        &self,
        query: &str,
        operation: &'static str,
    ) -> Option<(NodeId, SandboxId)> {
        let asked = internal::SignedUrl {
            query: query.to_owned(),
            operation: operation.to_owned(),
        };
        check_signed(query).ok()?;
        let _asking = self.0.signed.acquire().await.ok()?;
        let found = self.ask_all::<Option<SandboxId>>("/cluster/signed", &asked, Option::is_some);
        let (node, id) = found.await?;
        Some((node, id?))
    }

    /// Counts a question to all nodes that a request without a key causes.
    ///
    /// # Errors
    /// Returns [`Refusal::TooManyKeyless`] above [`KEYLESS`].
    pub(crate) fn spend_keyless(&self) -> Result<(), Refusal> {
        let mut bucket = self
            .0
            .keyless
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let taken = bucket.take(KEYLESS, Instant::now());
        taken.map_err(|_| Refusal::TooManyKeyless)
    }

    /// Asks all nodes at once, and returns the first answer that is wanted.
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
            answers.spawn(async move { (peers.ask::<T>(&node, request).await, node) });
        }
        while let Some(done) = answers.join_next().await {
            match done {
                Ok((Ok(answer), node)) if is_wanted(&answer) => return Some((node, answer)),
                Ok((Err(why), _)) => tracing::debug!(why = %model::chain(&why), "no answer"),
                Ok((Ok(_), _)) | Err(_) => {}
            }
        }
        None
    }

    /// Tells all other nodes something at once, and returns those that have not confirmed it, with the reason.
    async fn unconfirmed<F>(&self, tell: impl Fn(Self, NodeId) -> F) -> Vec<(NodeId, String)>
    where
        F: Future<Output = Result<(), String>> + Send + 'static,
    {
        let mut told = tokio::task::JoinSet::new();
        for node in self.others() {
            let answer = tell(self.clone(), node.clone());
            told.spawn(async move { answer.await.map_err(|why| (node, why)) });
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

    /// Records that a template is deleted on all nodes. When this returns, the nodes that have answered use it no more.
    ///
    /// # Errors
    /// Returns an error if it cannot be kept.
    pub(crate) async fn delete_template(&self, id: &str) -> Result<(), BuildsError> {
        self.templates().delete(self.dir(), id).await?;
        self.announce_deletion(id).await;
        Ok(())
    }

    /// The nodes on which sandboxes can be cloned from a template, as this node sees it.
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

    /// The files that a node offers under a key.
    ///
    /// # Errors
    /// Returns [`TransferError::NotOffered`], or the errors of a question.
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

    /// Fetches files that a node offers into a directory, which must have no other use. Returns the bytes that were sent.
    /// What is there already, from an attempt that has ended in the middle, is used.
    ///
    /// # Errors
    /// Returns [`TransferError`]. What was fetched stays for another attempt.
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

    /// Asks a node a question of this node's own.
    ///
    /// # Errors
    /// Returns [`PeerError`] if there is no answer of the expected form in time.
    pub(crate) async fn ask<T: DeserializeOwned>(
        &self,
        node: &NodeId,
        request: Request<Body>,
    ) -> Result<T, PeerError> {
        let (status, bytes) = self.read(node, request, MAX_ANSWER, ASK).await?;
        answer_of(node, status, &bytes)
    }

    /// As [`Self::read`], for answers that may take long. A server that is stopped keeps its connections and loses its lease:
    /// after [`GONE`] without one, its answer is not waited for any more.
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

    /// Sends a question, and reads an answer of at most `most` bytes within `limit`.
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

/// Returns when a node has been away for `limit` without a break.
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
            // The view changes no more.
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
        // Refusals have a text.
        let most = most.max(MAX_REFUSAL);
        self.peers.read_long(&self.node, question, most, SEND).await
    }
}

/// Adds the client's address, in place of what the client may have claimed, and whether this is the second hop.
fn mark(headers: &mut axum::http::HeaderMap, from: SocketAddr, is_forwarded: bool) {
    // Requests for sandboxes need no API key, and what a client has put here is not this node's word.
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

/// The key of a request to the control plane: as the node that has forwarded it says, or as the client has presented it.
fn key_for(headers: &axum::http::HeaderMap, is_forwarded: bool) -> Option<HeaderValue> {
    if is_forwarded {
        return headers.get(KEY).cloned();
    }
    HeaderValue::try_from(presented_sum(headers)?).ok()
}

/// Puts the name of a key in the place of the key.
fn name_key(headers: &mut axum::http::HeaderMap, key: Option<HeaderValue>) {
    remove_keys(headers);
    if let Some(key) = key {
        headers.insert(KEY, key);
    }
}

/// A question to another node, for [`Peers::ask`].
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

/// The node's status as the cluster has it.
#[must_use]
pub fn status_of(state: NodeState) -> rest::NodeStatus {
    use rest::NodeStatus;
    match state {
        NodeState::Ready => NodeStatus::Ready,
        NodeState::Cordoned => NodeStatus::Standby,
        NodeState::Draining | NodeState::Moving => NodeStatus::Draining,
    }
}

/// The state in the cluster for a status that can be set.
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
        // The second hop names the same key.
        let key = key_for(&headers, true);
        assert_eq!(key.as_ref(), Some(&headers[KEY]));
        // A request for a sandbox names none.
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
        // It is there.
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
