//! CORS for the agent's port. Pages of any origin may use the agent, as with E2B: the agent authenticates by token,
//! never by cookie, so the origin of a page grants nothing. Programs on other ports send their own CORS headers.

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header};

const ANY: HeaderValue = HeaderValue::from_static("*");
/// Response headers that pages may read in addition to the CORS-safelisted ones.
const EXPOSED: HeaderValue = HeaderValue::from_static(
    "Location, Cache-Control, X-Content-Type-Options, Grpc-Status, Grpc-Message, Grpc-Status-Details-Bin",
);
const METHODS: HeaderValue = HeaderValue::from_static("HEAD, GET, POST, PUT, PATCH, DELETE");
/// How long browsers cache the response to a preflight, in seconds.
const MAX_AGE: HeaderValue = HeaderValue::from_static("7200");

/// The response to a CORS preflight. `None`: the request is not a preflight.
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
    // `*` does not cover `Authorization`, so the response lists the header names that the preflight requests.
    let wanted = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS);
    let wanted = wanted.cloned().unwrap_or(ANY);
    answer.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted);
    answer.insert(header::ACCESS_CONTROL_MAX_AGE, MAX_AGE);
    let vary = "Origin, Access-Control-Request-Method, Access-Control-Request-Headers";
    answer.insert(header::VARY, HeaderValue::from_static(vary));
    Some(response)
}

/// Allows pages of any origin to read this response of the agent.
pub(super) fn open(headers: &mut HeaderMap) {
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, ANY);
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
}
