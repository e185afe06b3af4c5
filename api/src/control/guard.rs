//! What every request goes through: the key or, where no key is asked for, the origin; the figures, the log.

use std::time::Instant;

use axum::{
    extract::{MatchedPath, Request, State},
    middleware::Next,
    response::Response,
};
use hyper::{HeaderMap, Method, Uri, header};
use tracing::debug;

use super::{Access, ApiError, App};
use crate::proxy::host;

/// Lets a request through to a route if its key may.
pub(super) async fn guard(
    State((app, access)): State<(App, Access)>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    match access {
        Access::Public => {}
        // Only a page of this server itself may use the browser's way to a server that asks for no key.
        Access::Key(_) if app.authenticator.is_open() => {
            check_origin(request.uri(), request.headers())?
        }
        Access::Key(scope) => app
            .authenticator
            .admit(request.headers(), scope, Instant::now())?,
    }
    Ok(next.run(request).await)
}

/// Refuses what a browser sends on behalf of a page of another origin. Programs send neither field.
///
/// A key that a page does not have protects a server that asks for one. A server that asks for none would take the
/// browser's request for the user's own: a form or a `fetch` of any page reaches loopback, without a preflight if its
/// content type is one that forms have.
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
        // `none`: a user has typed the address.
        if !matches!(site, "same-origin" | "none") {
            return Err(ApiError::foreign("Sec-Fetch-Site", site));
        }
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    fn is_let_in(fields: &[(&'static str, &str)]) -> bool {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(*name, value.parse().unwrap());
        }
        check_origin(&Uri::from_static("/sandboxes"), &headers).is_ok()
    }

    #[test]
    fn pages_of_other_origins_are_refused_where_no_key_is_asked_for() {
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
            // What `fetch` of Node sends.
            &[("sec-fetch-mode", "cors")],
        ] {
            assert!(is_let_in(&[mine, &[host]].concat()), "{mine:?}");
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
            assert!(!is_let_in(&[foreign, &[host]].concat()), "{foreign:?}");
        }
        assert!(!is_let_in(&[own]), "no host");
    }
}
