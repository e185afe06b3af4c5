//! Determines the host of a request. The result must be unambiguous: a request that a server could interpret
//! differently is refused.

use egress::name::{HostName, HostPort};
use hyper::{
    Method, StatusCode, Version,
    header::{HOST, HeaderMap},
    http::request::Parts,
};

use super::answer::Refusal;

/// The host of a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) name: HostName,
    /// The port in `Host` or `:authority`, which is the flow's.
    pub(crate) port: Option<u16>,
}

impl Target {
    /// The value of `Host` or `:authority` for the server.
    pub(crate) fn authority(&self) -> String {
        match self.port {
            Some(port) => format!("{}:{port}", self.name),
            None => self.name.to_string(),
        }
    }
}

/// # Errors
/// Returns a refusal if the request is for a proxy (CONNECT, absolute form), does not have exactly one host, or is for
/// a port other than the connection's.
pub(crate) fn of_request(request: &Parts, scheme: &str, port: u16) -> Result<Target, Refusal> {
    let bad = |reason: &str| Refusal::closing(StatusCode::BAD_REQUEST, reason);
    match request.method {
        Method::CONNECT => {
            return Err(bad(
                "CONNECT is not supported: connect to the server itself",
            ));
        }
        // A server that echoes the request would show the rule's headers to the guest.
        Method::TRACE => {
            let reason = "TRACE is not supported";
            return Err(Refusal::closing(StatusCode::METHOD_NOT_ALLOWED, reason));
        }
        _ => {}
    }
    let host = host_header(&request.headers)?;
    let uri = &request.uri;
    let target = if request.version == Version::HTTP_2 {
        if uri.scheme_str() != Some(scheme) {
            return Err(bad(":scheme differs from the connection's scheme"));
        }
        let authority = uri.authority().map(|authority| parse(authority.as_str()));
        match (authority.transpose()?, host) {
            (Some(authority), Some(host)) if authority != host => {
                return Err(bad("Host and :authority are different"));
            }
            (Some(target), _) | (None, Some(target)) => target,
            (None, None) => return Err(bad("the request has neither :authority nor Host")),
        }
    } else {
        if uri.scheme().is_some() || uri.authority().is_some() {
            return Err(bad(
                "the request's target is a whole URL: send the path, and the host in Host",
            ));
        }
        host.ok_or_else(|| bad("the request has no Host"))?
    };
    let is_path =
        uri.path().starts_with('/') || (uri.path() == "*" && request.method == Method::OPTIONS);
    if !is_path {
        return Err(bad("the request's target is not a path"));
    }
    if target.port.is_some_and(|given| given != port) {
        let reason = "the port in the request's host differs from the connection's port";
        return Err(Refusal::closing(StatusCode::MISDIRECTED_REQUEST, reason));
    }
    Ok(Target {
        name: target.name,
        port: target.port,
    })
}

fn host_header(headers: &HeaderMap) -> Result<Option<HostPort>, Refusal> {
    let mut hosts = headers.get_all(HOST).iter();
    let host = hosts.next();
    if hosts.next().is_some() {
        return Err(Refusal::closing(
            StatusCode::BAD_REQUEST,
            "the request has more than one Host",
        ));
    }
    let text = host.map(|host| host.to_str().unwrap_or("\u{fffd}"));
    text.map(parse).transpose()
}

fn parse(text: &str) -> Result<HostPort, Refusal> {
    HostPort::parse(text).map_err(|error| {
        let reason = format!("the request's host cannot be used: {error}");
        Refusal::closing(StatusCode::BAD_REQUEST, reason)
    })
}

#[cfg(test)]
mod tests {
    use hyper::Request;

    use super::*;

    fn target(version: Version, method: &str, uri: &str, hosts: &[&str]) -> Result<String, u16> {
        let mut request = Request::builder().version(version).method(method).uri(uri);
        for host in hosts {
            request = request.header(HOST, *host);
        }
        let (parts, ()) = request.body(()).unwrap().into_parts();
        let target = of_request(&parts, "https", 443);
        target
            .map(|target| target.authority())
            .map_err(|refusal| refusal.status.as_u16())
    }

    #[test]
    fn http1_needs_exactly_one_host() {
        let target = |uri, hosts: &[&str]| target(Version::HTTP_11, "GET", uri, hosts);
        assert_eq!(target("/", &["API.test."]), Ok("api.test".to_owned()));
        assert_eq!(
            target("/", &["api.test:443"]),
            Ok("api.test:443".to_owned())
        );
        assert_eq!(target("/", &["api.test:80"]), Err(421));
        assert_eq!(target("/", &[]), Err(400));
        assert_eq!(target("/", &["api.test", "api.test"]), Err(400));
        assert_eq!(target("/", &["api.test, b.test"]), Err(400));
        assert_eq!(target("/", &["10.0.0.1"]), Err(400));
        assert_eq!(target("/", &["user@api.test"]), Err(400));
        assert_eq!(target("https://api.test/", &["api.test"]), Err(400));
        assert_eq!(
            target("//b.test/", &["api.test"]),
            Ok("api.test".to_owned())
        );
        assert_eq!(target("*", &["api.test"]), Err(400));
    }

    #[test]
    fn other_methods_and_forms_are_refused() {
        let target = |method, uri| target(Version::HTTP_11, method, uri, &["api.test"]);
        assert_eq!(target("OPTIONS", "*"), Ok("api.test".to_owned()));
        assert_eq!(target("CONNECT", "api.test:443"), Err(400));
        assert_eq!(target("TRACE", "/"), Err(405));
    }

    #[test]
    fn http2_authority_and_host_must_agree() {
        let target = |uri, hosts: &[&str]| target(Version::HTTP_2, "GET", uri, hosts);
        assert_eq!(target("https://API.test/", &[]), Ok("api.test".to_owned()));
        assert_eq!(
            target("https://api.test/", &["API.test"]),
            Ok("api.test".to_owned())
        );
        assert_eq!(target("https://api.test/", &["b.test"]), Err(400));
        assert_eq!(target("https://api.test/", &["api.test:443"]), Err(400));
        assert_eq!(target("http://api.test/", &[]), Err(400));
        assert_eq!(target("https://u@api.test/", &[]), Err(400));
        assert_eq!(target("https://[::1]/", &[]), Err(400));
    }
}
