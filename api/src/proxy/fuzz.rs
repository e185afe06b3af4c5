//! Entry points of the fuzz target `proxy`: heads from clients and sandboxes, host names, greetings of guests.

use std::fmt::Write as _;

use axum::http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, header, request,
};

use super::{Hosts, TRAFFIC_TOKEN, Target, head, host, internal, upstream};
use crate::registry::Route;

const ID: &str = "iabcdefghij012345678";
const DOMAIN: &str = "e2b.test";
/// Hop-by-hop and forwarding headers; the proxy must remove all of them.
const REMOVED: [&str; 8] = [
    "transfer-encoding",
    "keep-alive",
    "proxy-connection",
    "proxy-authorization",
    "expect",
    "forwarded",
    "x-forwarded-for",
    "x-forwarded-proto",
];

/// The first byte selects the parser that gets the other bytes.
///
/// # Panics
/// Panics if an invariant is violated.
pub fn proxy(bytes: &[u8]) {
    let Some((choice, bytes)) = bytes.split_first() else {
        return;
    };
    match choice % 8 {
        0..=2 => {
            if let Some(parts) = read_request(bytes) {
                check_target(&parts);
                check_request(parts, choice & 8 != 0);
            }
        }
        3 => check_response(bytes),
        4 => upstream::fuzz::greeting(bytes),
        5 => check_host(bytes),
        _ => check_path(bytes),
    }
}

/// Parses a request head into the form in which the listener passes it on.
fn read_request(bytes: &[u8]) -> Option<request::Parts> {
    let mut space = [httparse::EMPTY_HEADER; 64];
    let mut request = httparse::Request::new(&mut space);
    let Ok(httparse::Status::Complete(_)) = request.parse(bytes) else {
        return None;
    };
    let mut parts = Request::new(()).into_parts().0;
    parts.method = Method::from_bytes(request.method?.as_bytes()).ok()?;
    parts.uri = request.path?.parse().ok()?;
    parts.headers = fields(request.headers)?;
    Some(parts)
}

fn fields(read: &[httparse::Header<'_>]) -> Option<HeaderMap> {
    let mut headers = HeaderMap::new();
    for field in read {
        let name = HeaderName::from_bytes(field.name.as_bytes()).ok()?;
        headers.append(name, HeaderValue::from_bytes(field.value).ok()?);
    }
    Some(headers)
}

/// A strict server must route each request that it accepts as other servers do, and no host name below the domain may
/// lead to the control plane.
fn check_target(parts: &request::Parts) {
    let named = Hosts::new(Some(DOMAIN));
    for hosts in [Hosts::new(None), named.clone()] {
        let target = hosts.target(&parts.uri, &parts.headers);
        if let Ok(Target::Sandbox { port, .. }) = target {
            assert_ne!(port, 0);
        }
        if let Ok(strict) = hosts.strict().target(&parts.uri, &parts.headers) {
            assert_eq!(Ok(strict), target);
        }
    }
    let Ok(host) = host(&parts.uri, &parts.headers) else {
        assert!(named.target(&parts.uri, &parts.headers).is_err());
        return;
    };
    let label = host.to_ascii_lowercase();
    let label = label.strip_suffix(".e2b.test").unwrap_or("api");
    if !label.contains('.') && !["api", "sandbox"].contains(&label) && !label.contains([':', '[']) {
        // A name below the domain must belong to a sandbox or be refused, whatever the headers contain.
        let target = named.target(&parts.uri, &parts.headers);
        assert_ne!(target, Ok(Target::Control), "{host}");
    }
}

fn check_request(mut parts: request::Parts, is_envd: bool) {
    let Ok(host) = host(&parts.uri, &parts.headers) else {
        return;
    };
    let port = if is_envd { 49_983 } else { 3000 };
    let route = Route {
        id: ID.parse().expect("an id"),
        vsock: "/nowhere".into(),
        traffic_token: Some("secret".into()),
        envd_token: Some("other".into()),
        mask_request_host: Some("localhost:${PORT}".into()),
        https_ports: Vec::new(),
        generation: 1,
        renewal: None,
    };
    let classify = |path: &str| (internal::is_internal(path), internal::runs_code(path));
    let before = classify(parts.uri.path());
    let upgrade = head::upgrade(&parts);
    let asks = upgrade.is_some();
    head::to_sandbox(&mut parts, &host, &route, port, upgrade);
    let headers = &parts.headers;
    assert!(
        REMOVED.iter().all(|name| !headers.contains_key(*name)),
        "{headers:?}"
    );
    assert!(headers.get_all(header::HOST).iter().count() == 1);
    assert!(headers.get_all(header::COOKIE).iter().count() <= 1);
    assert_eq!(headers.contains_key(header::UPGRADE), asks);
    assert!(is_envd || !headers.contains_key(TRAFFIC_TOKEN));
    let options: Vec<_> = headers.get_all(header::CONNECTION).iter().collect();
    assert!(matches!(options.as_slice(), [] | [_]));
    assert!(
        options.iter().all(|o| *o == "te" || *o == "upgrade"),
        "{options:?}"
    );
    let target = parts.uri.to_string();
    assert!(target.starts_with('/') || target == "*", "{target}");
    assert!(parts.uri.authority().is_none());
    // The forwarded path must be classified like the requested path.
    assert_eq!(before, classify(parts.uri.path()));
}

fn check_response(bytes: &[u8]) {
    let mut space = [httparse::EMPTY_HEADER; 128];
    let mut response = httparse::Response::new(&mut space);
    let Ok(httparse::Status::Complete(_)) = response.parse(bytes) else {
        return;
    };
    let status = response.code.and_then(|c| StatusCode::from_u16(c).ok());
    let (Some(status), Some(headers)) = (status, fields(response.headers)) else {
        return;
    };
    let mut parts = Response::new(()).into_parts().0;
    (parts.status, parts.headers) = (status, headers);
    head::to_client(&mut parts);
    let switches = status == StatusCode::SWITCHING_PROTOCOLS;
    assert!(!parts.headers.contains_key(header::TRANSFER_ENCODING));
    assert!(!parts.headers.contains_key("keep-alive"));
    assert_eq!(parts.headers.contains_key(header::CONNECTION), switches);
    assert!(switches || !parts.headers.contains_key(header::UPGRADE));
}

/// Checks one host name, given in the `Host` header and in the request target.
fn check_host(bytes: &[u8]) {
    let Ok(value) = HeaderValue::from_bytes(bytes) else {
        return;
    };
    let mut parts = Request::new(()).into_parts().0;
    parts.headers.insert(header::HOST, value);
    check_target(&parts);
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let hosts = Hosts::new(Some(DOMAIN));
    let Ok(uri) = format!("http://{text}/").parse::<Uri>() else {
        return;
    };
    if uri.authority().is_some_and(|a| a.as_str() == text) {
        let by_target = hosts.target(&uri, &HeaderMap::new());
        assert_eq!(by_target, hosts.target(&parts.uri, &parts.headers));
    }
}

/// Another layer of percent-encoding must not hide a restricted path.
fn check_path(bytes: &[u8]) {
    let path = String::from_utf8_lossy(bytes);
    let mut encoded = String::new();
    for byte in path.bytes() {
        write!(encoded, "%{byte:02x}").expect("a string takes all");
    }
    assert!(!internal::is_internal(&path) || internal::is_internal(&encoded));
    assert!(!internal::runs_code(&path) || internal::runs_code(&encoded));
    // Guarded paths must cover the paths that the agent's and the interpreter's routers match.
    assert!(path != "/init" || internal::is_internal(&path));
    assert!(path.trim_matches('/') != "execute" || internal::runs_code(&path));
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    /// Runs the stored inputs, which include all inputs that once failed.
    #[test]
    fn the_fuzz_seeds_pass() {
        let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dev/fuzz/seeds/proxy");
        let mut read = 0;
        for seed in fs::read_dir(seeds).unwrap() {
            super::proxy(&fs::read(seed.unwrap().path()).unwrap());
            read += 1;
        }
        assert!(read > 0);
    }
}
