//! Requests of clients, sent on to another node.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    body::Body,
    http::{HeaderMap, HeaderValue, Request, Response},
};
use cluster::{NodeId, View};
use hyper::body::Incoming;
use tokio::sync::watch;

use super::{CLIENT, KEY, LAST_HOP, Peer, PeerError, Peers};
use crate::{
    auth::{presented_sum, remove_keys},
    proxy::{Refusal, Relay, Upload, head},
};

/// How long a node may be unreachable while a client's request waits for its response. Longer than a reload takes.
const LEFT: Duration = Duration::from_secs(3);

impl Peers {
    /// Forwards a request of `from` to a node unchanged. `host` is the host that the request names. If the response
    /// upgrades the connection, `held` is kept until the upgraded connection ends.
    ///
    /// # Errors
    /// Returns [`Refusal::NodeFailed`] if the node does not respond.
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
    /// Returns [`PeerError`] if the node does not respond.
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
    pub(super) async fn while_there<T>(
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

/// Sets the client's address, replacing any that the client sent, and marks the second hop.
fn mark(headers: &mut HeaderMap, from: SocketAddr, is_forwarded: bool) {
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
fn key_for(headers: &HeaderMap, is_forwarded: bool) -> Option<HeaderValue> {
    if is_forwarded {
        return headers.get(KEY).cloned();
    }
    HeaderValue::try_from(presented_sum(headers)?).ok()
}

/// Replaces the key with its hash.
fn name_key(headers: &mut HeaderMap, key: Option<HeaderValue>) {
    remove_keys(headers);
    if let Some(key) = key {
        headers.insert(KEY, key);
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
        let mut headers = HeaderMap::new();
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
