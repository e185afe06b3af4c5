//! Distribution of control-plane requests over the nodes of a cluster. A server without a cluster does not use this
//! layer.
//!
//! A create is sent to nodes in the order of [`cluster::place`] until one accepts it. Each node's pool decides. A
//! request for a sandbox goes to its node, and a request for a template or a build to a node that has it. Lists are
//! requested from all nodes and merged. A request that another node has forwarded is served here, whatever it refers
//! to.

use std::{collections::BTreeSet, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Json,
    body::{Body, Bytes},
    extract::{ConnectInfo, Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use cluster::{Needs, NodeId, TemplateId};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::{
    HeaderMap, Method, StatusCode, Uri,
    header::{CONTENT_LENGTH, HeaderName, HeaderValue},
    http::request::Parts,
};
use model::SandboxId;
use serde::Deserialize;
use serde_json::Value;

use super::{
    app::App,
    body::MAX_BODY,
    endpoint::Access,
    error::ApiError,
    merge::{self, Part},
    paging::{Page, Position},
    query::Query,
};
use crate::{
    peers::{LAST_HOP, Peer, PeerError, Peers, Place},
    proxy::{Form, Refusal, host},
};

/// Positions of the items of a page, for the node that merges pages.
pub(super) const POSITIONS: HeaderName = HeaderName::from_static("x-cube-positions");
/// Nodes whose items are missing in a merged list.
const MISSING: HeaderName = HeaderName::from_static("x-cube-missing");
/// The node that created a sandbox.
const NODE: HeaderName = HeaderName::from_static("x-cube-node");
/// Maximum number of nodes that one create may try.
const TRIES: usize = 4;
/// Time limit for a node's response to a list.
const LIST: Duration = Duration::from_secs(5);
/// Maximum size of one node's list in bytes.
const MAX_LIST: usize = 16 << 20;
/// The route that requests a build, and creates its template if necessary.
const NEW_TEMPLATE: &str = "/v3/templates";
/// The paged list of templates.
const PAGED_TEMPLATES: &str = "/v2/templates";
/// Assumed memory of a sandbox, because its template may be unknown here.
const MEMORY_MIB: u64 = 512;

/// How a route is distributed over nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spread {
    /// Served by the node that received it.
    Own,
    Create,
    OfSandbox,
    /// The template is in the path.
    OfTemplate,
    /// Like `OfTemplate`, without a key: lookups on the other nodes are counted.
    Keyless,
    /// The template is in the body.
    ByBody,
    /// A page of sandboxes or snapshots.
    Pages,
    /// The older list of sandboxes.
    Latest,
    Templates,
    Metrics,
}

/// How the route with this method (in lower case) and pattern is distributed.
pub(super) fn spread_of(method: &str, path: &str) -> Spread {
    match (method, path) {
        ("post", "/v2/sandboxes" | "/sandboxes") => Spread::Create,
        ("get", "/v2/sandboxes" | "/snapshots") => Spread::Pages,
        ("get", "/sandboxes") => Spread::Latest,
        ("get", "/sandboxes/metrics") => Spread::Metrics,
        ("get", "/templates" | PAGED_TEMPLATES) => Spread::Templates,
        (_, "/templates/tags" | NEW_TEMPLATE) => Spread::ByBody,
        (_, path) if path.contains("/sandboxes/{id}") => Spread::OfSandbox,
        (_, path) if path.contains("/templates/") => Spread::OfTemplate,
        _ => Spread::Own,
    }
}

/// Whether the route needs this layer.
pub(super) fn is_spread(method: &str, path: &str, access: Access) -> Option<Spread> {
    // Volumes and other unsupported routes respond with 501 on every node.
    let spread = spread_of(method, path);
    match (access, spread) {
        (_, Spread::Own) => None,
        (Access::Public, Spread::OfTemplate) => Some(Spread::Keyless),
        (Access::Public, _) => None,
        (Access::Key(_), spread) => Some(spread),
    }
}

/// Forwards a request to the node that serves it.
pub(super) async fn layer(
    State((app, peers, spread)): State<(App, Peers, Spread)>,
    request: Request,
    next: Next,
) -> Response {
    let asked = Asked::of(&request);
    if request.extensions().get::<Arc<Peer>>().is_some() {
        return forwarded(&app, &peers, spread, asked, request, next).await;
    }
    match spread {
        Spread::Own => next.run(request).await,
        Spread::Create => create(&app, &peers, asked, request, next).await,
        Spread::OfSandbox => of_sandbox(&app, &peers, asked, request, next).await,
        Spread::OfTemplate => {
            let name = template_in(request.uri().path());
            of_template(&app, &peers, name, asked, request, next).await
        }
        Spread::Keyless => {
            let name = template_in(request.uri().path());
            if let Some(name) = &name
                && !app.has_template(name).await
                && let Err(refusal) = peers.spend_keyless()
            {
                return refusal.answer(asked.form);
            }
            of_template(&app, &peers, name, asked, request, next).await
        }
        Spread::ByBody => match buffered(request).await {
            Ok((parts, body)) => {
                let name = serde_json::from_slice::<Named>(&body).unwrap_or_default();
                let name = name.target.or(name.name).or(name.alias);
                let request = Request::from_parts(parts, Body::from(body));
                of_template(&app, &peers, name, asked, request, next).await
            }
            Err(why) => why.into_response(),
        },
        Spread::Pages | Spread::Latest | Spread::Templates | Spread::Metrics => {
            lists(&peers, spread, asked, request, next).await
        }
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
    let template = named.template_id.as_deref().and_then(wanted);
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

/// The name under which nodes publish a template: without the default tag.
pub(crate) fn wanted(reference: &str) -> Option<TemplateId> {
    let name = reference.strip_suffix(":default").unwrap_or(reference);
    name.parse().ok()
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

/// The sandbox id in a path, or `None` if the segment is not an id.
fn sandbox_in(path: &str) -> Option<SandboxId> {
    let mut segments = path
        .split('/')
        .skip_while(|segment| *segment != "sandboxes");
    segments.nth(1)?.parse().ok()
}

async fn of_sandbox(
    app: &App,
    peers: &Peers,
    asked: Asked,
    request: Request,
    next: Next,
) -> Response {
    let Some(id) = sandbox_in(request.uri().path()) else {
        return next.run(request).await;
    };
    app.settled(&id).await;
    if app.registry.has(&id).await {
        return next.run(request).await;
    }
    match peers.find(&id) {
        Place::Here => next.run(request).await,
        Place::Node(node) => pass(peers, &node, asked, request).await,
        Place::Away(node) => peers.away(&node, &id).answer(asked.form),
    }
}

/// Serves a request that another node has forwarded, or forwards it again if its sandbox has moved since.
async fn forwarded(
    app: &App,
    peers: &Peers,
    spread: Spread,
    asked: Asked,
    request: Request,
    next: Next,
) -> Response {
    let id = sandbox_in(request.uri().path()).filter(|_| spread == Spread::OfSandbox);
    if let Some(id) = id {
        app.settled(&id).await;
        let is_last = request.headers().contains_key(LAST_HOP) || app.registry.has(&id).await;
        if let Some(node) = peers.moved(&id).filter(|_| !is_last) {
            return pass(peers, &node, asked, request).await;
        }
    }
    next.run(request).await
}

async fn pass(peers: &Peers, node: &NodeId, asked: Asked, request: Request) -> Response {
    match peers.pass(node, request, asked.from, &asked.host).await {
        Ok(response) => response,
        Err(why) => asked.failed(&why),
    }
}

/// The template in a path, percent-decoded.
fn template_in(path: &str) -> Option<String> {
    let mut segments = path
        .split('/')
        .skip_while(|segment| *segment != "templates");
    let found = match segments.nth(1)? {
        "aliases" => segments.next()?,
        segment => segment,
    };
    let decoded = percent_encoding::percent_decode_str(found).decode_utf8();
    decoded.ok().map(|name| name.into_owned())
}

async fn of_template(
    app: &App,
    peers: &Peers,
    name: Option<String>,
    asked: Asked,
    request: Request,
    next: Next,
) -> Response {
    let Some(name) = name else {
        return next.run(request).await;
    };
    let is_by_copies = is_served_by_copies(request.method(), request.uri().path());
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
    if node.is_none() && request.uri().path() == NEW_TEMPLATE && !app.node.is_open() {
        // A cordoned node cannot create sandboxes from its builds, and a draining one is about to become empty.
        node = peers.open_node();
    }
    match node {
        Some(node) => pass(peers, &node, asked, request).await,
        None => next.run(request).await,
    }
}

/// Whether a template request can be served without the template's home: reads, and removals, which all nodes are told
/// about.
fn is_served_by_copies(method: &Method, path: &str) -> bool {
    let mut segments = path.split('/').filter(|segment| !segment.is_empty());
    let is_template = segments.next() == Some("templates") && segments.count() == 1;
    let is_removal = *method == Method::DELETE && is_template && path != "/templates/tags";
    matches!(*method, Method::GET | Method::HEAD) || is_removal
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

/// Requests a list from all nodes and merges the responses. This node's response decides whether the request is valid.
async fn lists(
    peers: &Peers,
    spread: Spread,
    asked: Asked,
    request: Request,
    next: Next,
) -> Response {
    let (mut parts, _) = request.into_parts();
    let mut others = tokio::task::JoinSet::new();
    for node in peers.others() {
        let (peers, from, host) = (peers.clone(), asked.from, asked.host.clone());
        let request = get(&parts.uri, &parts.headers);
        others.spawn(async move {
            let answered = async {
                let response = peers.pass(&node, request, from, &host).await;
                let response = response.map_err(|why| model::chain(&why))?;
                read(response).await
            };
            let answer = tokio::time::timeout(LIST, answered).await;
            let answer = answer.unwrap_or_else(|_| Err("it did not respond in time".to_owned()));
            (node, answer)
        });
    }
    let uri = parts.uri.clone();
    // This node must send positions too.
    parts.extensions.insert(Merged);
    let own = next.run(Request::from_parts(parts, Body::empty())).await;
    if !own.status().is_success() {
        return own;
    }
    let own = match read(own).await {
        Ok(own) => own,
        Err(why) => return ApiError::Interrupted(why).into_response(),
    };
    let mut missing = missing(peers);
    let mut answers = vec![own];
    while let Some(done) = others.join_next().await {
        match done {
            Ok((_, Ok(answer))) if answer.status.is_success() => answers.push(answer),
            Ok((node, Ok(answer))) => {
                tracing::warn!(%node, status = %answer.status, "the items of a node are missing in a merged list: it refused the request");
                missing.insert(node.to_string());
            }
            Ok((node, Err(why))) => {
                tracing::warn!(%node, why, "the items of a node are missing in a merged list: it did not respond");
                missing.insert(node.to_string());
            }
            Err(_) => {}
        }
    }
    merged(spread, &uri, answers, &missing)
}

/// Marks requests whose response this node merges.
#[derive(Clone, Copy, Debug)]
pub(super) struct Merged;

/// Whether the response is merged with other nodes' responses, here or on the node that requested it.
#[derive(Debug)]
pub(super) struct Merging(bool);

impl<S: Sync> axum::extract::FromRequestParts<S> for Merging {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        let extensions = &parts.extensions;
        let is_merged = extensions.get::<Merged>().is_some();
        Ok(Self(is_merged || extensions.get::<Arc<Peer>>().is_some()))
    }
}

impl Merging {
    pub(super) fn is_wanted(&self) -> bool {
        self.0
    }

    /// Adds the positions of the items, if needed.
    pub(super) fn put(&self, headers: &mut HeaderMap, positions: impl FnOnce() -> Vec<Position>) {
        if self.0
            && let Ok(text) = HeaderValue::try_from(merge::write_positions(&positions()))
        {
            headers.insert(POSITIONS, text);
        }
    }
}

/// Members that are unreachable.
fn missing(peers: &Peers) -> BTreeSet<String> {
    let view = peers.cluster().view();
    let away = view.members.keys().filter(|n| !view.nodes.contains_key(*n));
    away.map(ToString::to_string).collect()
}

fn get(uri: &Uri, headers: &HeaderMap) -> Request {
    let mut request = Request::new(Body::empty());
    *request.method_mut() = Method::GET;
    *request.uri_mut() = uri.clone();
    *request.headers_mut() = headers.clone();
    request.headers_mut().remove(CONTENT_LENGTH);
    request
}

fn merged(spread: Spread, uri: &Uri, answers: Vec<Answer>, missing: &BTreeSet<String>) -> Response {
    let mut headers = HeaderMap::new();
    if let Some(names) = merge::missing(missing)
        && let Ok(names) = HeaderValue::try_from(names)
    {
        headers.insert(MISSING, names);
    }
    match merge_bodies(spread, uri, answers, &mut headers) {
        Ok(body) => (headers, Json(body)).into_response(),
        Err(why) => why.into_response(),
    }
}

fn merge_bodies(
    spread: Spread,
    uri: &Uri,
    answers: Vec<Answer>,
    headers: &mut HeaderMap,
) -> Result<Value, ApiError> {
    let malformed =
        |why: &str| ApiError::Interrupted(format!("a node sent a malformed list: {why}"));
    let items = |answer: &Answer| {
        let items = serde_json::from_slice::<Vec<Value>>(&answer.body);
        items.map_err(|why| malformed(&why.to_string()))
    };
    match spread {
        Spread::Pages => {
            let page = Page::of(&Query::parse(uri.query().unwrap_or_default()))?;
            let mut parts = Vec::new();
            let mut running: Option<u64> = None;
            for answer in &answers {
                let field = |name: &str| answer.headers.get(name)?.to_str().ok();
                if let Some(count) = field("x-total-running").and_then(|n| n.parse::<u64>().ok()) {
                    running = Some(running.unwrap_or(0) + count);
                }
                let positions = field(POSITIONS.as_str()).and_then(merge::read_positions);
                let (items, positions) = (items(answer)?, positions.unwrap_or_default());
                if items.len() != positions.len() {
                    return Err(malformed("its positions do not match"));
                }
                parts.push(Part {
                    items,
                    positions,
                    has_more: answer.headers.contains_key("x-next-token"),
                });
            }
            let (shown, token) = merge::page(&page, parts);
            super::paging::put_token(headers, token)?;
            if let Some(running) = running {
                headers.insert("x-total-running", HeaderValue::from(running));
            }
            Ok(Value::Array(shown))
        }
        Spread::Metrics => {
            let parts: Result<Vec<Value>, _> = answers
                .iter()
                .map(|answer| serde_json::from_slice(&answer.body))
                .collect();
            let parts = parts.map_err(|why| malformed(&why.to_string()))?;
            Ok(merge::metrics(parts))
        }
        _ => {
            let parts: Result<Vec<_>, _> = answers.iter().map(items).collect();
            if spread == Spread::Latest {
                return Ok(Value::Array(merge::latest_first(parts?)));
            }
            let mut all = merge::templates(parts?);
            if uri.path() == PAGED_TEMPLATES {
                let page = Page::of(&Query::parse(uri.query().unwrap_or_default()))?;
                let (shown, token) = merge::page_of_templates(&page, all);
                super::paging::put_token(headers, token)?;
                all = shown;
            }
            Ok(Value::Array(all))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_serve_reads_and_removals() {
        for (method, path, expected) in [
            (Method::GET, "/templates/x/builds/b/status", true),
            (Method::DELETE, "/templates/x", true),
            (Method::DELETE, "/templates/tags", false),
            (Method::POST, "/v3/templates", false),
            (Method::PATCH, "/v2/templates/x", false),
            (Method::POST, "/templates/x/redo", false),
        ] {
            assert_eq!(
                is_served_by_copies(&method, path),
                expected,
                "{method} {path}"
            );
        }
    }

    #[test]
    fn each_route_has_its_way() {
        let spread = |method, path| spread_of(method, path);
        assert_eq!(spread("post", "/v2/sandboxes"), Spread::Create);
        assert_eq!(spread("get", "/v2/sandboxes/{id}/logs"), Spread::OfSandbox);
        assert_eq!(spread("get", "/sandboxes/metrics"), Spread::Metrics);
        assert_eq!(
            spread("put", "/templates/{id}/files/{hash}"),
            Spread::OfTemplate
        );
        assert_eq!(spread("get", "/secrets"), Spread::Own);
        assert_eq!(spread("get", "/events/sandboxes/{id}"), Spread::OfSandbox);
        // Every route that refers to a sandbox or a template is covered, except the events of all sandboxes: each node
        // has its own.
        for endpoint in crate::control::endpoints() {
            let path = endpoint.path;
            let is_covered = spread_of(endpoint.method, path) != Spread::Own;
            let names = path.contains("sandboxes") || path.contains("templates");
            let wanted = (names || path == "/snapshots") && path != "/events/sandboxes";
            assert_eq!(is_covered, wanted, "{path}");
        }
    }

    #[test]
    fn paths_name_sandboxes_and_templates() {
        let id = "iabcdefghij012345678";
        assert!(sandbox_in(&format!("/v2/sandboxes/{id}/connect")).is_some());
        assert!(sandbox_in(&format!("/sandboxes/{id}")).is_some());
        assert!(sandbox_in("/sandboxes/metrics").is_none());
        assert_eq!(
            template_in("/templates/aliases/a%3Ab").as_deref(),
            Some("a:b")
        );
        assert_eq!(template_in("/v2/templates/x").as_deref(), Some("x"));
        assert_eq!(template_in("/templates"), None);
    }

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

    #[test]
    fn the_default_tag_names_the_template_itself() {
        assert_eq!(wanted("a:default"), wanted("a"));
        assert_ne!(wanted("a:x"), wanted("a"));
        assert_eq!(wanted("a/b"), None);
    }
}
