//! Distribution of control-plane requests over the nodes of a cluster. A server without a cluster does not use this
//! layer.
//!
//! A create is sent to nodes in the order of [`cluster::place`] until one accepts it. Each node's pool decides. A
//! request for a sandbox goes to its node, and a request for a template or a build to a node that has it. Lists are
//! requested from all nodes and merged. A request that another node has forwarded is served here, whatever it refers
//! to.

mod lists;

use std::{collections::BTreeSet, net::SocketAddr, sync::Arc};

use axum::{
    body::{Body, Bytes},
    extract::{ConnectInfo, RawPathParams, Request, State, rejection::RawPathParamsRejection},
    middleware::Next,
    response::{IntoResponse, Response},
};
use cluster::{Needs, NodeId, TemplateId};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::{
    HeaderMap, StatusCode,
    header::{HeaderName, HeaderValue},
    http::request::Parts,
};
use model::SandboxId;
use serde::Deserialize;

use super::{app::App, body::MAX_BODY, error::ApiError, guard::Access};
use crate::{
    peers::{LAST_HOP, Peer, PeerError, Peers, Place, published_name},
    proxy::{Form, Refusal, host},
};
pub(super) use lists::{Merge, Merging};

/// The node that created a sandbox.
const NODE: HeaderName = HeaderName::from_static("x-cube-node");
/// Maximum number of nodes that one create may try.
const TRIES: usize = 4;
/// Maximum size of one node's list in bytes.
const MAX_LIST: usize = 16 << 20;
/// Assumed memory of a sandbox, because its template may be unknown here.
const MEMORY_MIB: u64 = 512;

/// How a route is distributed over the nodes of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spread {
    /// Served by the node that received it.
    Own,
    Create,
    /// The sandbox is the path's first parameter.
    BySandbox,
    /// The template is the path's first parameter. If the route needs no key, lookups on other nodes are counted.
    ByTemplate(ServedBy),
    /// The template is in the body.
    ByBody,
    /// Like `ByBody`: requests a build, and creates its template if necessary.
    NewTemplate,
    List(Merge),
}

/// The nodes that can serve a request for a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServedBy {
    /// Only the template's home, if it has one.
    Home,
    /// Any node with a copy can serve it. Removals are announced to all nodes.
    AnyCopy,
}

/// The layer of one route.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    pub(super) app: App,
    pub(super) peers: Peers,
    pub(super) spread: Spread,
    pub(super) access: Access,
}

/// Forwards a request to the node that serves it.
pub(super) async fn layer(
    State(layer): State<Layer>,
    parameters: Result<RawPathParams, RawPathParamsRejection>,
    request: Request,
    next: Next,
) -> Response {
    let asked = Asked::of(&request);
    let parameters = parameters.ok();
    let first = parameters.as_ref().and_then(|all| all.iter().next());
    let first = first.map(|(_, value)| value);
    let id = first.filter(|_| layer.spread == Spread::BySandbox);
    let id = id.and_then(|text| text.parse().ok());
    if request.extensions().get::<Arc<Peer>>().is_some() {
        return layer.forwarded(id, asked, request, next).await;
    }
    match layer.spread {
        Spread::Own => next.run(request).await,
        Spread::Create => create(&layer.app, &layer.peers, asked, request, next).await,
        Spread::BySandbox => layer.of_sandbox(id, asked, request, next).await,
        Spread::ByTemplate(_) => {
            let name = first.map(str::to_owned);
            if layer.access == Access::Public
                && let Some(name) = &name
                && !layer.app.has_template(name).await
                && let Err(refusal) = layer.peers.spend_keyless()
            {
                return refusal.answer(asked.form);
            }
            layer.of_template(name, asked, request, next).await
        }
        Spread::ByBody | Spread::NewTemplate => match buffered(request).await {
            Ok((parts, body)) => {
                let name = serde_json::from_slice::<Named>(&body).unwrap_or_default();
                let name = name.target.or(name.name).or(name.alias);
                let request = Request::from_parts(parts, Body::from(body));
                layer.of_template(name, asked, request, next).await
            }
            Err(why) => why.into_response(),
        },
        Spread::List(merge) => lists::lists(&layer.peers, merge, asked, request, next).await,
    }
}

/// Parameters of a request to forward.
struct Asked {
    from: SocketAddr,
    host: String,
    form: Form,
}

impl Asked {
    fn of(request: &Request) -> Self {
        let from = request.extensions().get::<ConnectInfo<SocketAddr>>();
        let unknown = SocketAddr::from(([0, 0, 0, 0], 0));
        Self {
            from: from.map_or(unknown, |from| from.0),
            host: host(request.uri(), request.headers()).unwrap_or_default(),
            form: Form::wanted(request.headers()),
        }
    }

    fn failed(&self, why: &PeerError) -> Response {
        let why = model::chain(why);
        tracing::warn!(why, "cannot forward a request to another node");
        Refusal::NodeFailed { why }.answer(self.form)
    }
}

/// The template in a body, under the keys used by its route.
#[derive(Default, Deserialize)]
struct Named {
    target: Option<String>,
    name: Option<String>,
    alias: Option<String>,
    #[serde(rename = "templateID")]
    template_id: Option<String>,
}

pub(super) async fn buffered(request: Request) -> Result<(Parts, Bytes), ApiError> {
    let (parts, body) = request.into_parts();
    match Limited::new(body, MAX_BODY).collect().await {
        Ok(collected) => Ok((parts, collected.to_bytes())),
        Err(why) if why.is::<LengthLimitError>() => Err(ApiError::TooLarge(MAX_BODY)),
        Err(why) => Err(ApiError::BadRequest(format!(
            "cannot read the request body: {why}"
        ))),
    }
}

/// Tries nodes until one accepts the create. Body and header fields are the client's.
async fn create(app: &App, peers: &Peers, asked: Asked, request: Request, next: Next) -> Response {
    let (parts, body) = match buffered(request).await {
        Ok(both) => both,
        Err(why) => return why.into_response(),
    };
    let repeat = |extended: bool| {
        let mut copy = Request::new(Body::from(body.clone()));
        *copy.method_mut() = parts.method.clone();
        *copy.uri_mut() = parts.uri.clone();
        *copy.headers_mut() = parts.headers.clone();
        if extended {
            *copy.extensions_mut() = parts.extensions.clone();
        }
        copy
    };
    let named: Named = serde_json::from_slice(&body).unwrap_or_default();
    let template = named.template_id.as_deref().and_then(published_name);
    let candidates = template.map(|template| peers.cluster().place(&needs(template)));
    let mut refused: Option<Response> = None;
    for candidate in candidates.into_iter().flatten().take(TRIES) {
        let node = candidate.node;
        let response = if node == *peers.this() {
            next.clone().run(repeat(true)).await
        } else {
            peers.cluster().sent(&node);
            let passed = peers.pass(&node, repeat(false), asked.from, &asked.host);
            match passed.await {
                Ok(response) => response,
                // The node may have created a sandbox nevertheless. It is in the list, and ends at its timeout.
                Err(why @ (PeerError::Unreachable { .. } | PeerError::Away { .. })) => {
                    tracing::warn!(why = %model::chain(&why), "cannot create a sandbox on this node: trying the next node");
                    refused.get_or_insert_with(|| asked.failed(&why));
                    continue;
                }
                // The node may have created the sandbox. It kills it, because the connection for the response is gone.
                Err(why) => return asked.failed(&why),
            }
        };
        if !is_refusal(response.status()) {
            return named_node(response, &node);
        }
        // Of several refusals, the client gets the one that a retry may overcome.
        if refused
            .as_ref()
            .is_none_or(|known| !is_transient(known.status()))
        {
            refused = Some(response);
        }
    }
    if let Some(refused) = refused
        && refused.status() != StatusCode::NOT_FOUND
    {
        return refused;
    }
    // No ready node has published the template, or a tag has moved. Names are published every second, so the client may
    // have this one from a newer state.
    if let Some(name) = named.template_id
        && !app.can_clone(&name).await
        && let Some(node) = peers.with_template(&name, true).await
    {
        let passed = peers.pass(&node, repeat(false), asked.from, &asked.host);
        return match passed.await {
            Ok(response) => named_node(response, &node),
            Err(why) => asked.failed(&why),
        };
    }
    next.run(repeat(true)).await
}

fn named_node(mut response: Response, node: &NodeId) -> Response {
    if let Ok(name) = HeaderValue::from_str(node.as_str()) {
        response.headers_mut().insert(NODE, name);
    }
    response
}

/// Whether another node may accept a create that this one refused: no room, no new sandboxes, no such template, or no
/// disk space.
fn is_refusal(status: StatusCode) -> bool {
    is_transient(status)
        || matches!(
            status,
            StatusCode::NOT_FOUND | StatusCode::INSUFFICIENT_STORAGE
        )
}

fn is_transient(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
    )
}

fn needs(template: TemplateId) -> Needs {
    Needs {
        template,
        content: None,
        memory_mib: MEMORY_MIB,
        platform: None,
        features: BTreeSet::new(),
        except: BTreeSet::new(),
    }
}

impl Layer {
    async fn of_sandbox(
        &self,
        id: Option<SandboxId>,
        asked: Asked,
        request: Request,
        next: Next,
    ) -> Response {
        let Some(id) = id else {
            return next.run(request).await;
        };
        self.app.settled(&id).await;
        if self.app.registry.has(&id).await {
            return next.run(request).await;
        }
        match self.peers.find(&id) {
            Place::Here => next.run(request).await,
            Place::Node(node) => pass(&self.peers, &node, asked, request).await,
            Place::Away(node) => self.peers.away(&node, &id).answer(asked.form),
        }
    }

    /// Serves a request that another node has forwarded, or forwards it again if its sandbox has moved since.
    async fn forwarded(
        &self,
        id: Option<SandboxId>,
        asked: Asked,
        request: Request,
        next: Next,
    ) -> Response {
        if let Some(id) = id {
            self.app.settled(&id).await;
            let is_last =
                request.headers().contains_key(LAST_HOP) || self.app.registry.has(&id).await;
            if let Some(node) = self.peers.moved(&id).filter(|_| !is_last) {
                return pass(&self.peers, &node, asked, request).await;
            }
        }
        next.run(request).await
    }

    async fn of_template(
        &self,
        name: Option<String>,
        asked: Asked,
        request: Request,
        next: Next,
    ) -> Response {
        let (app, peers) = (&self.app, &self.peers);
        let Some(name) = name else {
            return next.run(request).await;
        };
        let is_by_copies = self.spread == Spread::ByTemplate(ServedBy::AnyCopy);
        if app.has_template(&name).await {
            return match app.home_elsewhere(&name) {
                Some(home) if peers.is_there(&home) => pass(peers, &home, asked, request).await,
                Some(home) if !is_by_copies => {
                    let name = name.chars().take(200).collect();
                    ApiError::HomeAway(name, home.to_string()).into_response()
                }
                Some(_) | None => next.run(request).await,
            };
        }
        let mut node = peers.with_template(&name, is_by_copies).await;
        if node.is_none() && self.spread == Spread::NewTemplate && !app.node.is_open() {
            // A cordoned node cannot create sandboxes from its builds, and a draining one is about to become empty.
            node = peers.open_node();
        }
        match node {
            Some(node) => pass(peers, &node, asked, request).await,
            None => next.run(request).await,
        }
    }
}

async fn pass(peers: &Peers, node: &NodeId, asked: Asked, request: Request) -> Response {
    match peers.pass(node, request, asked.from, &asked.host).await {
        Ok(response) => response,
        Err(why) => asked.failed(&why),
    }
}

/// A complete response of one node, to a list or a create.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    headers: HeaderMap,
    pub(super) body: Bytes,
}

impl IntoResponse for Answer {
    fn into_response(self) -> Response {
        (self.status, self.headers, self.body).into_response()
    }
}

pub(super) async fn read(response: Response) -> Result<Answer, String> {
    let (parts, body) = response.into_parts();
    let body = Limited::new(body, MAX_LIST).collect().await;
    let body = body.map_err(|why| why.to_string())?.to_bytes();
    Ok(Answer {
        status: parts.status,
        headers: parts.headers,
        body,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_refusals_go_to_the_next_node() {
        for status in [429, 503, 404, 507] {
            assert!(
                is_refusal(StatusCode::from_u16(status).unwrap()),
                "{status}"
            );
        }
        for status in [201, 400, 401, 403, 409, 500, 501, 502] {
            assert!(
                !is_refusal(StatusCode::from_u16(status).unwrap()),
                "{status}"
            );
        }
    }
}
