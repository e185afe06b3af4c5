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
use envd::ENVD_PORT;
use hyper::body::{Body as _, Incoming};
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use model::SandboxId;

use super::Came;
use super::forward;
use super::gate::{Gate, Passage, Recipient};
use super::guesses::GuessLimiter;
use super::limits::{BODY_PAUSE, Limits};
use crate::auth::Authenticator;
use crate::peers::{CLIENT, LAST_HOP, Peer, Peers, Place, internal, moves::Moves};
use crate::proxy::{
    Destination, Form, Hosts, Origin, Proxy, Refusal, Routes, Target, Upload, by_path, host,
    isolate,
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
        let target = self.hosts.target(request.uri(), request.headers());
        let operation = signed_operation(&request);
        let by_path = match target {
            Ok(Target::Control) => by_path(request.uri()),
            Ok(_) | Err(_) => None,
        };
        let passage = match target {
            Ok(Target::Control) if operation.is_none() && by_path.is_none() => Passage::Control,
            Ok(_) | Err(_) => Passage::Traffic,
        };
        let (recipient, ticket) = self.gate.pass(passage).await;
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
                        if internal::is_long(request.uri().path()) {
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
        let guess = match (&target, &operation) {
            (Ok(Target::Control), Some(Ok(_))) => Some(self.guesses.take(peer, request.headers())?),
            (Ok(_) | Err(_), _) => None,
        };
        let is_forwarded = request.extensions().get::<Arc<Peer>>().is_some();
        if let Some(side) = &backend.cluster {
            let id = match (&by_path, &target) {
                (Some(Ok(found)), _) => Some(found.id.clone()),
                (None, Ok(Target::Sandbox { id, .. })) => Some(id.clone()),
                (None | Some(Err(_)), _) => None,
            };
            if let Some(id) = &id {
                side.moves.settled(id).await;
            }
            let place = match (id, &operation) {
                (Some(id), _) if backend.proxy.routes().has(&id).await => Place::Here,
                (Some(id), _) if is_forwarded => side.further(&id, &request),
                (None, _) if is_forwarded => Place::Here,
                (Some(id), _) => side.place(&id)?,
                (None, Some(Ok(operation))) if matches!(target, Ok(Target::Control)) => {
                    side.signer(&backend.proxy, &request, operation).await?
                }
                (None, _) => Place::Here,
            };
            if let Place::Node(node) = place {
                drop(ticket);
                if let Some(guess) = guess {
                    guess.forgive();
                }
                let forwarded = side.peers.forward(&node, request, peer, &host, held);
                return Ok(Answered::Successor(forwarded.await?));
            }
        }
        request.headers_mut().remove(LAST_HOP);
        if let Some(found) = by_path {
            let found = found?;
            let to = Destination {
                id: found.id,
                port: found.port,
                host,
            };
            *request.uri_mut() = found.uri;
            let mut response = self.sandbox(&backend, request, &to, held, ticket).await?;
            let origin = if self.hosts.are_strict() {
                Origin::Opaque
            } else {
                Origin::Shared
            };
            isolate(response.headers_mut(), origin, Some(&found.prefix));
            return Ok(Answered::Sandbox(response));
        }
        let target = target?;
        let is_signed = operation.is_some() && matches!(target, Target::Control);
        let to = match (target, operation) {
            (Target::Sandbox { id, port }, _) => Destination { id, port, host },
            (Target::Control, None) => {
                if is_build_upload(&request) {
                    // An upload may take an hour and changes no sandbox, so a handover does not wait for it.
                    drop(ticket);
                }
                let response = self.control(&backend, request, peer).await;
                return Ok(Answered::Control(response));
            }
            // A signed file URL that names no sandbox refers to the sandbox whose token signed it.
            (Target::Control, Some(operation)) => {
                let operation = operation?;
                let query = request.uri().query().unwrap_or_default();
                let found = backend.proxy.routes().find_by_signature(query, operation);
                let id = found.await.ok_or_else(|| no_signer(query))?;
                if let Some(guess) = guess {
                    guess.forgive();
                }
                let port = ENVD_PORT;
                Destination { id, port, host }
            }
        };
        let is_download = is_signed && request.method() == Method::GET;
        let mut response = self.sandbox(&backend, request, &to, held, ticket).await?;
        if is_signed {
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
        }
        Ok(Answered::Sandbox(response))
    }

    async fn sandbox(
        &self,
        backend: &Backend<R>,
        mut request: Request<Upload>,
        to: &Destination,
        held: impl Send + 'static,
        ticket: impl Send,
    ) -> Result<Response<Body>, Refusal> {
        if let Some(keys) = &backend.keys {
            keys.strip(request.headers_mut());
        }
        // A request body with a known length is an upload; a body without a known length may be an interactive stream
        // that pauses.
        let request = match request.body().size_hint().exact() {
            Some(_) => request.map(|body| body.with_patience(self.body_pause)),
            None => request,
        };
        backend.proxy.pass(request, to, held, ticket).await
    }

    async fn control(
        &self,
        backend: &Backend<R>,
        request: Request<Upload>,
        peer: SocketAddr,
    ) -> Response<Body> {
        let pause = self.body_pause;
        let mut request = request.map(|body| Body::new(body.with_patience(pause)));
        request.extensions_mut().insert(ConnectInfo(peer));
        match backend.control.call(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        }
    }
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
        if path == internal::JOIN {
            return Ok(Entered::Question);
        }
        self.peers.member(node).ok_or(Refusal::NotMember)?;
        if path.starts_with(internal::PREFIX) {
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
    fn further(&self, id: &SandboxId, request: &Request<Upload>) -> Place {
        let is_last = request.headers().contains_key(LAST_HOP);
        match self.peers.moved(id).filter(|_| !is_last) {
            Some(node) => Place::Node(node),
            None => Place::Here,
        }
    }

    fn place(&self, id: &SandboxId) -> Result<Place, Refusal> {
        match self.peers.find(id) {
            Place::Away(node) => Err(self.peers.away(&node, id)),
            place => Ok(place),
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

/// The operation that the signature of a signed file URL covers. `None`: the URL is not a signed file URL.
fn signed_operation<B>(request: &Request<B>) -> Option<Result<&'static str, Refusal>> {
    let query = request.uri().query().unwrap_or_default();
    let is_signed = query.split('&').any(|pair| pair.starts_with("signature="));
    if request.uri().path() != "/files" || !is_signed {
        return None;
    }
    Some(match *request.method() {
        Method::GET | Method::HEAD => Ok("read"),
        Method::POST | Method::PUT => Ok("write"),
        _ => Err(Refusal::Method),
    })
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
