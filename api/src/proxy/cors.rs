//! Pages of any origin may talk to the agent's port, as they may with E2B: access is by token, never by
//! cookie, so an origin proves nothing. Ports of the caller's own programs say for themselves.

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header};

const ANY: HeaderValue = HeaderValue::from_static("*");
/// What pages may read of answers beyond the fields that they always may.
const EXPOSED: HeaderValue = HeaderValue::from_static(
    "Location, Cache-Control, X-Content-Type-Options, Grpc-Status, Grpc-Message, Grpc-Status-Details-Bin",
);
const METHODS: HeaderValue = HeaderValue::from_static("HEAD, GET, POST, PUT, PATCH, DELETE");
/// Seconds for which a browser need not ask again.
const MAX_AGE: HeaderValue = HeaderValue::from_static("7200");

/// The answer to a browser's question whether it may ask at all.
pub(super) fn preflight(method: &Method, headers: &HeaderMap) -> Option<Response<Body>> {
    let asks = *method == Method::OPTIONS
        && headers.contains_key(header::ORIGIN)
        && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    if !asks {
        return None;
    }
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let answer = response.headers_mut();
    answer.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, ANY);
    answer.insert(header::ACCESS_CONTROL_ALLOW_METHODS, METHODS);
    // A star does not cover `Authorization`, so the wish is repeated.
    let wanted = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS);
    let wanted = wanted.cloned().unwrap_or(ANY);
    answer.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted);
    answer.insert(header::ACCESS_CONTROL_MAX_AGE, MAX_AGE);
    let vary = "Origin, Access-Control-Request-Method, Access-Control-Request-Headers";
    answer.insert(header::VARY, HeaderValue::from_static(vary));
    Some(response)
}

/// Lets a page read an answer of the agent.
pub(super) fn open(headers: &mut HeaderMap) {
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, ANY);
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
}
