//! Environment variables for clients of this server, printed when it starts.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// A server without keys accepts any text. Some versions of the SDKs accept only keys of E2B's form.
const ANY_KEY: &str = "e2b_00";

/// A line for a shell. The SDKs for Python and JavaScript and the command `cube` read the same variables. `addresses`
/// are the server's listening addresses, `domain` is the domain of the sandboxes' host names, and `is_open` means that
/// requests need no key.
pub(super) fn exports(
    addresses: &[SocketAddr],
    is_tls: bool,
    domain: Option<&str>,
    is_open: bool,
) -> Option<String> {
    let key = if is_open {
        format!("E2B_API_KEY={ANY_KEY}")
    } else {
        "E2B_API_KEY=e2b_… # cube-api key new NAME prints one".to_owned()
    };
    // With a domain and TLS, the SDKs derive all addresses from host names, provided that DNS resolves them.
    if let (true, Some(domain)) = (is_tls, domain) {
        return Some(format!("export E2B_DOMAIN={domain} {key}"));
    }
    let scheme = if is_tls { "https" } else { "http" };
    let url = format!("{scheme}://{}", best(addresses)?);
    Some(format!(
        "export E2B_API_URL={url} E2B_SANDBOX_URL={url} {key}"
    ))
}

/// The address for clients on this host: a loopback address if there is one.
fn best(addresses: &[SocketAddr]) -> Option<SocketAddr> {
    let reachable = |address: &SocketAddr| {
        let ip = match address.ip() {
            IpAddr::V4(Ipv4Addr::UNSPECIFIED) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(Ipv6Addr::UNSPECIFIED) => Ipv6Addr::LOCALHOST.into(),
            ip => ip,
        };
        SocketAddr::new(ip, address.port())
    };
    let all: Vec<_> = addresses.iter().map(reachable).collect();
    let local = all.iter().find(|address| address.ip().is_loopback());
    local.or(all.first()).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variables_fit_the_server() {
        let of = |addresses: &[&str], is_tls, domain, is_open| {
            let addresses: Vec<_> = addresses.iter().map(|a| a.parse().unwrap()).collect();
            exports(&addresses, is_tls, domain, is_open).unwrap()
        };
        assert_eq!(
            of(&["127.0.0.1:3000"], false, None, true),
            "export E2B_API_URL=http://127.0.0.1:3000 E2B_SANDBOX_URL=http://127.0.0.1:3000 E2B_API_KEY=e2b_00"
        );
        let keyed = of(
            &["10.1.2.3:80", "0.0.0.0:3000"],
            false,
            Some("e2b.test"),
            false,
        );
        assert!(
            keyed.starts_with("export E2B_API_URL=http://127.0.0.1:3000 "),
            "{keyed}"
        );
        assert!(keyed.contains("cube-api key new"), "{keyed}");
        let remote = of(&["[fd00::1]:8443"], true, None, false);
        assert!(
            remote.contains("E2B_SANDBOX_URL=https://[fd00::1]:8443 "),
            "{remote}"
        );
        let named = of(&["0.0.0.0:8443"], true, Some("e2b.test:8443"), false);
        assert!(
            named.starts_with("export E2B_DOMAIN=e2b.test:8443 E2B_API_KEY="),
            "{named}"
        );
        assert_eq!(exports(&[], false, None, true), None);
    }
}
