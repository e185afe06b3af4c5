//! Lists of all nodes, merged by the node that received the request.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use axum::{
    body::Body,
    extract::Request,
    middleware::Next,
    response::{IntoResponse, Response},
};
use hyper::{
    HeaderMap, Method, Uri,
    header::{CONTENT_LENGTH, HeaderName, HeaderValue},
    http::request::Parts,
};
use serde_json::Value;

use super::super::{
    error::ApiError,
    merge::{self, Part},
    paging::{Page, Position, put_token},
    query::Query,
};
use super::{Answer, Asked, read};
use crate::{
    json::Json,
    peers::{Peer, Peers},
};
use tasks::boxed;

/// Positions of the items of a page, for the node that merges pages.
const POSITIONS: HeaderName = HeaderName::from_static("x-cube-positions");
/// Nodes whose items are missing in a merged list.
const MISSING: HeaderName = HeaderName::from_static("x-cube-missing");
/// Time limit for a node's response to a list.
const LIST: Duration = Duration::from_secs(5);

/// How the lists of several nodes become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::control) enum Merge {
    /// A page of sandboxes or snapshots.
    Pages,
    /// The older list of sandboxes.
    Latest,
    Templates,
    TemplatePages,
    Metrics,
}

/// Requests a list from all nodes and merges the responses. This node's response decides whether the request is valid.
pub(super) async fn lists(
    peers: &Peers,
    merge: Merge,
    asked: Asked,
    request: Request,
    next: Next,
) -> Response {
    let (mut parts, _) = request.into_parts();
    let mut others = tokio::task::JoinSet::new();
    for node in peers.others() {
        let (peers, from, host) = (peers.clone(), asked.from, asked.host.clone());
        let request = get(&parts.uri, &parts.headers);
        others.spawn(boxed(async move {
            let answered = async {
                let response = peers.pass(&node, request, from, &host).await;
                let response = response.map_err(|why| model::chain(&why))?;
                read(response).await
            };
            let answer = tokio::time::timeout(LIST, answered).await;
            let answer = answer.unwrap_or_else(|_| Err("it did not respond in time".to_owned()));
            (node, answer)
        }));
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
    merged(merge, &uri, answers, &missing)
}

/// Marks requests whose response this node merges.
#[derive(Clone, Copy, Debug)]
struct Merged;

/// Whether the response is merged with other nodes' responses, here or on the node that requested it.
#[derive(Debug)]
pub(in crate::control) struct Merging(bool);

impl<S: Sync> axum::extract::FromRequestParts<S> for Merging {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        let extensions = &parts.extensions;
        let is_merged = extensions.get::<Merged>().is_some();
        Ok(Self(is_merged || extensions.get::<Arc<Peer>>().is_some()))
    }
}

impl Merging {
    pub(in crate::control) fn is_wanted(&self) -> bool {
        self.0
    }

    /// Adds the positions of the items, if needed.
    pub(in crate::control) fn put(
        &self,
        headers: &mut HeaderMap,
        positions: impl FnOnce() -> Vec<Position>,
    ) {
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

fn merged(merge: Merge, uri: &Uri, answers: Vec<Answer>, missing: &BTreeSet<String>) -> Response {
    let mut headers = HeaderMap::new();
    if let Some(names) = merge::missing(missing)
        && let Ok(names) = HeaderValue::try_from(names)
    {
        headers.insert(MISSING, names);
    }
    match merge_bodies(merge, uri, answers, &mut headers) {
        Ok(body) => (headers, Json(body)).into_response(),
        Err(why) => why.into_response(),
    }
}

fn merge_bodies(
    merge: Merge,
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
    let all = || answers.iter().map(items).collect::<Result<Vec<_>, _>>();
    let page = || Page::of(&Query::parse(uri.query().unwrap_or_default()));
    match merge {
        Merge::Pages => {
            let page = page()?;
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
            put_token(headers, token)?;
            if let Some(running) = running {
                headers.insert("x-total-running", HeaderValue::from(running));
            }
            Ok(Value::Array(shown))
        }
        Merge::Metrics => {
            let parts: Result<Vec<Value>, _> = answers
                .iter()
                .map(|answer| serde_json::from_slice(&answer.body))
                .collect();
            let parts = parts.map_err(|why| malformed(&why.to_string()))?;
            Ok(merge::metrics(parts))
        }
        Merge::Latest => Ok(Value::Array(merge::latest_first(all()?))),
        Merge::Templates => Ok(Value::Array(merge::templates(all()?))),
        Merge::TemplatePages => {
            let (shown, token) = merge::page_of_templates(&page()?, merge::templates(all()?));
            put_token(headers, token)?;
            Ok(Value::Array(shown))
        }
    }
}
