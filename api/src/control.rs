//! The control plane: E2B's REST routes on the registry and the pool.
//!
//! [`endpoints`] is the one list of routes: each with who may use it. The router is built from it, and a test holds
//! it against the OpenAPI document. No route is without an [`Access`], and none answers an error that is not JSON with
//! `code` and `message`.

mod body;
mod error;
mod events;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod guard;
mod lifecycle;
mod logs;
mod metrics;
mod network;
mod paging;
mod query;
mod sandboxes;
mod server;
mod snapshots;
mod templates;
mod timing;
mod unsupported;
mod wire;

use std::sync::Arc;

use axum::{
    Router, middleware,
    routing::{MethodFilter, MethodRouter, on},
};
use model::SandboxId;
use netisolation::NetEvent;
use pool::Pool;

use crate::{
    auth::{Authenticator, Scope},
    network::Network,
    registry::Registry,
    telemetry::Telemetry,
};

pub use error::ApiError;
pub use network::EgressConfig;

/// What envd's protocol this server's guests speak; clients switch features on it.
pub const ENVD_VERSION: &str = "0.6.13";

/// What the routes work on.
#[derive(Debug)]
pub struct Control {
    /// The sandboxes.
    pub registry: Registry,
    /// Templates and figures.
    pub pool: Pool,
    /// Keys.
    pub authenticator: Arc<Authenticator>,
    /// The server's own figures.
    pub telemetry: Arc<Telemetry>,
    /// What `domain` says in answers; `None`: nothing, clients know it from their own settings.
    pub domain: Option<String>,
    /// `None`: sandboxes have none.
    pub network: Option<Network>,
    /// No sandbox is given longer, in seconds.
    pub max_timeout_s: u32,
}

impl Control {
    /// What the operator says about the way out; `None`: there is none.
    fn egress(&self) -> Option<&EgressConfig> {
        self.network.as_ref().map(|network| &network.egress)
    }

    /// What a sandbox's network refused, the newest last.
    async fn refused(&self, id: &SandboxId) -> Vec<NetEvent> {
        match &self.network {
            Some(network) => network.log.events_of(id).await,
            None => Vec::new(),
        }
    }
}

/// What handlers get.
pub type App = Arc<Control>;

/// Who may use a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Everybody.
    Public,
    /// Keys with this scope.
    Key(Scope),
}

/// A route.
#[derive(Debug)]
pub struct Endpoint {
    /// Its method.
    pub method: &'static str,
    /// Its path, with parameters in braces.
    pub path: &'static str,
    /// Who may use it.
    pub access: Access,
    handler: MethodRouter<App>,
}

/// The control plane as a service.
pub fn router(app: App) -> Router {
    let mut router = Router::new();
    for endpoint in endpoints() {
        let guard = middleware::from_fn_with_state((app.clone(), endpoint.access), guard::guard);
        router = router.route(endpoint.path, endpoint.handler.route_layer(guard));
    }
    router
        .fallback(guard::no_route)
        .method_not_allowed_fallback(guard::no_method)
        .layer(middleware::from_fn_with_state(app.clone(), guard::observe))
        .with_state(app)
}

/// All routes.
#[must_use]
pub fn endpoints() -> Vec<Endpoint> {
    let mut all = sandboxes::endpoints();
    all.extend(lifecycle::endpoints());
    all.extend(snapshots::endpoints());
    all.extend(metrics::endpoints());
    all.extend(logs::endpoints());
    all.extend(events::endpoints());
    all.extend(templates::endpoints());
    all.extend(server::endpoints());
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// What the document says is there, with whether it needs a key.
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
    fn the_document_and_the_routes_are_the_same() {
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
            "not in the document: {undocumented:?}; not served: {unserved:?}"
        );
    }

    #[test]
    fn every_reference_of_the_document_leads_somewhere() {
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
    fn only_these_are_public() {
        let endpoints = endpoints();
        let public = endpoints.iter().filter(|e| e.access == Access::Public);
        let public: Vec<_> = public.map(|e| e.path).collect();
        assert_eq!(public, ["/health", "/openapi.json"]);
    }
}
