//! What every request goes through: the key, the figures, the log.

use std::time::Instant;

use axum::{
    extract::{MatchedPath, Request, State},
    middleware::Next,
    response::Response,
};
use hyper::{Method, Uri};
use tracing::debug;

use super::{Access, ApiError, App};

/// Lets a request through to a route if its key may.
pub(super) async fn guard(
    State((app, access)): State<(App, Access)>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    match access {
        Access::Public => {}
        Access::Key(scope) => app.door.admit(request.headers(), scope, Instant::now())?,
    }
    Ok(next.run(request).await)
}

/// Counts a request by route and status, and how long it took.
pub(super) async fn observe(State(app): State<App>, request: Request, next: Next) -> Response {
    let start = Instant::now();
    let method = request.method().clone();
    // The pattern, not the path: a label per sandbox would grow without bound.
    let matched = request.extensions().get::<MatchedPath>();
    let route = matched.map_or("other", MatchedPath::as_str).to_owned();
    let response = next.run(request).await;
    let status = response.status().as_u16();
    let took = start.elapsed();
    debug!(%method, route, status, took_us = took.as_micros(), "answered");
    app.telemetry.request(&method, route, status, took);
    response
}

/// For everything that is no route.
pub(super) async fn no_route(method: Method, uri: Uri) -> ApiError {
    ApiError::NoRoute(format!("{method} {}", shown(&uri)))
}

/// For methods that a route does not have.
pub(super) async fn no_method(method: Method, uri: Uri) -> ApiError {
    ApiError::NoMethod(format!("{method} {}", shown(&uri)))
}

fn shown(uri: &Uri) -> String {
    uri.path().chars().take(200).collect()
}
