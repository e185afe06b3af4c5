//! Requests with their sandbox in the path, for hosts without wildcard names: `/sandbox/<id>/<port>/<path>` is `<path>`
//! on that port. Performs no I/O.
//!
//! Only the plain spelling of the prefix is recognized. Any other spelling is a path of the control plane, which has
//! none below `/sandbox/`. All rules for paths within sandboxes apply to the rest of the path after the prefix.
//!
//! Pages of all sandboxes share the origin of the control plane. A server without keys treats requests of its own
//! origin as its user's, so responses from sandboxes give their pages an opaque origin. Fields that act on the whole
//! origin are removed, and cookies are confined to the sandbox's prefix ([`isolate`]).

use axum::http::uri::PathAndQuery;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Uri, header};
use model::SandboxId;

use super::target::parse_port;
use super::{TargetError, cookie};

const PREFIX: &str = "/sandbox/";
/// A page with this policy has an opaque origin, which the control plane refuses.
const OPAQUE: HeaderValue = HeaderValue::from_static(
    "sandbox allow-downloads allow-forms allow-modals allow-popups allow-scripts",
);
/// Response fields that a browser applies beyond their own path.
const OF_ORIGIN: [HeaderName; 16] = [
    // Extends the paths handled by a page's service worker, here to those of other sandboxes.
    HeaderName::from_static("service-worker-allowed"),
    // With the policy of the console's pages, a page could keep access to a window in which it opens the console.
    HeaderName::from_static("cross-origin-opener-policy"),
    HeaderName::from_static("cross-origin-opener-policy-report-only"),
    HeaderName::from_static("origin-agent-cluster"),
    // Deletes cookies, storage and caches of the host.
    HeaderName::from_static("clear-site-data"),
    // Redirect later requests to the host, or make them fail.
    HeaderName::from_static("alt-svc"),
    HeaderName::from_static("strict-transport-security"),
    HeaderName::from_static("public-key-pins"),
    HeaderName::from_static("public-key-pins-report-only"),
    HeaderName::from_static("expect-ct"),
    // Report later requests to the host, with their URLs.
    HeaderName::from_static("nel"),
    HeaderName::from_static("report-to"),
    // Change what the browser sends to the host.
    HeaderName::from_static("accept-ch"),
    HeaderName::from_static("use-as-dictionary"),
    HeaderName::from_static("set-login"),
    HeaderName::from_static("set-cookie2"),
];

/// The sandbox and port in a path, and the request target within the sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ByPath {
    pub id: SandboxId,
    pub port: u16,
    /// The prefix of the path that contains them, as the client spelled it.
    pub prefix: String,
    pub uri: Uri,
}

/// Parses the path. `None` if it refers to no sandbox.
pub fn by_path(uri: &Uri) -> Option<Result<ByPath, TargetError>> {
    let named = uri.path().strip_prefix(PREFIX)?;
    (!named.is_empty()).then(|| read(named, uri))
}

fn read(named: &str, uri: &Uri) -> Result<ByPath, TargetError> {
    let (name, rest) = named.split_once('/').unwrap_or((named, ""));
    let id = name.parse().map_err(|_| TargetError::SandboxId)?;
    let end = rest.find('/').unwrap_or(rest.len());
    let (digits, path) = rest.split_at(end);
    let port = parse_port(digits)?;
    let prefix = format!("{PREFIX}{name}/{digits}");
    let path = if path.is_empty() { "/" } else { path };
    let target = match uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    };
    let mut parts = uri.clone().into_parts();
    let target = PathAndQuery::try_from(target).map_err(|_| TargetError::Host)?;
    parts.path_and_query = Some(target);
    let uri = Uri::from_parts(parts).map_err(|_| TargetError::Host)?;
    Ok(ByPath {
        id,
        port,
        prefix,
        uri,
    })
}

/// Whether pages of sandboxes may have the origin of the control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The control plane needs keys, which pages do not have.
    Shared,
    Opaque,
}

/// Restricts the effects of a sandbox's response in the browser to the sandbox's own paths. Its cookies are confined to
/// `prefix`. Without a prefix, all cookies are removed.
pub fn isolate(headers: &mut HeaderMap, origin: Origin, prefix: Option<&str>) {
    for name in OF_ORIGIN {
        headers.remove(name);
    }
    cookie::confine(headers, prefix);
    if origin == Origin::Opaque {
        // The sandbox's own policies stay in force, because browsers enforce all of them.
        headers.append(header::CONTENT_SECURITY_POLICY, OPAQUE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ID: &str = "iabcdefghij012345678";

    fn found(uri: &str) -> Option<Result<(u16, String), TargetError>> {
        let found = by_path(&uri.parse().unwrap())?;
        Some(found.map(|found| {
            assert_eq!(found.id.as_str(), ID);
            assert!(uri.contains(&found.prefix), "{}", found.prefix);
            (found.port, found.uri.to_string())
        }))
    }

    #[test]
    fn the_path_names_sandbox_and_port() {
        for (path, port, expected) in [
            ("80", 80, "/"),
            ("80/", 80, "/"),
            ("8080/a/b?c=/d", 8080, "/a/b?c=/d"),
            ("80?q", 80, "/?q"),
            ("80//a", 80, "//a"),
            // Nothing within the sandbox's path is decoded or normalized.
            ("49983/%2e%2e/%69nit", 49983, "/%2e%2e/%69nit"),
            ("80/../81/x", 80, "/../81/x"),
            ("80/sandbox/x/y", 80, "/sandbox/x/y"),
        ] {
            let uri = format!("/sandbox/{ID}/{path}");
            assert_eq!(found(&uri), Some(Ok((port, expected.to_owned()))), "{uri}");
        }
        let absolute = format!("https://e2b.test/sandbox/{ID}/1/x");
        assert_eq!(
            found(&absolute),
            Some(Ok((1, "https://e2b.test/x".to_owned())))
        );
    }

    #[test]
    fn other_paths_are_the_control_planes() {
        for path in [
            "/",
            "*",
            "/sandbox",
            "/sandbox/",
            "/sandboxes",
            "/sandboxes/x/y",
            "//sandbox/x/80",
            "/Sandbox/x/80",
            "/%73andbox/x/80",
            "/x/../sandbox/x/80",
        ] {
            assert_eq!(by_path(&path.parse().unwrap()), None, "{path}");
        }
    }

    #[test]
    fn an_incorrect_name_is_refused() {
        for (path, error) in [
            ("x/80/", TargetError::SandboxId),
            ("/80", TargetError::SandboxId),
            ("iabcdefghij012345678%2f80/", TargetError::SandboxId),
            (ID, TargetError::Port),
            ("iabcdefghij012345678/", TargetError::Port),
            ("iabcdefghij012345678//80", TargetError::Port),
            ("iabcdefghij012345678/0/", TargetError::Port),
            ("iabcdefghij012345678/65536/", TargetError::Port),
            ("iabcdefghij012345678/8%30/", TargetError::Port),
            ("iabcdefghij012345678/+80", TargetError::Port),
        ] {
            assert_eq!(
                found(&format!("/sandbox/{path}")),
                Some(Err(error)),
                "{path}"
            );
        }
    }

    #[test]
    fn a_page_gets_an_origin_of_its_own_from_a_server_without_keys() {
        let mut headers = HeaderMap::new();
        headers.append(
            "content-security-policy",
            HeaderValue::from_static("img-src *"),
        );
        for name in OF_ORIGIN {
            headers.append(name.clone(), HeaderValue::from_static("one"));
            headers.append(name, HeaderValue::from_static("two"));
        }
        isolate(&mut headers, Origin::Shared, None);
        assert_eq!(headers.len(), 1);
        isolate(&mut headers, Origin::Opaque, None);
        let policies: Vec<_> = headers.get_all("content-security-policy").iter().collect();
        assert_eq!(policies, ["img-src *", OPAQUE.to_str().unwrap()]);
        assert!(!OPAQUE.to_str().unwrap().contains("allow-same-origin"));
    }

    proptest! {
        #[test]
        fn every_target_survives(path in "(/[!-~&&[^?#/]]{0,8}){0,4}", query in proptest::option::of("[!-~&&[^#]]{0,8}"), port in 1..=u16::MAX) {
            let rest = match query {
                Some(query) => format!("{path}?{query}"),
                None => path.clone(),
            };
            if let Ok(uri) = format!("/sandbox/{ID}/{port}{rest}").parse::<Uri>() {
                let found = by_path(&uri).unwrap().unwrap();
                let expected = if path.is_empty() { format!("/{rest}") } else { rest };
                prop_assert_eq!((found.port, found.uri.to_string()), (port, expected));
            }
        }
    }
}
