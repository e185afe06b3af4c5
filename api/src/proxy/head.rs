//! Rewrites the heads of requests and responses on their way through the proxy. Performs no I/O.
//!
//! Hop-by-hop headers are removed (RFC 9110, 7.6.1): the headers that `Connection` lists and the well-known ones. Each
//! connection frames its own messages, so `Transfer-Encoding` is not forwarded. If an upgrade is permitted, its headers
//! are written anew.

use axum::http::{
    HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, Version, header, request, response,
};

use super::TRAFFIC_TOKEN;
use crate::registry::Route;

/// Maximum size of a request head in bytes. A longer HTTP/1.1 head is answered with 431.
pub const MAX_SIZE: usize = 64 << 10;
/// Maximum number of header fields in an HTTP/1.1 request.
pub const MAX_FIELDS: usize = 128;
/// Placeholder for the port in `maskRequestHost`.
const PORT_WORD: &str = "${PORT}";
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
/// Headers in which a client can claim to be a proxy. They are not forwarded, since programs in the sandbox might trust
/// them.
const CLAIMS: [HeaderName; 5] = [
    header::FORWARDED,
    HeaderName::from_static("x-forwarded-for"),
    FORWARDED_HOST,
    HeaderName::from_static("x-forwarded-proto"),
    HeaderName::from_static("x-forwarded"),
];

/// Fields by which a server makes the reverse proxy in front of it send something else: a file of its host, or another
/// server's response.
const ORDERS: [HeaderName; 4] = [
    HeaderName::from_static("x-accel-redirect"),
    HeaderName::from_static("x-sendfile"),
    HeaderName::from_static("x-lighttpd-send-file"),
    HeaderName::from_static("x-reproxy-url"),
];

/// The value of `Upgrade` to forward. `None` if the request is not HTTP/1.1, requests no upgrade, has several `Upgrade`
/// fields, or requests a version of HTTP or TLS, which would bypass this proxy.
pub(crate) fn upgrade(parts: &request::Parts) -> Option<HeaderValue> {
    if parts.version != Version::HTTP_11 || !connection_lists(&parts.headers, "upgrade") {
        return None;
    }
    let mut values = parts.headers.get_all(header::UPGRADE).iter();
    let protocol = values.next()?;
    let text = protocol.to_str().ok()?;
    let is_http = text.split(',').any(|name| {
        let name = name.trim().to_ascii_lowercase();
        name.starts_with("h2") || name.starts_with("http") || name.starts_with("tls")
    });
    let is_one = values.next().is_none() && !is_http;
    is_one.then(|| protocol.clone())
}

/// Rewrites the head of a client's request for port `port` of the sandbox.
pub(super) fn to_sandbox(
    parts: &mut request::Parts,
    host: &str,
    route: &Route,
    port: u16,
    upgrade: Option<HeaderValue>,
) {
    let headers = &mut parts.headers;
    replace_hop_by_hop(headers, upgrade);
    headers.remove(header::PROXY_AUTHORIZATION);
    for name in CLAIMS {
        headers.remove(name);
    }
    let is_envd = port == envd::ENVD_PORT;
    let mask = route.mask_request_host.as_deref().filter(|_| !is_envd);
    if !is_envd && route.traffic_token.is_some() {
        headers.remove(TRAFFIC_TOKEN);
    }
    let original = HeaderValue::from_str(host).ok();
    if let Some(original) = original.clone().filter(|_| mask.is_some()) {
        headers.insert(FORWARDED_HOST, original);
    }
    let shown = match mask {
        Some(mask) => HeaderValue::from_str(&mask.replace(PORT_WORD, &port.to_string())).ok(),
        None => original,
    };
    headers.remove(header::HOST);
    if let Some(shown) = shown {
        headers.insert(header::HOST, shown);
    }
    parts.uri = origin_form(&parts.uri, &parts.method);
    parts.version = Version::HTTP_11;
}

/// Replaces the hop-by-hop fields of a client's request with those of the next hop, an HTTP/1.1 connection of this
/// process. `upgrade` is the protocol to request.
fn replace_hop_by_hop(headers: &mut HeaderMap, upgrade: Option<HeaderValue>) {
    let wants_trailers = te_trailers(headers);
    strip(headers);
    // The body is sent without waiting for `100 Continue`.
    headers.remove(header::EXPECT);
    if wants_trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
        headers.insert(header::CONNECTION, HeaderValue::from_static("te"));
    }
    if let Some(protocol) = upgrade {
        headers.insert(header::UPGRADE, protocol);
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    }
    join_cookies(headers);
}

/// Rewrites the head of a client's request for the process that has taken over. Unlike [`to_sandbox`], it keeps
/// everything that affects how the request is handled.
pub(crate) fn to_successor(parts: &mut request::Parts, host: &str, upgrade: Option<HeaderValue>) {
    let headers = &mut parts.headers;
    replace_hop_by_hop(headers, upgrade);
    headers.remove(header::HOST);
    if let Ok(host) = HeaderValue::from_str(host) {
        headers.insert(header::HOST, host);
    }
    parts.uri = origin_form(&parts.uri, &parts.method);
    parts.version = Version::HTTP_11;
}

/// Rewrites the head of a response for the client.
pub(crate) fn to_client(parts: &mut response::Parts) {
    let protocol = parts.headers.remove(header::UPGRADE);
    strip(&mut parts.headers);
    for name in ORDERS {
        parts.headers.remove(name);
    }
    if parts.status == StatusCode::SWITCHING_PROTOCOLS {
        if let Some(protocol) = protocol {
            parts.headers.insert(header::UPGRADE, protocol);
        }
        let upgrade = HeaderValue::from_static("upgrade");
        parts.headers.insert(header::CONNECTION, upgrade);
    }
    parts.version = Version::HTTP_11;
}

fn strip(headers: &mut HeaderMap) {
    let listed: Vec<HeaderName> = words(headers, &header::CONNECTION)
        .filter_map(|word| HeaderName::from_bytes(word.as_bytes()).ok())
        // `Connection` must not remove the headers that contain the recipient and the length of the message.
        .filter(|name| !matches!(*name, header::HOST | header::CONTENT_LENGTH))
        .collect();
    for name in listed {
        headers.remove(name);
    }
    for name in [
        header::CONNECTION,
        header::TE,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
        KEEP_ALIVE,
        PROXY_CONNECTION,
    ] {
        headers.remove(name);
    }
}

fn words<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    let values = headers.get_all(name).iter();
    let texts = values.filter_map(|value| value.to_str().ok());
    texts.flat_map(|text| text.split(',')).map(str::trim)
}

fn connection_lists(headers: &HeaderMap, option: &str) -> bool {
    words(headers, &header::CONNECTION).any(|word| word.eq_ignore_ascii_case(option))
}

fn te_trailers(headers: &HeaderMap) -> bool {
    words(headers, &header::TE).any(|word| word.eq_ignore_ascii_case("trailers"))
}

/// Joins the `Cookie` fields: HTTP/2 permits several, HTTP/1.1 only one (RFC 9113, 8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    let cookies: Vec<&[u8]> = headers
        .get_all(header::COOKIE)
        .iter()
        .map(HeaderValue::as_bytes)
        .collect();
    if cookies.len() < 2 {
        return;
    }
    if let Ok(joined) = HeaderValue::from_bytes(&cookies.join(&b"; "[..])) {
        headers.insert(header::COOKIE, joined);
    }
}

/// The request target without scheme and authority.
fn origin_form(uri: &Uri, method: &Method) -> Uri {
    if *method == Method::OPTIONS && uri.path() == "*" {
        return Uri::from_static("*");
    }
    let path = uri.path_and_query().map_or("/", |target| target.as_str());
    if path.starts_with('/') {
        path.parse()
    } else {
        // An absolute request target may have a query without a path.
        format!("/{path}").parse()
    }
    .unwrap_or_else(|_| Uri::from_static("/"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::{Request, Response};

    const HOST: &str = "80-iabcdefghij012345678.e2b.test";

    fn route(mask: Option<&str>) -> Route {
        Route {
            id: "iabcdefghij012345678".parse().unwrap(),
            vsock: "/nowhere".into(),
            traffic_token: Some("secret".into()),
            envd_token: None,
            mask_request_host: mask.map(Into::into),
            https_ports: Vec::new(),
            generation: 1,
            renewal: None,
        }
    }

    fn parts(uri: &str, headers: &[(&str, &str)]) -> request::Parts {
        let mut request = Request::get(uri).body(()).unwrap();
        for (name, value) in headers {
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            request.headers_mut().append(name, value.parse().unwrap());
        }
        request.into_parts().0
    }

    fn sent(mut parts: request::Parts, mask: Option<&str>, port: u16) -> Vec<String> {
        let upgrade = upgrade(&parts);
        to_sandbox(&mut parts, HOST, &route(mask), port, upgrade);
        let mut lines: Vec<_> = parts
            .headers
            .iter()
            .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()))
            .collect();
        lines.sort_unstable();
        lines
    }

    #[test]
    fn hop_by_hop_headers_are_not_forwarded() {
        let parts = parts(
            "/x",
            &[
                ("connection", "close, X-Mine, host, content-length"),
                ("x-mine", "1"),
                ("keep-alive", "timeout=5"),
                ("proxy-connection", "keep-alive"),
                ("transfer-encoding", "chunked"),
                ("te", "gzip"),
                ("expect", "100-continue"),
                ("x-forwarded-for", "1.2.3.4"),
                ("forwarded", "for=1.2.3.4"),
                ("upgrade", "websocket"),
                ("content-length", "5"),
                ("x-other", "2"),
            ],
        );
        let host = format!("host: {HOST}");
        assert_eq!(
            sent(parts, None, 80),
            ["content-length: 5", host.as_str(), "x-other: 2"]
        );
    }

    #[test]
    fn an_upgrade_is_forwarded_unless_it_is_to_http_or_tls() {
        let websocket = parts("/", &[("connection", "Upgrade"), ("upgrade", "websocket")]);
        let lines = sent(websocket, None, 80);
        assert!(lines.contains(&"upgrade: websocket".into()), "{lines:?}");
        assert!(lines.contains(&"connection: upgrade".into()), "{lines:?}");
        for other in ["h2c", "websocket, h2c", "HTTP/2.0", "TLS/1.2"] {
            let other = parts("/", &[("connection", "upgrade"), ("upgrade", other)]);
            let lines = sent(other, None, 80);
            assert_eq!(lines, [format!("host: {HOST}")]);
        }
    }

    #[test]
    fn the_host_is_masked_on_all_ports_but_the_agent_s() {
        let lines = sent(parts("/", &[]), Some("localhost:${PORT}"), 3000);
        let forwarded = format!("x-forwarded-host: {HOST}");
        assert_eq!(lines, ["host: localhost:3000", forwarded.as_str()]);
        let lines = sent(parts("/", &[]), Some("localhost:${PORT}"), 49983);
        assert_eq!(lines, [format!("host: {HOST}")]);
    }

    #[test]
    fn the_traffic_token_is_not_forwarded() {
        let lines = sent(
            parts("/", &[("e2b-traffic-access-token", "secret")]),
            None,
            80,
        );
        assert_eq!(lines, [format!("host: {HOST}")]);
    }

    #[test]
    fn cookies_of_http_2_are_joined_and_te_trailers_is_forwarded() {
        let parts = parts(
            "/",
            &[("cookie", "a=1"), ("cookie", "b=2"), ("te", "trailers")],
        );
        let host = format!("host: {HOST}");
        assert_eq!(
            sent(parts, None, 80),
            [
                "connection: te",
                "cookie: a=1; b=2",
                host.as_str(),
                "te: trailers"
            ]
        );
    }

    #[test]
    fn a_successor_gets_tokens_claims_and_the_host_that_the_client_named() {
        let mut parts = parts(
            "http://80-iabcdefghij012345678.e2b.test/x?y",
            &[
                ("host", "localhost"),
                ("connection", "keep-alive, x-mine"),
                ("x-mine", "1"),
                ("x-api-key", "k"),
                ("e2b-traffic-access-token", "secret"),
                ("x-forwarded-for", "1.2.3.4"),
                ("te", "trailers"),
            ],
        );
        to_successor(&mut parts, HOST, None);
        assert_eq!(parts.uri, "/x?y");
        let headers = &parts.headers;
        assert_eq!(headers[header::HOST], HOST);
        assert_eq!(headers["x-api-key"], "k");
        assert_eq!(headers[TRAFFIC_TOKEN], "secret");
        assert_eq!(headers["x-forwarded-for"], "1.2.3.4");
        assert_eq!(headers[header::TE], "trailers");
        assert!(!headers.contains_key("x-mine"));
    }

    #[test]
    fn the_forwarded_target_has_no_authority() {
        for (uri, expected) in [
            ("http://a.b/c?d=1", "/c?d=1"),
            ("http://a.b?d=1", "/?d=1"),
            ("http://a.b", "/"),
            ("/c%2Fd?e", "/c%2Fd?e"),
        ] {
            let mut parts = parts(uri, &[]);
            to_sandbox(&mut parts, HOST, &route(None), 80, None);
            assert_eq!(parts.uri.to_string(), expected, "{uri}");
        }
    }

    #[test]
    fn hop_by_hop_headers_of_responses_are_not_forwarded() {
        let response = Response::builder()
            .header("connection", "keep-alive, x-mine")
            .header("x-mine", "1")
            .header("transfer-encoding", "chunked")
            .header("content-type", "application/connect+json")
            .body(());
        let mut parts = response.unwrap().into_parts().0;
        to_client(&mut parts);
        assert_eq!(parts.headers.len(), 1);
        assert_eq!(parts.headers["content-type"], "application/connect+json");
    }
}
