//! The control plane: E2B's REST routes on top of the registry and the pool.
//!
//! [`endpoints`] lists all routes and the [`Access`] that each requires. The router is built from this list, and a test
//! compares the list with the OpenAPI document. Every error is JSON with `code` and `message`.

// Before a handler: which node answers, for whom, and what the request asks.
mod spread;

mod guard;
mod idempotency;

mod body;
mod paging;
mod query;

// Sandboxes.
mod sandboxes;

mod lifecycle;
mod snapshots;

mod events;
mod logs;
mod metrics;
mod network;

// Templates, and what else clients keep.
mod builds;
mod templates;

mod secrets;
mod webhooks;

// The server, its nodes, and pages.
mod console;
mod nodes;
mod reports;
mod server;
mod unsupported;

// The answer.
mod error;
mod merge;
mod timing;
mod wire;

#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;

use std::{path::PathBuf, sync::Arc};

use ::egress::control::Call;
use axum::{
    Router, middleware,
    routing::{MethodFilter, MethodRouter, on},
};
use cluster::NodeId;
use model::{Bytes, SandboxId};
use netisolation::NetEvent;
use pool::Pool;

use crate::{
    auth::{Authenticator, Scope},
    builds::{
        catalog::{Catalog, Resolved},
        owner::Builds,
    },
    egress::Egress,
    events::Events,
    network::Network,
    node::OwnNode,
    peers::{Peers, moves::Moves},
    registry::Registry,
    secrets::Secrets,
    telemetry::Telemetry,
};

pub use crate::network::EgressConfig;
pub use error::ApiError;
pub(crate) use nodes::own as own_node;
pub(crate) use server::TEAM;
pub(crate) use spread::wanted;
pub(crate) use templates::build_id;
pub(crate) use wire::state as state_of;

/// Version of the envd protocol in the guests. Clients use it to decide which features they can use.
pub const ENVD_VERSION: &str = "0.6.13";

/// The state that all handlers share.
#[derive(Debug)]
pub struct Control {
    pub registry: Registry,
    /// For templates and metrics; handlers change sandboxes only through the registry.
    pub pool: Pool,
    pub builds: Builds,
    pub secrets: Secrets,
    pub events: Events,
    /// `None`: requests of sandboxes pass no proxy.
    pub egress: Option<Egress>,
    pub authenticator: Arc<Authenticator>,
    pub telemetry: Arc<Telemetry>,
    pub node: OwnNode,
    /// `None`: this server is alone.
    pub peers: Option<Peers>,
    pub(crate) moves: Option<Moves>,
    pub state_dir: PathBuf,
    /// Directory of benchmark runs. `None`: there is none.
    pub reports: Option<PathBuf>,
    /// Value of `domain` in answers. `None`: the domain below which the client reached this server, or one that does not
    /// exist.
    pub domain: Option<String>,
    /// `None`: sandboxes have no network.
    pub network: Option<Network>,
    /// Maximum timeout of a sandbox in seconds.
    pub max_timeout_s: u32,
    /// What a sandbox may write to its disk at most; `None`: the disk's size is the limit.
    pub disk_limit: Option<Bytes>,
    /// Whether clients use TLS, unless a proxy terminates it.
    pub is_tls: bool,
}

impl Control {
    /// The operator's configuration of outbound traffic. `None`: sandboxes have no network.
    fn egress_config(&self) -> Option<&EgressConfig> {
        self.network.as_ref().map(|network| &network.egress)
    }

    /// Refuses new sandboxes on a node that is not ready.
    fn check_open(&self) -> Result<(), ApiError> {
        if self.node.is_open() {
            Ok(())
        } else {
            let name = self.node.name().to_owned();
            Err(ApiError::NodeClosed(name, self.node.chosen().status))
        }
    }

    /// Waits while a sandbox of this node moves.
    async fn settled(&self, id: &SandboxId) {
        if let Some(moves) = &self.moves {
            moves.settled(id).await;
        }
    }

    /// Whether a template or a build of this id or name, with or without a tag, is on this node.
    pub(crate) async fn has_template(&self, reference: &str) -> bool {
        let word = wire::split_tag(reference).0;
        self.builds.catalog().find(word).is_some() || self.pool.template(reference).await.is_some()
    }

    /// The other node that builds and changes a template of which this one has a copy.
    pub(crate) fn home_elsewhere(&self, reference: &str) -> Option<NodeId> {
        let catalog = self.builds.catalog();
        let template = catalog.find(wire::split_tag(reference).0)?;
        let (home, peers) = template.home.as_ref().zip(self.peers.as_ref())?;
        (home.node != *peers.this()).then(|| home.node.clone())
    }

    /// Whether a template's home has another build under this id or name than the copy on this node.
    fn is_outdated(&self, catalog: &Catalog, reference: &str) -> bool {
        let Some(peers) = &self.peers else {
            return false;
        };
        let found = catalog.tagged(reference);
        found.is_some_and(|(tagged, _)| peers.is_outdated(&tagged))
    }

    /// Whether creates can use what this node has under this id or name.
    async fn can_clone(&self, reference: &str) -> bool {
        match self.pool_reference(reference.to_owned()) {
            Ok(found) => self.pool.template(&found).await.is_some(),
            Err(_) => false,
        }
    }

    /// The reference with which the pool finds a template: of a build, its id in the pool.
    fn pool_reference(&self, reference: String) -> Result<String, ApiError> {
        let catalog = self.builds.catalog();
        match catalog.resolve(&reference) {
            // As if it were not here: the home has it, or no node.
            Resolved::Ready(_) if self.is_outdated(&catalog, &reference) => {
                Err(ApiError::no_template(&reference))
            }
            Resolved::Ready(pool_id) => Ok(pool_id),
            Resolved::Foreign => Ok(reference),
            Resolved::NotReady => Err(ApiError::no_template(&reference)),
        }
    }

    /// Ends what sandboxes have open through the proxy.
    fn cut(&self, id: &SandboxId) {
        if let Some(egress) = &self.egress {
            egress.cut(id);
        }
    }

    /// The ruled and refused calls of a sandbox through the proxy, oldest first.
    async fn calls(&self, id: &SandboxId) -> Vec<Call> {
        match &self.egress {
            Some(egress) => egress.calls.calls_of(id).await,
            None => Vec::new(),
        }
    }

    /// The packets of a sandbox that its policy refused, oldest first.
    async fn refused(&self, id: &SandboxId) -> Vec<NetEvent> {
        match &self.network {
            Some(network) => network.log.events_of(id).await,
            None => Vec::new(),
        }
    }
}

pub type App = Arc<Control>;

/// The access that a route requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// No authentication.
    Public,
    /// A key with this scope.
    Key(Scope),
}

#[derive(Debug)]
pub struct Endpoint {
    /// HTTP method in lower case.
    pub method: &'static str,
    /// Path with parameters in braces.
    pub path: &'static str,
    pub access: Access,
    handler: MethodRouter<App>,
}

/// Builds the service of the control plane.
pub fn router(app: App) -> Router {
    let mut router = Router::new();
    let repeated = Arc::new(idempotency::Table::default());
    for endpoint in endpoints() {
        let guard = middleware::from_fn_with_state((app.clone(), endpoint.access), guard::guard);
        let spread = spread::is_spread(endpoint.method, endpoint.path, endpoint.access);
        let is_create = matches!(endpoint.path, "/sandboxes" | "/v2/sandboxes");
        let mut handler = match (&app.peers, spread) {
            (Some(peers), Some(spread)) => {
                let state = (app.clone(), peers.clone(), spread);
                let layer = middleware::from_fn_with_state(state, spread::layer);
                endpoint.handler.route_layer(layer)
            }
            (None | Some(_), _) => endpoint.handler,
        };
        if is_create && endpoint.method == "post" {
            let state = (app.clone(), Arc::clone(&repeated));
            let once = middleware::from_fn_with_state(state, idempotency::layer);
            handler = handler.route_layer(once);
        }
        router = router.route(endpoint.path, handler.route_layer(guard));
    }
    console::add_to(router)
        .fallback(guard::no_route)
        .method_not_allowed_fallback(guard::no_method)
        .layer(middleware::from_fn_with_state(app.clone(), guard::observe))
        .with_state(app)
}

/// All routes of the control plane.
#[must_use]
pub fn endpoints() -> Vec<Endpoint> {
    let mut all = sandboxes::endpoints();
    all.extend(lifecycle::endpoints());
    all.extend(snapshots::endpoints());
    all.extend(metrics::endpoints());
    all.extend(logs::endpoints());
    all.extend(events::endpoints());
    all.extend(webhooks::endpoints());
    all.extend(templates::endpoints());
    all.extend(builds::endpoints());
    all.extend(secrets::endpoints());
    all.extend(nodes::endpoints());
    all.extend(server::endpoints());
    all.extend(reports::endpoints());
    all.extend(unsupported::endpoints());
    all
}

impl Endpoint {
    fn new<H, T>(filter: MethodFilter, path: &'static str, access: Access, handler: H) -> Self
    where
        H: axum::handler::Handler<T, App>,
        T: 'static,
    {
        Self {
            method: name_of(filter),
            path,
            access,
            handler: on(filter, handler),
        }
    }
}

fn name_of(filter: MethodFilter) -> &'static str {
    const NAMES: [(MethodFilter, &str); 5] = [
        (MethodFilter::GET, "get"),
        (MethodFilter::POST, "post"),
        (MethodFilter::PUT, "put"),
        (MethodFilter::PATCH, "patch"),
        (MethodFilter::DELETE, "delete"),
    ];
    let found = NAMES.into_iter().find(|(known, _)| *known == filter);
    found.map_or("", |(_, name)| name)
}

/// Runs work that waits for the disk on a thread.
///
/// # Errors
/// Returns [`ApiError::Interrupted`] if it has panicked.
async fn on_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|why| ApiError::Interrupted(why.to_string()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The operations in the OpenAPI document: method, path, and whether the operation is public.
    fn documented() -> BTreeSet<(String, String, bool)> {
        let document: serde_json::Value = serde_json::from_str(server::OPENAPI).unwrap();
        let paths = document["paths"].as_object().unwrap();
        let operations = paths.iter().flat_map(|(path, operations)| {
            let operations = operations.as_object().unwrap();
            let methods = operations.iter().filter(|(key, _)| *key != "parameters");
            methods.map(move |(method, operation)| {
                let is_public = operation["security"].as_array().is_some_and(Vec::is_empty);
                (method.clone(), path.clone(), is_public)
            })
        });
        operations.collect()
    }

    #[test]
    fn the_openapi_document_lists_exactly_the_routes() {
        let served: BTreeSet<_> = endpoints()
            .into_iter()
            .map(|e| {
                let is_public = e.access == Access::Public;
                (e.method.to_owned(), e.path.to_owned(), is_public)
            })
            .collect();
        let documented = documented();
        let undocumented: Vec<_> = served.difference(&documented).collect();
        let unserved: Vec<_> = documented.difference(&served).collect();
        assert!(
            undocumented.is_empty() && unserved.is_empty(),
            "missing in the document: {undocumented:?}; not served: {unserved:?}"
        );
    }

    #[test]
    fn every_operation_declares_its_statuses() {
        let document: serde_json::Value = serde_json::from_str(server::OPENAPI).unwrap();
        for (method, path, is_public) in documented() {
            let operation = &document["paths"][&path][&method];
            let declares = |status: &str| operation["responses"].get(status).is_some();
            assert!(!declares("default"), "{method} {path}");
            let mut wanted = Vec::new();
            if !is_public {
                wanted.extend(["401", "403", "429"]);
            }
            if operation.get("requestBody").is_some() && !is_public {
                wanted.extend(["400", "413", "415"]);
            }
            for status in wanted {
                assert!(declares(status), "{method} {path}: {status}");
            }
        }
    }

    #[test]
    fn every_reference_in_the_openapi_document_resolves() {
        let document: serde_json::Value = serde_json::from_str(server::OPENAPI).unwrap();
        let mut values = vec![&document];
        while let Some(value) = values.pop() {
            match value {
                serde_json::Value::Object(object) => {
                    if let Some(reference) = object.get("$ref") {
                        let pointer = reference.as_str().unwrap().trim_start_matches('#');
                        assert!(document.pointer(pointer).is_some(), "{reference}");
                    }
                    values.extend(object.values());
                }
                serde_json::Value::Array(array) => values.extend(array),
                _ => {}
            }
        }
    }

    #[test]
    fn only_health_the_openapi_document_and_uploads_are_public() {
        let endpoints = endpoints();
        let public = endpoints.iter().filter(|e| e.access == Access::Public);
        let public: Vec<_> = public.map(|e| (e.method, e.path)).collect();
        assert_eq!(
            public,
            [
                ("put", "/templates/{id}/files/{hash}"),
                ("get", "/health"),
                ("get", "/openapi.json")
            ]
        );
    }
}
