//! Determines which sandbox and port a request is for, by its `Host` or by two other headers. Performs no I/O.
//!
//! ```text
//! Host = <port>-<id>.<domain>             ─► that port of that sandbox; headers are ignored
//! other Host, E2b-Sandbox-Id and -Port    ─► the sandbox and port in the headers
//! other Host, neither header              ─► the control plane, unless the path names a sandbox (`by_path`)
//! ```
//! If a domain is configured, every single label below it must be `<port>-<id>`, except `api` and `sandbox`. Otherwise,
//! a label is treated as `<port>-<id>` if it starts with digits and a hyphen.

use std::net::IpAddr;

use axum::http::{HeaderMap, HeaderName, Uri, header};
use model::SandboxId;

/// Header with the id of a sandbox.
pub const SANDBOX_ID: HeaderName = HeaderName::from_static("e2b-sandbox-id");
/// Header with a port of the sandbox.
pub const SANDBOX_PORT: HeaderName = HeaderName::from_static("e2b-sandbox-port");

/// The recipient of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    Sandbox {
        id: SandboxId,
        /// Never 0.
        port: u16,
    },
    /// The control plane of this server.
    Control,
}

/// A request that refers to its sandbox incorrectly. The response is always 400.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// `Host` is missing, repeated or malformed, should be `<port>-<id>.<domain>` and is not, or is not accepted by a
    /// strict server.
    #[error("Invalid host")]
    Host,
    /// The value is not a sandbox id.
    #[error("Invalid sandbox ID")]
    SandboxId,
    /// The value is not a number from 1 to 65535.
    #[error("Invalid sandbox port")]
    Port,
    /// Only one of [`SANDBOX_ID`] and [`SANDBOX_PORT`] is present.
    #[error("missing header")]
    MissingHeader,
    /// [`SANDBOX_ID`] or [`SANDBOX_PORT`] is repeated.
    #[error("header given more than once")]
    RepeatedHeader,
}

/// The host names that this server accepts, and those that belong to sandboxes.
#[derive(Clone, Debug, Default)]
pub struct Hosts {
    domain: Option<String>,
    strict: bool,
}

impl Hosts {
    /// `domain` must not have a port. `None`: sandboxes have host names below any domain.
    #[must_use]
    pub fn new(domain: Option<&str>) -> Self {
        let clean = |name: &str| name.trim_matches('.').to_ascii_lowercase();
        Self {
            domain: domain.map(clean).filter(|name| !name.is_empty()),
            strict: false,
        }
    }

    /// Accepts only IP addresses, `localhost`, the configured domain and names below it. A server without
    /// authentication needs this check: otherwise any web page could reach it through a browser on the same host, under
    /// a name of the page's own domain that resolves to 127.0.0.1 (DNS rebinding).
    #[must_use]
    pub fn strict(mut self) -> Self {
        self.strict = true;
        self
    }

    #[must_use]
    pub fn are_strict(&self) -> bool {
        self.strict
    }

    /// Determines the recipient of a request, unless it is in the path.
    ///
    /// # Errors
    /// Returns [`TargetError`] if the request refers to a sandbox incorrectly.
    pub fn target(&self, uri: &Uri, headers: &HeaderMap) -> Result<Target, TargetError> {
        let name = host_name(&host(uri, headers)?);
        if self.strict && !self.is_own(&name) {
            return Err(TargetError::Host);
        }
        match self.sandbox_label(&name) {
            Some(label) => from_label(&label),
            None => from_headers(headers),
        }
    }

    fn is_own(&self, name: &str) -> bool {
        let is_below = |domain: &str| {
            let start = name.strip_suffix(domain);
            start.is_some_and(|start| start.is_empty() || start.ends_with('.'))
        };
        name == "localhost"
            || name.parse::<IpAddr>().is_ok()
            || self.domain.as_deref().is_some_and(is_below)
    }

    /// The first label of a host name, if the name must belong to a sandbox.
    fn sandbox_label(&self, name: &str) -> Option<String> {
        if name.parse::<IpAddr>().is_ok() {
            return None;
        }
        let (label, rest) = name.split_once('.')?;
        let is_sandbox = match &self.domain {
            Some(domain) => rest == domain && label != "api" && label != "sandbox",
            None => label
                .split_once('-')
                .is_some_and(|(port, _)| is_digits(port)),
        };
        is_sandbox.then(|| label.to_owned())
    }
}

/// The host of a request as the client sent it. The authority of the request target takes precedence over the header
/// (RFC 9112, 3.2.2).
///
/// # Errors
/// Returns [`TargetError::Host`] if there is no host, if the header is repeated, or if the host contains user
/// information.
pub fn host(uri: &Uri, headers: &HeaderMap) -> Result<String, TargetError> {
    let mut named = headers.get_all(header::HOST).iter();
    let first = named.next();
    if named.next().is_some() {
        return Err(TargetError::Host);
    }
    let header = first
        .map(|value| value.to_str().map_err(|_| TargetError::Host))
        .transpose()?;
    let host = match uri.authority() {
        Some(authority) => authority.as_str(),
        None => header.ok_or(TargetError::Host)?,
    };
    if host.is_empty() || host.contains('@') {
        Err(TargetError::Host)
    } else {
        Ok(host.to_owned())
    }
}

/// A host without port, brackets and trailing dot, in lower case.
fn host_name(host: &str) -> String {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => match host.rsplit_once(':') {
            Some((name, port)) if port.is_empty() || is_digits(port) => name,
            _ => host,
        },
    };
    name.trim_end_matches('.').to_ascii_lowercase()
}

fn from_label(label: &str) -> Result<Target, TargetError> {
    let (port, id) = label.split_once('-').ok_or(TargetError::Host)?;
    Ok(Target::Sandbox {
        port: parse_port(port)?,
        id: id.parse().map_err(|_| TargetError::SandboxId)?,
    })
}

fn from_headers(headers: &HeaderMap) -> Result<Target, TargetError> {
    let id = single(headers, &SANDBOX_ID)?;
    let port = single(headers, &SANDBOX_PORT)?;
    match (id, port) {
        (None, None) => Ok(Target::Control),
        (Some(id), Some(port)) => Ok(Target::Sandbox {
            id: id.parse().map_err(|_| TargetError::SandboxId)?,
            port: parse_port(port)?,
        }),
        _ => Err(TargetError::MissingHeader),
    }
}

/// The single value of a header; an empty value counts as absent.
fn single<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, TargetError> {
    let mut values = headers.get_all(name).iter();
    let first = values.next();
    if values.next().is_some() {
        return Err(TargetError::RepeatedHeader);
    }
    // A value that is not text is replaced by `?`, which is neither an id nor a port, so both parsers refuse it.
    Ok(first
        .map(|value| value.to_str().unwrap_or("?"))
        .filter(|value| !value.is_empty()))
}

pub(super) fn parse_port(text: &str) -> Result<u16, TargetError> {
    match (is_digits(text), text.parse()) {
        (true, Ok(port)) if port != 0 => Ok(port),
        _ => Err(TargetError::Port),
    }
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;
    use proptest::prelude::*;

    const ID: &str = "iabcdefghij012345678";

    fn sandbox(port: u16) -> Result<Target, TargetError> {
        let id = ID.parse().unwrap();
        Ok(Target::Sandbox { id, port })
    }

    fn find(
        domain: Option<&str>,
        host: &str,
        extra: &[(&str, &str)],
    ) -> Result<Target, TargetError> {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, HeaderValue::from_str(host).unwrap());
        for (name, value) in extra {
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            headers.append(name, HeaderValue::from_str(value).unwrap());
        }
        Hosts::new(domain).target(&Uri::from_static("/"), &headers)
    }

    #[test]
    fn a_host_name_selects_port_and_sandbox() {
        for host in [
            format!("8080-{ID}.e2b.test"),
            format!("8080-{ID}.e2b.test:8443"),
            format!("8080-{}.E2B.Test.", ID.to_uppercase()),
        ] {
            assert_eq!(find(Some("e2b.test"), &host, &[]), sandbox(8080), "{host}");
            assert_eq!(find(None, &host, &[]), sandbox(8080), "{host}");
        }
    }

    #[test]
    fn other_host_names_select_the_control_plane() {
        for host in [
            "127.0.0.1:3000",
            "localhost",
            "[::1]:3000",
            "[::1]",
            "api.e2b.test",
            "e2b.test",
            "elsewhere.example",
        ] {
            for domain in [Some("e2b.test"), None] {
                assert_eq!(find(domain, host, &[]), Ok(Target::Control), "{host}");
            }
        }
        // A label below a foreign domain does not select a sandbox.
        let foreign = format!("80-{ID}.elsewhere.example");
        assert_eq!(find(Some("e2b.test"), &foreign, &[]), Ok(Target::Control));
    }

    #[test]
    fn headers_select_a_sandbox_unless_the_host_does() {
        let both = [("e2b-sandbox-id", ID), ("e2b-sandbox-port", "49983")];
        for host in ["127.0.0.1:3000", "localhost", "sandbox.e2b.test", "[::1]:1"] {
            assert_eq!(
                find(Some("e2b.test"), host, &both),
                sandbox(49983),
                "{host}"
            );
        }
        let host = format!("80-{ID}.e2b.test");
        assert_eq!(find(Some("e2b.test"), &host, &both), sandbox(80));
    }

    #[test]
    fn each_incorrect_name_of_a_sandbox_has_its_own_error() {
        let hosts = [
            ("web.e2b.test", TargetError::Host),
            ("web-app.e2b.test", TargetError::Port),
            ("80-nobody.e2b.test", TargetError::SandboxId),
            ("0-iabcdefghij012345678.e2b.test", TargetError::Port),
            ("65536-iabcdefghij012345678.e2b.test", TargetError::Port),
            ("+80-iabcdefghij012345678.e2b.test", TargetError::Port),
            ("80-iabcdefghij012345678-x.e2b.test", TargetError::SandboxId),
            ("user@80-iabcdefghij012345678.e2b.test", TargetError::Host),
        ];
        for (host, error) in hosts {
            assert_eq!(find(Some("e2b.test"), host, &[]), Err(error), "{host}");
        }
        let id = ("e2b-sandbox-id", ID);
        let port = ("e2b-sandbox-port", "80");
        let headers = [
            (vec![id], TargetError::MissingHeader),
            (vec![port], TargetError::MissingHeader),
            (vec![id, port, id], TargetError::RepeatedHeader),
            (vec![("e2b-sandbox-id", "x"), port], TargetError::SandboxId),
            (vec![id, ("e2b-sandbox-port", "x")], TargetError::Port),
        ];
        for (headers, error) in headers {
            assert_eq!(find(None, "localhost", &headers), Err(error));
        }
        let none = Hosts::default().target(&Uri::from_static("/"), &HeaderMap::new());
        assert_eq!(none, Err(TargetError::Host));
        assert_eq!(
            find(None, "localhost", &[("host", "b")]),
            Err(TargetError::Host)
        );
    }

    #[test]
    fn a_strict_server_refuses_foreign_host_names() {
        let ask = |domain, host: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, HeaderValue::from_str(host).unwrap());
            let hosts = Hosts::new(domain).strict();
            hosts.target(&Uri::from_static("/"), &headers)
        };
        for host in [
            "127.0.0.1:3000",
            "localhost",
            "[::1]:1",
            "e2b.test",
            "api.e2b.test",
        ] {
            assert_eq!(ask(Some("e2b.test"), host), Ok(Target::Control), "{host}");
        }
        let below = format!("80-{ID}.e2b.test");
        assert_eq!(ask(Some("e2b.test"), &below), sandbox(80));
        for host in [
            "evil.example:3000",
            "evile2b.test",
            "localhost.evil.example",
            &below,
        ] {
            assert_eq!(ask(None, host), Err(TargetError::Host), "{host}");
        }
        assert_eq!(
            ask(Some("e2b.test"), "evile2b.test"),
            Err(TargetError::Host)
        );
    }

    #[test]
    fn an_absolute_target_takes_precedence_over_the_host_header() {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, HeaderValue::from_static("localhost"));
        let uri: Uri = format!("http://80-{ID}.e2b.test/x").parse().unwrap();
        assert_eq!(Hosts::new(None).target(&uri, &headers), sandbox(80));
    }

    proptest! {
        #[test]
        fn a_selected_port_and_id_are_always_part_of_the_host(host in "[ -~]{0,80}", domain in proptest::option::of("[a-z.]{0,10}")) {
            let decided = find(domain.as_deref(), &host, &[]);
            if let Ok(Target::Sandbox { id, port }) = decided {
                let start = format!("{port:0>1}-{id}.");
                prop_assert!(host.to_ascii_lowercase().contains(&start[1..]), "{}", host);
            }
        }

        #[test]
        fn every_port_and_id_can_be_selected_by_a_host_name(bytes: [u8; 19], port in 1..=u16::MAX, tail in "(:[0-9]{1,5})?") {
            let id = SandboxId::from_random(bytes);
            let host = format!("{port}-{id}.e2b.test{tail}");
            prop_assert_eq!(find(Some("e2b.test"), &host, &[]), Ok(Target::Sandbox { id, port }));
        }
    }
}
