//! Decides whether a request goes to a sandbox, to the control plane, or to another process.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Version, header,
};
use cluster::NodeId;
use envd::ENVD_PORT;
use hyper::body::{Body as _, Incoming};
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use model::SandboxId;

use super::Came;
use super::forward;
use super::gate::{Gate, Recipient, Ticket};
use super::guesses::GuessLimiter;
use super::limits::{BODY_PAUSE, Limits};
use super::route::Route;
use crate::auth::Authenticator;
use crate::peers::{CLIENT, LAST_HOP, Peer, Peers, Place, moves::Moves, wire};
use crate::proxy::{
    ByPath, Destination, Form, Hosts, Origin, Proxy, Refusal, Routes, Upload, host, isolate,
};
use crate::registry::{SignatureError, check_signed};

const BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Routes each request. Cheap to clone: every request gets a clone.
#[derive(Debug)]
pub struct Dispatch<R> {
    hosts: Hosts,
    gate: Gate<R>,
    body_pause: Duration,
    guesses: GuessLimiter,
}

impl<R> Clone for Dispatch<R> {
    fn clone(&self) -> Self {
        Self {
            hosts: self.hosts.clone(),
            gate: self.gate.clone(),
            body_pause: self.body_pause,
            guesses: self.guesses.clone(),
        }
    }
}

/// The part of a server that serves requests and is replaced in a handover.
#[derive(Debug)]
pub struct Backend<R> {
    proxy: Proxy<R>,
    control: TowerToHyperService<Router>,
    /// API keys that must not reach guests. `None`: there are none.
    keys: Option<Arc<Authenticator>>,
    cluster: Option<ClusterSide>,
}

/// The other nodes, and the router of their requests.
#[derive(Debug)]
struct ClusterSide {
    peers: Peers,
    moves: Moves,
    internal: TowerToHyperService<Router>,
}

impl<R> Backend<R> {
    /// Requests for sandboxes go to `proxy`, all others to `control`.
    pub fn new(proxy: Proxy<R>, control: Router) -> Self {
        Self {
            proxy,
            control: TowerToHyperService::new(control),
            keys: None,
            cluster: None,
        }
    }

    /// Removes valid API keys of `keys` from requests for sandboxes.
    #[must_use]
    pub fn with_keys(mut self, keys: Arc<Authenticator>) -> Self {
        self.keys = Some(keys);
        self
    }

    /// Forwards requests for sandboxes of other nodes to `peers`, and requests of other nodes to `internal`.
    #[must_use]
    pub(crate) fn with_peers(mut self, peers: Peers, moves: Moves, internal: Router) -> Self {
        let internal = TowerToHyperService::new(internal);
        self.cluster = Some(ClusterSide {
            peers,
            moves,
            internal,
        });
        self
    }
}

/// The origin of a response. A sandbox may still read the request body while it responds; the control plane never does.
enum Answered {
    Sandbox(Response<Body>),
    Control(Response<Body>),
    /// Another process has responded. It has read as much of the body as it wants.
    Successor(Response<Body>),
}

impl<R: Routes> Dispatch<R> {
    pub fn new(hosts: Hosts, backend: Backend<R>) -> Self {
        Self {
            hosts,
            gate: Gate::new(backend),
            body_pause: BODY_PAUSE,
            guesses: GuessLimiter::default(),
        }
    }

    /// The gate that every request passes.
    #[must_use]
    pub fn gate(&self) -> Gate<R> {
        self.gate.clone()
    }

    pub(super) fn set_limits(&mut self, limits: &Limits) {
        self.body_pause = limits.body_pause;
        self.guesses = GuessLimiter::new(limits.trusted_proxies.clone());
    }

    /// Serves a request from `peer`. If the response upgrades the connection, `held` is kept until the upgraded
    /// connection ends.
    pub(super) async fn answer(
        &self,
        request: Request<Incoming>,
        (peer, came): (SocketAddr, Came),
        held: impl Send + 'static,
    ) -> Response<Body> {
        let form = Form::wanted(request.headers());
        // A client that sent `Expect: 100-continue` gets the final response instead of `100 Continue` and does not send
        // the body.
        let waits = request.headers().contains_key(header::EXPECT);
        let request = request.map(Upload::new);
        let progress = request.body().progress();
        let (response, is_final) = match self.decide(request, (peer, came), held).await {
            Ok(Answered::Sandbox(response)) => (response, false),
            Ok(Answered::Control(response) | Answered::Successor(response)) => (response, true),
            Err(refusal) => (refusal.answer(form), true),
        };
        if is_final && !waits {
            progress.drop_rest().await;
        }
        let mut response = response;
        mark_stream(&mut response);
        response
    }

    async fn decide(
        &self,
        mut request: Request<Upload>,
        (peer, came): (SocketAddr, Came),
        held: impl Send + 'static,
    ) -> Result<Answered, Refusal> {
        check(&request)?;
        if is_plain_health_check(&request) {
            let own = HeaderValue::from_static("localhost");
            request.headers_mut().insert(header::HOST, own);
        }
        let host = host(request.uri(), request.headers())?;
        let route = Route::of(&self.hosts, &request);
        let (recipient, ticket) = self.gate.pass(route.passage()).await;
        let backend = match recipient {
            Recipient::Backend(backend) => backend,
            Recipient::Successor(path) => {
                drop(ticket);
                let response = forward::forward(&path, request, peer, &came, &host, held).await?;
                return Ok(Answered::Successor(response));
            }
        };
        let peer = match came {
            Came::Client => peer,
            Came::Node(node) => {
                let side = backend.cluster.as_ref().ok_or(Refusal::NotMember)?;
                match side.enter(&mut request, &node, peer)? {
                    Entered::Question => {
                        if wire::is_long(request.uri().path()) {
                            // A handover ends the wait.
                            drop(ticket);
                        }
                        let response = side.question(request, node).await;
                        return Ok(Answered::Control(response));
                    }
                    Entered::Forwarded(client) => client,
                }
            }
        };
        let passed = Passed {
            backend,
            ticket,
            request,
            peer,
            host,
            held,
        };
        match route {
            Route::Control => Ok(Answered::Control(self.control(passed).await)),
            Route::ByHost { id, port } => match passed.elsewhere(&id).await? {
                Some(node) => passed.forward(&node).await,
                None => Ok(Answered::Sandbox(self.sandbox(passed, id, port).await?)),
            },
            Route::ByPath(found) => match passed.elsewhere(&found.id).await? {
                Some(node) => passed.forward(&node).await,
                None => self.by_path(passed, found).await,
            },
            Route::Signed(operation) => self.signed(passed, operation).await,
            Route::Invalid(refusal) => Err(refusal),
        }
    }

    async fn by_path<H: Send + 'static>(
        &self,
        mut passed: Passed<R, H>,
        found: ByPath,
    ) -> Result<Answered, Refusal> {
        *passed.request.uri_mut() = found.uri;
        let mut response = self.sandbox(passed, found.id, found.port).await?;
        let origin = if self.hosts.are_strict() {
            Origin::Opaque
        } else {
            Origin::Shared
        };
        isolate(response.headers_mut(), origin, Some(&found.prefix));
        Ok(Answered::Sandbox(response))
    }

    /// Serves a signed file URL, which refers to the sandbox whose token signed it. Counts it as a guess until that
    /// sandbox is found.
    async fn signed<H: Send + 'static>(
        &self,
        passed: Passed<R, H>,
        operation: &'static str,
    ) -> Result<Answered, Refusal> {
        let request = &passed.request;
        let guess = self.guesses.take(passed.peer, request.headers())?;
        if let Some(side) = &passed.backend.cluster
            && !is_forwarded(request)
            && let Place::Node(node) = side
                .signer(&passed.backend.proxy, request, operation)
                .await?
        {
            guess.forgive();
            return passed.forward(&node).await;
        }
        let query = request.uri().query().unwrap_or_default();
        let routes = passed.backend.proxy.routes();
        let found = routes.find_by_signature(query, operation).await;
        let id = found.ok_or_else(|| no_signer(query))?;
        guess.forgive();
        let is_download = request.method() == Method::GET;
        let mut response = self.sandbox(passed, id, ENVD_PORT).await?;
        // The response comes from the agent, which the guest controls, but the origin is the control plane's.
        isolate(response.headers_mut(), Origin::Opaque, None);
        let is_file = is_download && response.status().is_success();
        let headers = response.headers_mut();
        let nosniff = HeaderValue::from_static("nosniff");
        headers.insert(header::X_CONTENT_TYPE_OPTIONS, nosniff);
        if is_file {
            let bytes = HeaderValue::from_static("application/octet-stream");
            headers.insert(header::CONTENT_TYPE, bytes);
        }
        Ok(Answered::Sandbox(response))
    }

    /// Sends a request to a sandbox of this node.
    async fn sandbox<H: Send + 'static>(
        &self,
        passed: Passed<R, H>,
        id: SandboxId,
        port: u16,
    ) -> Result<Response<Body>, Refusal> {
        let Passed {
            backend,
            ticket,
            mut request,
            host,
            held,
            ..
        } = passed;
        request.headers_mut().remove(LAST_HOP);
        if let Some(keys) = &backend.keys {
            keys.strip(request.headers_mut());
        }
        // A request body with a known length is an upload; a body without a known length may be an interactive stream
        // that pauses.
        let request = match request.body().size_hint().exact() {
            Some(_) => request.map(|body| body.with_patience(self.body_pause)),
            None => request,
        };
        let to = Destination { id, port, host };
        backend.proxy.pass(request, &to, held, ticket).await
    }

    async fn control<H>(&self, passed: Passed<R, H>) -> Response<Body> {
        let Passed {
            backend,
            ticket,
            request,
            peer,
            ..
        } = passed;
        // An upload may take an hour and changes no sandbox, so a handover does not wait for it.
        let _ticket = (!is_build_upload(&request)).then_some(ticket);
        let pause = self.body_pause;
        let mut request = request.map(|body| Body::new(body.with_patience(pause)));
        request.headers_mut().remove(LAST_HOP);
        request.extensions_mut().insert(ConnectInfo(peer));
        match backend.control.call(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        }
    }
}

/// A request that has passed the gate, and the connection that it came from.
struct Passed<R, H> {
    backend: Arc<Backend<R>>,
    ticket: Ticket<R>,
    request: Request<Upload>,
    /// The client, also if another node has forwarded its request.
    peer: SocketAddr,
    host: String,
    /// Kept until an upgraded connection ends.
    held: H,
}

impl<R: Routes, H: Send + 'static> Passed<R, H> {
    /// The other node that serves this sandbox, if this one does not.
    async fn elsewhere(&self, id: &SandboxId) -> Result<Option<NodeId>, Refusal> {
        let Some(side) = &self.backend.cluster else {
            return Ok(None);
        };
        side.moves.settled(id).await;
        if self.backend.proxy.routes().has(id).await {
            Ok(None)
        } else if is_forwarded(&self.request) {
            Ok(side.further(id, &self.request))
        } else {
            side.place(id)
        }
    }

    async fn forward(self, node: &NodeId) -> Result<Answered, Refusal> {
        drop(self.ticket);
        let side = self.backend.cluster.as_ref().ok_or(Refusal::NotMember)?;
        let forwarded = side
            .peers
            .forward(node, self.request, self.peer, &self.host, self.held);
        Ok(Answered::Successor(forwarded.await?))
    }
}

/// Whether another node has forwarded the request.
fn is_forwarded(request: &Request<Upload>) -> bool {
    request.extensions().get::<Arc<Peer>>().is_some()
}

/// The kind of a request on the cluster listener.
enum Entered {
    /// A request of the node itself.
    Question,
    /// A forwarded request of this client.
    Forwarded(SocketAddr),
}

impl ClusterSide {
    /// Checks that the peer is a member, and marks the request as forwarded.
    fn enter(
        &self,
        request: &mut Request<Upload>,
        node: &Arc<Peer>,
        address: SocketAddr,
    ) -> Result<Entered, Refusal> {
        let path = request.uri().path();
        if path == wire::JOIN {
            return Ok(Entered::Question);
        }
        self.peers.member(node).ok_or(Refusal::NotMember)?;
        if path.starts_with(wire::PREFIX) {
            return Ok(Entered::Question);
        }
        let client = request.headers_mut().remove(CLIENT);
        let client = client.and_then(|value| value.to_str().ok()?.parse().ok());
        request.extensions_mut().insert(Arc::clone(node));
        Ok(Entered::Forwarded(client.unwrap_or(address)))
    }

    async fn question(&self, request: Request<Upload>, node: Arc<Peer>) -> Response<Body> {
        let mut request = request.map(|body| Body::new(body.with_patience(BODY_PAUSE)));
        request.extensions_mut().insert(node);
        match self.internal.call(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        }
    }

    /// Where to forward a forwarded request whose sandbox is not here: once more to another node, if the sandbox has
    /// moved.
    fn further(&self, id: &SandboxId, request: &Request<Upload>) -> Option<NodeId> {
        let is_last = request.headers().contains_key(LAST_HOP);
        self.peers.moved(id).filter(|_| !is_last)
    }

    fn place(&self, id: &SandboxId) -> Result<Option<NodeId>, Refusal> {
        match self.peers.find(id) {
            Place::Here => Ok(None),
            Place::Node(node) => Ok(Some(node)),
            Place::Away(node) => Err(self.peers.away(&node, id)),
        }
    }

    /// The node of the sandbox whose token signed a file URL.
    async fn signer<R: Routes>(
        &self,
        proxy: &Proxy<R>,
        request: &Request<Upload>,
        operation: &'static str,
    ) -> Result<Place, Refusal> {
        let query = request.uri().query().unwrap_or_default();
        if proxy
            .routes()
            .find_by_signature(query, operation)
            .await
            .is_some()
        {
            return Ok(Place::Here);
        }
        self.peers.spend_keyless()?;
        let Some((node, _)) = self.peers.signer(query, operation).await else {
            return Ok(Place::Here);
        };
        self.peers.refund_keyless();
        Ok(Place::Node(node))
    }
}

/// Whether this is a load balancer's health check without a `Host` field, which HTTP/1.0 permits.
fn is_plain_health_check<B>(request: &Request<B>) -> bool {
    request.version() == Version::HTTP_10
        && request.uri() == "/health"
        && !request.headers().contains_key(header::HOST)
}

/// Tells nginx, and other reverse proxies that read the same field, not to buffer a response of unknown length, because
/// it may be a stream. A program in a sandbox can override this.
fn mark_stream(response: &mut Response<Body>) {
    let is_switched = response.status() == StatusCode::SWITCHING_PROTOCOLS;
    if !is_switched && response.body().size_hint().exact().is_none() {
        let entry = response.headers_mut().entry(BUFFERING);
        entry.or_insert(HeaderValue::from_static("no"));
    }
}

/// Why a signed file URL matches no sandbox.
fn no_signer(query: &str) -> Refusal {
    let error = check_signed(query).err();
    error.unwrap_or(SignatureError::Invalid).into()
}

/// Whether the request uploads files for a build of a template.
fn is_build_upload<B>(request: &Request<B>) -> bool {
    let path = request.uri().path();
    request.method() == Method::PUT && path.starts_with("/templates/") && path.contains("/files/")
}

/// Refuses CONNECT and requests with ambiguous body lengths, before they reach a sandbox or the control plane.
fn check<B>(request: &Request<B>) -> Result<(), Refusal> {
    if request.method() == Method::CONNECT {
        return Err(Refusal::Method);
    }
    check_framing(request.version(), request.headers())
}

/// Contradictory body lengths allow request smuggling (RFC 9112, 6.1).
fn check_framing(version: Version, headers: &HeaderMap) -> Result<(), Refusal> {
    let codings = headers.get_all(header::TRANSFER_ENCODING).iter().count();
    let lengths = headers.get_all(header::CONTENT_LENGTH).iter().count();
    if codings > 0 && (lengths > 0 || version != Version::HTTP_11) {
        return Err(Refusal::Malformed("the body length is ambiguous"));
    }
    if codings > 1 || lengths > 1 {
        Err(Refusal::Malformed("the body length is given twice"))
    } else {
        Ok(())
    }
}
