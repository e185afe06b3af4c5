//! Which network options this server can honour.
//!
//! Sandboxes have no network: nothing goes out, whatever is asked. So what forbids is granted, what would open a way
//! out is refused with the option's name, and what concerns the way in (`allowPublicTraffic`, `maskRequestHost`) is
//! honoured by the proxy. Clients that say nothing get no way out either.

use std::net::IpAddr;

use api_types::rest::{NetworkConfig, NetworkUpdate};

use super::ApiError;

/// How a client's `allow_internet_access: true` is to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    /// Somebody asked for it.
    Explicit,
    /// Clients of the older route send it unasked.
    Habit,
}

/// Everything that would fail on the wire of a network is checked, then what this server cannot honour.
pub(super) fn check(
    network: &NetworkConfig,
    allow_internet_access: Option<bool>,
    wish: Wish,
) -> Result<(), ApiError> {
    let allowed = network.allow_out.as_deref().unwrap_or_default();
    let denied = network.deny_out.as_deref().unwrap_or_default();
    for entry in denied {
        if !is_address(entry) {
            let wrong = format!("denyOut has {entry:?}; it takes addresses and CIDR blocks");
            return Err(ApiError::BadRequest(wrong));
        }
    }
    let denies_all = denied.iter().any(|entry| entry == "0.0.0.0/0");
    let has_domain = allowed.iter().any(|entry| !is_address(entry));
    if has_domain && !denies_all && allow_internet_access != Some(false) {
        let wrong = "allowOut with a domain needs denyOut with 0.0.0.0/0";
        return Err(ApiError::BadRequest(wrong.into()));
    }
    if allow_internet_access == Some(true) && wish == Wish::Explicit {
        return Err(unsupported("allow_internet_access: true"));
    }
    if !allowed.is_empty() {
        return Err(unsupported("network.allowOut"));
    }
    if network.egress_proxy.as_ref().is_some_and(|p| !p.is_null()) {
        return Err(unsupported("network.egressProxy"));
    }
    if network
        .rules
        .as_ref()
        .is_some_and(|rules| !rules.is_empty())
    {
        return Err(unsupported("network.rules"));
    }
    let https_ports = network.https_ports.as_deref().unwrap_or_default();
    match https_ports {
        [] => Ok(()),
        _ => Err(ApiError::NotImplemented(
            "network.httpsPorts: services in a sandbox are reached over plain HTTP".into(),
        )),
    }
}

/// The same for an update, and what it replaces.
pub(super) fn check_update(update: NetworkUpdate) -> Result<NetworkConfig, ApiError> {
    let network = NetworkConfig {
        allow_out: update.allow_out,
        deny_out: update.deny_out,
        dns_servers: update.dns_servers,
        egress_proxy: update.egress_proxy,
        rules: update.rules,
        ..NetworkConfig::default()
    };
    check(&network, update.allow_internet_access, Wish::Explicit)?;
    Ok(network)
}

fn unsupported(option: &str) -> ApiError {
    ApiError::NotImplemented(format!(
        "{option}: sandboxes of this server have no network, so nothing can be let out"
    ))
}

/// An IP address, or a CIDR block.
fn is_address(entry: &str) -> bool {
    let (address, bits) = match entry.split_once('/') {
        Some((address, bits)) => (address, Some(bits)),
        None => (entry, None),
    };
    let Ok(address) = address.parse::<IpAddr>() else {
        return false;
    };
    let most = if address.is_ipv4() { 32 } else { 128 };
    bits.is_none_or(|bits| bits.parse::<u8>().is_ok_and(|bits| bits <= most))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(network: &NetworkConfig, allow: Option<bool>, wish: Wish) -> u16 {
        check(network, allow, wish).map_or_else(|error| error.status().as_u16(), |()| 204)
    }

    fn list(entries: &[&str]) -> Option<Vec<String>> {
        Some(entries.iter().map(|e| (*e).to_owned()).collect())
    }

    #[test]
    fn what_forbids_is_granted_and_what_opens_is_refused() {
        let none = NetworkConfig::default();
        assert_eq!(status(&none, None, Wish::Explicit), 204);
        assert_eq!(status(&none, Some(false), Wish::Explicit), 204);
        assert_eq!(status(&none, Some(true), Wish::Explicit), 501);
        assert_eq!(status(&none, Some(true), Wish::Habit), 204);
        let deny = NetworkConfig {
            deny_out: list(&["0.0.0.0/0", "10.0.0.1", "fd00::/8"]),
            mask_request_host: Some("localhost:${PORT}".into()),
            allow_public_traffic: Some(false),
            ..none.clone()
        };
        assert_eq!(status(&deny, None, Wish::Explicit), 204);
        let allow = NetworkConfig {
            allow_out: list(&["8.8.8.8"]),
            ..deny.clone()
        };
        assert_eq!(status(&allow, None, Wish::Explicit), 501);
        let proxy = NetworkConfig {
            egress_proxy: Some(serde_json::json!({"address": "h:1"})),
            ..none.clone()
        };
        assert_eq!(status(&proxy, None, Wish::Explicit), 501);
        let ports = NetworkConfig {
            https_ports: Some(vec![8443]),
            ..none
        };
        assert_eq!(status(&ports, None, Wish::Explicit), 501);
    }

    #[test]
    fn what_is_wrong_anywhere_is_a_bad_request() {
        let domain = NetworkConfig {
            allow_out: list(&["*.example.com"]),
            ..NetworkConfig::default()
        };
        assert_eq!(status(&domain, None, Wish::Explicit), 400);
        for wrong in ["example.com", "10.0.0.0/33", "10.0.0.0/", "fd00::/129"] {
            let deny = NetworkConfig {
                deny_out: list(&[wrong]),
                ..NetworkConfig::default()
            };
            assert_eq!(status(&deny, None, Wish::Explicit), 400, "{wrong}");
        }
    }

    #[test]
    fn an_update_of_nothing_clears() {
        let cleared = check_update(NetworkUpdate::default()).unwrap();
        assert_eq!(cleared, NetworkConfig::default());
    }
}
