//! Decides whether a request goes to a sandbox or to the control plane.

use std::net::SocketAddr;
use std::time::Duration;

use api_types::envd::ENVD_PORT;
use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::{HeaderMap, Method, Request, Response, Version, header};
use hyper::body::{Body as _, Incoming};
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;

use super::limits::BODY_PAUSE;
use crate::proxy::{Destination, Form, Hosts, Proxy, Refusal, Routes, Target, Upload, host};

/// Routes each request. Cheap to clone: every request gets a clone.
#[derive(Clone, Debug)]
pub struct Dispatch<R> {
    hosts: Hosts,
    proxy: Proxy<R>,
    control: TowerToHyperService<Router>,
    body_pause: Duration,
}

/// The origin of a response. A sandbox may still read the request body while it responds; the control plane never does.
enum Answered {
    BySandbox(Response<Body>),
    ByControl(Response<Body>),
}

impl<R: Routes> Dispatch<R> {
    /// Requests for sandboxes go to `proxy`, all others to `control`.
    pub fn new(hosts: Hosts, proxy: Proxy<R>, control: Router) -> Self {
        Self {
            hosts,
            proxy,
            control: TowerToHyperService::new(control),
            body_pause: BODY_PAUSE,
        }
    }

    pub(super) fn set_body_pause(&mut self, pause: Duration) {
        self.body_pause = pause;
    }

    pub(super) fn proxy(&self) -> &Proxy<R> {
        &self.proxy
    }

    /// Answers a request from `peer`. If the response upgrades the connection, `held` is kept until the upgraded
    /// connection ends.
    pub(super) async fn answer(
        &self,
        request: Request<Incoming>,
        peer: SocketAddr,
        held: impl Send + 'static,
    ) -> Response<Body> {
        let form = Form::wanted(request.headers());
        // A client that sent `Expect: 100-continue` gets the final response instead of `100 Continue` and does not send
        // the body.
        let waits = request.headers().contains_key(header::EXPECT);
        let request = request.map(Upload::new);
        let progress = request.body().progress();
        let (response, is_final) = match self.decide(request, peer, held).await {
            Ok(Answered::BySandbox(response)) => (response, false),
            Ok(Answered::ByControl(response)) => (response, true),
            Err(refusal) => (refusal.answer(form), true),
        };
        if is_final && !waits {
            progress.drop_rest().await;
        }
        response
    }

    async fn decide(
        &self,
        request: Request<Upload>,
        peer: SocketAddr,
        held: impl Send + 'static,
    ) -> Result<Answered, Refusal> {
        check(&request)?;
        let target = self.hosts.target(request.uri(), request.headers())?;
        let host = host(request.uri(), request.headers())?;
        let to = match target {
            Target::Sandbox { id, port } => Some(Destination { id, port, host }),
            Target::Control => self.signed(&request, host).await?,
        };
        let Some(to) = to else {
            let response = self.control(request, peer).await;
            return Ok(Answered::ByControl(response));
        };
        // A request body with a known length is an upload; a body without a known length may be an interactive stream
        // that pauses.
        let request = match request.body().size_hint().exact() {
            Some(_) => request.map(|body| body.with_patience(self.body_pause)),
            None => request,
        };
        let response = self.proxy.pass(request, &to, held).await?;
        Ok(Answered::BySandbox(response))
    }

    /// Finds the sandbox for a signed file URL that does not name a sandbox: the sandbox whose token signed the URL.
    /// `None`: the URL is not a signed file URL.
    async fn signed<B>(
        &self,
        request: &Request<B>,
        host: String,
    ) -> Result<Option<Destination>, Refusal> {
        let query = request.uri().query().unwrap_or_default();
        let is_signed = query.split('&').any(|pair| pair.starts_with("signature="));
        if request.uri().path() != "/files" || !is_signed {
            return Ok(None);
        }
        let operation = match *request.method() {
            Method::GET | Method::HEAD => "read",
            Method::POST | Method::PUT => "write",
            _ => return Err(Refusal::Method),
        };
        let found = self.proxy.routes().find_by_signature(query, operation);
        let id = found.await.ok_or(Refusal::Signature)?;
        let port = ENVD_PORT;
        Ok(Some(Destination { id, port, host }))
    }

    async fn control(&self, request: Request<Upload>, peer: SocketAddr) -> Response<Body> {
        let pause = self.body_pause;
        let mut request = request.map(|body| Body::new(body.with_patience(pause)));
        request.extensions_mut().insert(ConnectInfo(peer));
        match self.control.call(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        }
    }
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
        return Err(Refusal::Malformed("the length of the body is ambiguous"));
    }
    if codings > 1 || lengths > 1 {
        Err(Refusal::Malformed("the length of the body is given twice"))
    } else {
        Ok(())
    }
}
