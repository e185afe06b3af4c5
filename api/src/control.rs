//! The control plane: E2B's REST routes on top of the registry and the pool.
//!
//! [`endpoints`] lists all routes and the [`Access`] that each requires. The router is built from this list, and a test
//! compares the list with the OpenAPI document. Every error is JSON with `code` and `message`.

// Every route, and the state of its handler.
mod app;
mod endpoint;

// Before a handler: selects the node that responds, checks the key, and parses the request.
mod spread;

mod guard;
mod idempotency;

mod body;
mod paging;
mod query;
mod timeout;

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
mod openapi;
mod reports;
mod server;
mod site;
mod unsupported;

// Requests of other nodes.
mod internal;

// The answer.
mod error;
mod merge;
mod timing;
mod wire;

#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;

use std::sync::Arc;

use axum::{Router, middleware};

pub use crate::network::EgressConfig;
pub use app::{App, Control};
pub use endpoint::{Access, Endpoint};
pub use error::ApiError;
pub(crate) use internal::router as internal_router;
pub(crate) use server::TEAM;
use spread::Spread;
pub(crate) use templates::build_id;

/// Builds the service of the control plane.
pub fn router(app: App) -> Router {
    let mut router = Router::new();
    let repeated = Arc::new(idempotency::Table::default());
    for endpoint in endpoints() {
        let guard = middleware::from_fn_with_state((app.clone(), endpoint.access), guard::guard);
        let Endpoint { access, spread, .. } = endpoint;
        let mut handler = match &app.peers {
            Some(peers) if spread != Spread::Own => {
                let state = spread::Layer {
                    app: app.clone(),
                    peers: peers.clone(),
                    spread,
                    access,
                };
                let layer = middleware::from_fn_with_state(state, spread::layer);
                endpoint.handler.route_layer(layer)
            }
            None | Some(_) => endpoint.handler,
        };
        if spread == Spread::Create {
            let state = (app.clone(), Arc::clone(&repeated));
            let once = middleware::from_fn_with_state(state, idempotency::layer);
            handler = handler.route_layer(once);
        }
        router = router.route(endpoint.path, handler.route_layer(guard));
    }
    site::add_to(console::add_to(router))
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

#[cfg(test)]
mod tests {
    use super::*;

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
