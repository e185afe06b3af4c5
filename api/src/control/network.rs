//! Translates E2B's network options to a policy. Performs no I/O, except that it looks up the routes to DNS servers and
//! proxies.
//!
//! Rules of E2B: `allowOut` takes precedence over `denyOut`, regardless of prefix lengths. An entry of `allowOut` that
//! is neither an address nor a CIDR block is a domain; domains are valid only if all traffic is denied. E2B writes all
//! traffic as `0.0.0.0/0`, which therefore includes IPv6 here. `allow_internet_access: false` has the effect of all
//! traffic in `denyOut`; `true` allows the internet by default; if the option is absent, the server's default policy
//! applies.
//!
//! The proxy implements the options for inbound traffic (`allowPublicTraffic`, `maskRequestHost`, `httpsPorts`).

use std::net::{IpAddr, SocketAddr};

use envd::ENVD_PORT;
use ipnet::IpNet;
use netisolation::{DefaultEgress, ForbiddenAddresses, NamePattern, Policy, RuleAction, canonical};
use rest::{NetworkConfig, NetworkUpdate};

use super::{app::App, error::ApiError};
use crate::{
    egress::socks,
    network::{EgressConfig, Rewriting},
    rules::{RuleError, Rules},
    secrets::{SecretError, Secrets},
};

/// Maximum number of entries in `allowOut`, and in `denyOut`.
const MAX_ENTRIES: usize = 1000;
/// Maximum number of entries in `dnsServers`.
const MAX_DNS_SERVERS: usize = 8;
const DNS_PORT: u16 = 53;
/// Maximum number of entries in `httpsPorts`, as in E2B.
const MAX_HTTPS_PORTS: usize = 128;

/// Where `allow_internet_access: true` in a request comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OptionSource {
    /// The client chose the value.
    Chosen,
    /// The clients of the older route send `true` by default, so `true` is ignored.
    ClientDefault,
}

/// The value of `allow_internet_access` that the client chose, without client defaults.
pub(super) fn chosen_access(
    allow_internet_access: Option<bool>,
    source: OptionSource,
) -> Option<bool> {
    match source {
        OptionSource::Chosen => allow_internet_access,
        OptionSource::ClientDefault => allow_internet_access.filter(|allow| !allow),
    }
}

/// The policy that results from the options. `allow_internet_access` must be the result of [`chosen_access`].
///
/// # Errors
/// Returns an error with status 400 for invalid, forbidden or too many entries and for domains without a denial of all
/// traffic, and with status 501 for options that this server does not support. The message names the entry or option.
pub(super) fn policy_of(
    network: &NetworkConfig,
    allow_internet_access: Option<bool>,
    egress: &EgressConfig,
) -> Result<Policy, ApiError> {
    let mut denied = denied_blocks(network)?;
    if allow_internet_access == Some(false) {
        denied.extend(all_traffic());
    }
    let (allowed, names) = allowed_of(network)?;
    let denies_all = all_traffic().iter().all(|all| denied.contains(all));
    if !names.is_empty() && !denies_all {
        return Err(wrong(
            "allowOut has a domain, so denyOut must have ALL_TRAFFIC (0.0.0.0/0): \
             nothing is blocked otherwise"
                .into(),
        ));
    }
    let dns_servers = dns_servers(network, &egress.forbidden)?;
    check_https_ports(network)?;
    let hands_all = has_proxy(network, egress)?;
    let rules = rules_of(network, egress.rewriting)?;
    let default = match allow_internet_access {
        Some(true) => DefaultEgress::Internet,
        Some(false) | None => egress.default,
    };
    Ok(Policy {
        names,
        dns_servers,
        ruled: rules.ruled(),
        hands_all,
        ..Policy::of_lists(default, &denied, &allowed)
    })
}

fn denied_blocks(network: &NetworkConfig) -> Result<Vec<IpNet>, ApiError> {
    let entries = limited("denyOut", network.deny_out.as_deref(), MAX_ENTRIES)?;
    let mut denied = Vec::with_capacity(entries.len());
    for entry in entries {
        let block = block(entry).ok_or_else(|| {
            wrong(format!(
                "invalid denied CIDR {entry:.64}: denyOut takes addresses and CIDR blocks"
            ))
        })?;
        denied.extend(widened(block));
    }
    Ok(denied)
}

fn allowed_of(network: &NetworkConfig) -> Result<(Vec<IpNet>, Vec<NamePattern>), ApiError> {
    let entries = limited("allowOut", network.allow_out.as_deref(), MAX_ENTRIES)?;
    let mut blocks = Vec::with_capacity(entries.len());
    let mut names = Vec::new();
    for entry in entries {
        match block(entry) {
            Some(block) => blocks.extend(widened(block)),
            None => names.push(name(entry)?),
        }
    }
    Ok((blocks, names))
}

fn name(entry: &str) -> Result<NamePattern, ApiError> {
    entry
        .parse()
        .map_err(|error| wrong(format!("invalid allowed domain: {error}")))
}

fn dns_servers(
    network: &NetworkConfig,
    forbidden: &ForbiddenAddresses,
) -> Result<Vec<SocketAddr>, ApiError> {
    let entries = limited(
        "dnsServers",
        network.dns_servers.as_deref(),
        MAX_DNS_SERVERS,
    )?;
    let server = |entry: &String| {
        let address: IpAddr = entry.parse().map_err(|_| {
            wrong(format!(
                "invalid dnsServers entry {entry:.64}: use an IP address"
            ))
        })?;
        let server = SocketAddr::new(address, DNS_PORT);
        forbidden.check_connection(server).map_err(|why| {
            wrong(format!(
                "invalid dnsServers entry {entry:.64}: {why}: the operator denies it to all sandboxes"
            ))
        })?;
        Ok(server)
    };
    entries.iter().map(server).collect()
}

/// The ports of the sandbox to which the proxy speaks TLS.
fn check_https_ports(network: &NetworkConfig) -> Result<(), ApiError> {
    let ports = network.https_ports.as_deref().unwrap_or_default();
    if ports.len() > MAX_HTTPS_PORTS {
        let count = ports.len();
        return Err(wrong(format!(
            "httpsPorts has {count} entries; at most {MAX_HTTPS_PORTS} are allowed"
        )));
    }
    match ports.iter().find(|port| [0, ENVD_PORT].contains(port)) {
        Some(0) => Err(wrong("invalid httpsPorts entry 0".into())),
        Some(port) => Err(wrong(format!(
            "invalid httpsPorts entry {port}: this is the port of the sandbox's agent"
        ))),
        None => Ok(()),
    }
}

/// Whether all connections leave through the sandbox's proxy.
fn has_proxy(network: &NetworkConfig, egress: &EgressConfig) -> Result<bool, ApiError> {
    let Some(option) = network.egress_proxy.as_ref().filter(|p| !p.is_null()) else {
        return Ok(false);
    };
    socks::check(option, &egress.forbidden).map_err(|why| wrong(why.to_string()))?;
    match egress.rewriting {
        Rewriting::On => Ok(true),
        Rewriting::Off => Err(ApiError::NotImplemented(
            "network.egressProxy: this server runs without cube-egress, which connects to proxies"
                .into(),
        )),
    }
}

fn rules_of(network: &NetworkConfig, rewriting: Rewriting) -> Result<Rules, ApiError> {
    let rules = network.rules.clone().unwrap_or_default();
    let rules = Rules::parse(&rules).map_err(|why| match why {
        RuleError::Invalid(why) => wrong(why),
        RuleError::Unsupported(why) => ApiError::NotImplemented(why),
    })?;
    match rewriting {
        Rewriting::Off if !rules.ruled().is_empty() => Err(ApiError::NotImplemented(
            "network.rules: this server runs without cube-egress, which rewrites outbound requests"
                .into(),
        )),
        Rewriting::Off | Rewriting::On => Ok(rules),
    }
}

/// Refuses rules that would send a secret to a host that the secret is not meant for.
pub(super) fn check_secrets(
    network: &NetworkConfig,
    egress: Option<&EgressConfig>,
    secrets: &Secrets,
) -> Result<(), ApiError> {
    let rewriting = egress.map_or(Rewriting::Off, |egress| egress.rewriting);
    let rules = rules_of(network, rewriting)?;
    for (host, secret) in rules.uses() {
        secrets.check_host(secret, host)?;
    }
    Ok(())
}

fn limited<'a>(
    option: &str,
    entries: Option<&'a [String]>,
    most: usize,
) -> Result<&'a [String], ApiError> {
    let entries = entries.unwrap_or_default();
    match entries.len() {
        count if count > most => Err(wrong(format!(
            "{option} has {count} entries; at most {most} are allowed"
        ))),
        _ => Ok(entries),
    }
}

/// Parses an address or a CIDR block. Host bits are cleared, and IPv4-mapped IPv6 blocks become IPv4 blocks.
fn block(entry: &str) -> Option<IpNet> {
    let block = match entry.parse::<IpAddr>() {
        Ok(address) => IpNet::from(address),
        Err(_) => entry.parse::<IpNet>().ok()?,
    };
    Some(canonical(block))
}

/// Replaces the block of all IPv4 addresses with all traffic, which includes IPv6.
fn widened(block: IpNet) -> Vec<IpNet> {
    match block {
        IpNet::V4(v4) if v4.prefix_len() == 0 => all_traffic().into(),
        _ => vec![block],
    }
}

fn all_traffic() -> [IpNet; 2] {
    [
        IpNet::V4(ipnet::Ipv4Net::default()),
        IpNet::V6(ipnet::Ipv6Net::default()),
    ]
}

fn wrong(what: String) -> ApiError {
    ApiError::BadRequest(what)
}

/// Like [`policy_of`], but also for servers without network (`egress` is `None`): there, any option that would permit
/// traffic is refused with status 501, and the message names the option.
pub(super) fn grant(
    network: &NetworkConfig,
    allow_internet_access: Option<bool>,
    egress: Option<&EgressConfig>,
) -> Result<Policy, ApiError> {
    if let Some(egress) = egress {
        return policy_of(network, allow_internet_access, egress);
    }
    let policy = policy_of(network, allow_internet_access, &EgressConfig::default())?;
    let opens = |rule: &netisolation::Rule| rule.action != RuleAction::Deny;
    if policy.names.is_empty() && !policy.rules.iter().any(opens) {
        return Ok(policy);
    }
    let option = match allow_internet_access {
        Some(true) => "allow_internet_access: true",
        Some(false) | None => "network.allowOut",
    };
    Err(ApiError::NotImplemented(format!(
        "{option}: sandboxes of this server have no network (the server runs with network.mode = \"none\")"
    )))
}

/// Encrypts the password in accepted options before they are stored.
pub(super) fn seal(network: &mut NetworkConfig, app: &App) -> Result<(), ApiError> {
    socks::seal(network, &app.secrets).map_err(SecretError::Io)?;
    Ok(())
}

/// The outbound options after an update. Options that the update omits are cleared.
pub(super) fn outbound(update: NetworkUpdate) -> NetworkConfig {
    NetworkConfig {
        allow_out: update.allow_out,
        deny_out: update.deny_out,
        dns_servers: update.dns_servers,
        egress_proxy: update.egress_proxy,
        rules: update.rules,
        ..NetworkConfig::default()
    }
}

#[cfg(test)]
mod tests;
