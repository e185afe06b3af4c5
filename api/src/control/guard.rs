//! Middleware of all routes: authentication (without API keys: a check of the request's origin) and metrics.

use std::{sync::Arc, time::Instant};

use axum::{
    extract::{MatchedPath, Request, State},
    middleware::Next,
    response::Response,
};
use hyper::{HeaderMap, Method, Uri, header};
use tracing::debug;

use super::{app::App, error::ApiError, wire};
use crate::{
    auth::Scope,
    peers::{self, Peer},
    proxy::host,
    traces,
};

/// The access that a route requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// No authentication.
    Public,
    /// A key with this scope.
    Key(Scope),
}

/// Passes an authorized request to its route, with its [`Granted`] scopes.
pub(super) async fn guard(
    State((app, access)): State<(App, Access)>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    if let Access::Key(scope) = access {
        // Without authentication, web pages of other origins must not reach this server through a browser.
        if app.authenticator.is_open() {
            check_origin(request.uri(), request.headers())?;
        }
        let headers = request.headers();
        let granted = if request.extensions().get::<Arc<Peer>>().is_some() {
            // The forwarding node sends the hash of the key, and this one looks up the scopes.
            let key = headers.get(peers::KEY);
            let key = key.and_then(|key| key.to_str().ok()).map(str::to_owned);
            app.authenticator.admit_sum(key, scope, Instant::now())?
        } else {
            app.authenticator.admit(headers, scope, Instant::now())?
        };
        request.extensions_mut().insert(granted);
    }
    let host = host(request.uri(), request.headers()).unwrap_or_default();
    Ok(wire::reached_at(&host, next.run(request)).await)
}

/// Refuses requests that a browser sends on behalf of a page of another origin, which `Origin` or `Sec-Fetch-Site`
/// reveals. Clients that are not browsers send neither header.
///
/// With API keys, such requests fail because pages do not have a key. A server without authentication would treat them
/// as requests of the browser's user: any page can send a form or a `fetch` to a loopback address, and there is no
/// preflight if the content type is one that forms use.
fn check_origin(uri: &Uri, headers: &HeaderMap) -> Result<(), ApiError> {
    let own = host(uri, headers).unwrap_or_default();
    for origin in headers.get_all(header::ORIGIN) {
        let origin = origin.to_str().unwrap_or("?");
        let authority = origin.split_once("://").map(|(_, authority)| authority);
        if !authority.is_some_and(|authority| authority.eq_ignore_ascii_case(&own)) {
            return Err(ApiError::foreign("Origin", origin));
        }
    }
    for site in headers.get_all("sec-fetch-site") {
        let site = site.to_str().unwrap_or("?");
        // `none`: the user entered the URL.
        if !matches!(site, "same-origin" | "none") {
            return Err(ApiError::foreign("Sec-Fetch-Site", site));
        }
    }
    Ok(())
}

/// Counts each request by route and status, and measures its duration.
pub(super) async fn observe(State(app): State<App>, request: Request, next: Next) -> Response {
    let start = Instant::now();
    let method = request.method().clone();
    // The label is the route's pattern, not the path: with ids in labels, the number of time series would grow without
    // bound.
    let matched = request.extensions().get::<MatchedPath>();
    let route = matched.map_or("other", MatchedPath::as_str).to_owned();
    let span = traces::begin(request.headers());
    let response = match &span {
        Some(span) => span.within(next.run(request)).await,
        None => next.run(request).await,
    };
    let status = response.status().as_u16();
    let took = start.elapsed();
    debug!(%method, route, status, took_us = took.as_micros(), "request answered");
    if let Some(span) = span {
        span.end(format!("{method} {route}"), status, Vec::new());
    }
    app.telemetry.request(&method, route, status, took);
    response
}

/// The response for unknown paths.
pub(super) async fn no_route(method: Method, uri: Uri) -> ApiError {
    ApiError::NoRoute(format!("{method} {}", shown(&uri)))
}

/// The response for methods that a route does not support.
pub(super) async fn no_method(method: Method, uri: Uri) -> ApiError {
    ApiError::NoMethod(format!("{method} {}", shown(&uri)))
}

fn shown(uri: &Uri) -> String {
    uri.path().chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_accepted(fields: &[(&'static str, &str)]) -> bool {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(*name, value.parse().unwrap());
        }
        check_origin(&Uri::from_static("/sandboxes"), &headers).is_ok()
    }

    #[test]
    fn without_authentication_pages_of_other_origins_are_refused() {
        let host = ("host", "localhost:3000");
        let own = ("origin", "http://localhost:3000");
        for mine in [
            &[][..],
            &[own],
            &[
                ("origin", "http://LOCALHOST:3000"),
                ("sec-fetch-site", "same-origin"),
            ],
            &[("sec-fetch-site", "none"), ("sec-fetch-mode", "navigate")],
            // Sent by `fetch` in Node.js.
            &[("sec-fetch-mode", "cors")],
        ] {
            assert!(is_accepted(&[mine, &[host]].concat()), "{mine:?}");
        }
        for foreign in [
            &[("origin", "https://evil.example")][..],
            &[("origin", "http://localhost:3001")],
            &[("origin", "http://localhost:3000.evil.example")],
            &[("origin", "http://evil.example/://localhost:3000")],
            &[("origin", "null")],
            &[("origin", "")],
            &[own, ("origin", "null")],
            &[("sec-fetch-site", "cross-site")],
            &[("sec-fetch-site", "same-site")],
            &[("sec-fetch-site", "anything")],
            &[own, ("sec-fetch-site", "cross-site")],
        ] {
            assert!(!is_accepted(&[foreign, &[host]].concat()), "{foreign:?}");
        }
        assert!(!is_accepted(&[own]), "no host");
    }
}
