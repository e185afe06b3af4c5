//! Network options of E2B's interface as a policy. Pure.
//!
//! What E2B's options mean: `allowOut` beats `denyOut`, whatever the lengths of their prefixes; an entry of `allowOut`
//! that is no address is a domain, and domains need all traffic in `denyOut`. `0.0.0.0/0` is E2B's word for all
//! traffic, so here it stands for IPv6 as well. `allow_internet_access: false` is all traffic in `denyOut`, `true` makes
//! the internet the default of this sandbox; absent, the server's default holds.
//!
//! What concerns the way in (`allowPublicTraffic`, `maskRequestHost`) is the proxy's.

use std::net::{IpAddr, SocketAddr};

use api_types::rest::{NetworkConfig, NetworkUpdate};
use ipnet::IpNet;
use netisolation::{DefaultEgress, Exception, NamePattern, Policy, RuleAction};

use super::ApiError;

/// Entries of `allowOut` and of `denyOut`, at most.
const MAX_ENTRIES: usize = 1000;
/// Entries of `dnsServers`, at most.
const MAX_DNS_SERVERS: usize = 8;
const DNS_PORT: u16 = 53;

/// How a client's `allow_internet_access: true` is to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    /// Somebody asked for it.
    Explicit,
    /// Clients of the older route send it unasked.
    Habit,
}

/// What the operator says about the way out.
#[derive(Clone, Debug, Default)]
pub struct EgressConfig {
    /// For sandboxes whose client says nothing.
    pub default: DefaultEgress,
    /// See [`Exception`]; name servers may be among them.
    pub exceptions: Vec<Exception>,
}

/// What a client really asked for: habits left out.
pub(super) fn asked(allow_internet_access: Option<bool>, wish: Wish) -> Option<bool> {
    match wish {
        Wish::Explicit => allow_internet_access,
        Wish::Habit => allow_internet_access.filter(|allow| !allow),
    }
}

/// The policy that the options make, with `allow_internet_access` as it was [`asked`] for.
///
/// # Errors
/// 400 for what E2B's interface does not have, naming the entry; 501 for what this server does not have, naming the
/// option.
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
    let dns_servers = dns_servers(network, &egress.exceptions)?;
    refuse_unsupported(network)?;
    let default = match allow_internet_access {
        Some(true) => DefaultEgress::Internet,
        Some(false) | None => egress.default,
    };
    Ok(Policy {
        names,
        dns_servers,
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
    exceptions: &[Exception],
) -> Result<Vec<SocketAddr>, ApiError> {
    let entries = limited(
        "dnsServers",
        network.dns_servers.as_deref(),
        MAX_DNS_SERVERS,
    )?;
    let server = |entry: &String| {
        let address: IpAddr = entry
            .parse()
            .map_err(|_| wrong(format!("dnsServers has {entry:.64}; it takes addresses")))?;
        if netisolation::is_forbidden(address, exceptions) {
            let text =
                format!("dnsServers has {entry:.64}, which no sandbox of this server may reach");
            return Err(wrong(text));
        }
        Ok(SocketAddr::new(address, DNS_PORT))
    };
    entries.iter().map(server).collect()
}

fn refuse_unsupported(network: &NetworkConfig) -> Result<(), ApiError> {
    let rules = network.rules.as_ref();
    let ports = network.https_ports.as_deref().unwrap_or_default();
    let option = if network.egress_proxy.as_ref().is_some_and(|p| !p.is_null()) {
        "network.egressProxy: this server sends nothing through other proxies"
    } else if rules.is_some_and(|rules| !rules.is_empty()) {
        "network.rules: this server does not look into what sandboxes send"
    } else if !ports.is_empty() {
        "network.httpsPorts: services in a sandbox are reached over plain HTTP"
    } else {
        return Ok(());
    };
    Err(ApiError::NotImplemented(option.into()))
}

fn limited<'a>(
    option: &str,
    entries: Option<&'a [String]>,
    most: usize,
) -> Result<&'a [String], ApiError> {
    let entries = entries.unwrap_or_default();
    match entries.len() {
        count if count > most => Err(wrong(format!(
            "{option} has {count} entries; {most} is the limit"
        ))),
        _ => Ok(entries),
    }
}

/// An address, or a CIDR block, whose host bits are ignored. IPv4 in IPv6 is IPv4.
fn block(entry: &str) -> Option<IpNet> {
    let block = match entry.parse::<IpAddr>() {
        Ok(address) => IpNet::from(address),
        Err(_) => entry.parse::<IpNet>().ok()?.trunc(),
    };
    let mapped = match block.addr() {
        IpAddr::V6(address) => address
            .to_ipv4_mapped()
            .zip(block.prefix_len().checked_sub(96)),
        IpAddr::V4(_) => None,
    };
    match mapped {
        Some((address, bits)) => IpNet::new(address.into(), bits).ok(),
        None => Some(block),
    }
}

/// All traffic is all of IPv6, too.
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

/// As [`policy_of`]; where sandboxes have no network, what the options would open is refused with the option's name.
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
        "{option}: sandboxes of this server have no network (it was started with --network none)"
    )))
}

/// The outbound options of an update, all of them: what is absent is cleared.
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
mod tests {
    use netisolation::Naming;
    use proptest::prelude::*;

    use super::*;

    fn list(entries: &[&str]) -> Option<Vec<String>> {
        Some(entries.iter().map(|e| (*e).to_owned()).collect())
    }

    fn options(allow: &[&str], deny: &[&str]) -> NetworkConfig {
        NetworkConfig {
            allow_out: list(allow),
            deny_out: list(deny),
            ..NetworkConfig::default()
        }
    }

    fn status(network: &NetworkConfig, allow: Option<bool>) -> u16 {
        policy_of(network, allow, &EgressConfig::default())
            .map_or_else(|error| error.status().as_u16(), |_| 200)
    }

    fn told(network: &NetworkConfig) -> String {
        policy_of(network, None, &EgressConfig::default())
            .unwrap_err()
            .to_string()
    }

    fn reaches(
        network: &NetworkConfig,
        allow: Option<bool>,
        default: DefaultEgress,
        to: &str,
    ) -> bool {
        let egress = EgressConfig {
            default,
            exceptions: Vec::new(),
        };
        let policy = policy_of(network, allow, &egress).unwrap();
        policy.allows(to.parse().unwrap())
    }

    #[test]
    fn without_options_the_default_decides_and_a_wish_beats_it() {
        use DefaultEgress::{Deny, Internet};
        let none = NetworkConfig::default();
        for to in ["8.8.8.8", "2600::1"] {
            assert!(!reaches(&none, None, Deny, to));
            assert!(reaches(&none, None, Internet, to));
            assert!(reaches(&none, Some(true), Deny, to));
            assert!(!reaches(&none, Some(false), Internet, to));
        }
        assert_eq!(asked(Some(true), Wish::Habit), None);
        assert_eq!(asked(Some(false), Wish::Habit), Some(false));
        assert_eq!(asked(Some(true), Wish::Explicit), Some(true));
    }

    #[test]
    fn all_traffic_is_both_families() {
        let denied = options(&["8.8.8.8"], &["0.0.0.0/0"]);
        for default in [DefaultEgress::Deny, DefaultEgress::Internet] {
            for allow in [None, Some(true), Some(false)] {
                assert!(reaches(&denied, allow, default, "8.8.8.8"));
                assert!(!reaches(&denied, allow, default, "8.8.8.9"));
                assert!(!reaches(&denied, allow, default, "2600::1"));
            }
        }
        let allowed = options(&["0.0.0.0/0"], &["8.8.8.8"]);
        assert!(reaches(&allowed, None, DefaultEgress::Deny, "8.8.8.8"));
        assert!(reaches(&allowed, None, DefaultEgress::Deny, "2600::1"));
    }

    #[test]
    fn domains_need_all_traffic_denied() {
        for deny in [&[][..], &["8.0.0.0/8"], &["::/0"]] {
            let domain = options(&["*.example.com"], deny);
            assert_eq!(status(&domain, None), 400);
            assert_eq!(status(&domain, Some(true)), 400);
            assert!(told(&domain).contains("ALL_TRAFFIC"));
        }
        let domain = options(&["*.example.com", "8.8.8.8"], &["0.0.0.0/0"]);
        let policy = policy_of(&domain, None, &EgressConfig::default()).unwrap();
        assert_eq!(policy.naming("www.example.com"), Naming::Pinned);
        assert_eq!(policy.naming("example.com"), Naming::Refused);
        assert_eq!(status(&options(&["a.test"], &[]), Some(false)), 200);
    }

    #[test]
    fn what_is_wrong_is_a_bad_request_that_names_it() {
        for entry in [
            "example.com",
            "10.0.0.0/33",
            "10.0.0.0/",
            "fd00::/129",
            "8.8.8.8:53",
            "",
        ] {
            assert!(
                told(&options(&[], &[entry])).contains(&format!("invalid denied CIDR {entry}"))
            );
        }
        for entry in [
            "10.0.0.0/33",
            "1.2.3",
            "https://example.com",
            "a b",
            "",
            "*.*.com",
        ] {
            let told = told(&options(&[entry], &["0.0.0.0/0"]));
            assert!(
                told.contains("invalid allowed domain") && told.contains(entry),
                "{told}"
            );
        }
    }

    #[test]
    fn lists_are_limited_by_name() {
        let many: Vec<String> = (0..=MAX_ENTRIES)
            .map(|n| format!("8.8.{}.{}", n / 256, n % 256))
            .collect();
        let long = NetworkConfig {
            deny_out: Some(many),
            ..NetworkConfig::default()
        };
        assert!(told(&long).contains("denyOut has 1001 entries; 1000"));
        let servers = NetworkConfig {
            dns_servers: list(&["8.8.8.8"; 9]),
            ..NetworkConfig::default()
        };
        assert!(told(&servers).contains("dnsServers has 9 entries; 8"));
    }

    #[test]
    fn name_servers_are_addresses_that_may_be_reached() {
        let servers = |entries: &[&str]| NetworkConfig {
            dns_servers: list(entries),
            ..NetworkConfig::default()
        };
        for wrong in [
            "127.0.0.53",
            "10.0.0.2",
            "169.254.169.253",
            "::1",
            "::ffff:8.8.8.8",
            "dns.test",
            "8.8.8.8:53",
        ] {
            assert!(told(&servers(&[wrong])).contains(wrong));
        }
        let egress = EgressConfig {
            default: DefaultEgress::Deny,
            exceptions: vec![Exception {
                block: "10.0.0.2/32".parse().unwrap(),
                access: Vec::new(),
            }],
        };
        let policy = policy_of(&servers(&["10.0.0.2", "2600::53"]), None, &egress).unwrap();
        let expected: Vec<SocketAddr> = ["10.0.0.2:53", "[2600::53]:53"]
            .map(|a| a.parse().unwrap())
            .into();
        assert_eq!(policy.dns_servers, expected);
    }

    #[test]
    fn what_the_server_has_not_is_refused_by_name() {
        let proxy = NetworkConfig {
            egress_proxy: Some(serde_json::json!({"address": "h:1"})),
            ..NetworkConfig::default()
        };
        let rules = NetworkConfig {
            rules: Some([("a.test".to_owned(), serde_json::json!([]))].into()),
            ..NetworkConfig::default()
        };
        let ports = NetworkConfig {
            https_ports: Some(vec![8443]),
            ..NetworkConfig::default()
        };
        for (network, option) in [
            (proxy, "egressProxy"),
            (rules, "rules"),
            (ports, "httpsPorts"),
        ] {
            assert_eq!(status(&network, None), 501);
            assert!(told(&network).contains(option));
        }
    }

    #[test]
    fn without_a_network_nothing_is_opened() {
        let status = |network: &NetworkConfig, allow, wish| {
            grant(network, asked(allow, wish), None)
                .map_or_else(|error| error.status().as_u16(), |_| 204)
        };
        let none = NetworkConfig::default();
        assert_eq!(status(&none, None, Wish::Explicit), 204);
        assert_eq!(status(&none, Some(false), Wish::Explicit), 204);
        assert_eq!(status(&none, Some(true), Wish::Explicit), 501);
        assert_eq!(status(&none, Some(true), Wish::Habit), 204);
        let deny = options(&[], &["0.0.0.0/0", "10.0.0.1", "fd00::/8"]);
        assert_eq!(status(&deny, None, Wish::Explicit), 204);
        let allow = options(&["8.8.8.8"], &["0.0.0.0/0"]);
        assert_eq!(status(&allow, None, Wish::Explicit), 501);
    }

    #[test]
    fn an_update_of_nothing_clears() {
        assert_eq!(outbound(NetworkUpdate::default()), NetworkConfig::default());
    }

    fn entry() -> impl Strategy<Value = String> {
        prop_oneof![
            1 => Just("0.0.0.0/0".to_owned()),
            1 => Just("::/0".to_owned()),
            4 => (0u8..16, 28u8..=32).prop_map(|(n, bits)| format!("8.8.8.{n}/{bits}")),
            4 => (0u8..16, 124u8..=128).prop_map(|(n, bits)| format!("2600::{n:x}/{bits}")),
            2 => (0u8..16).prop_map(|n| format!("8.8.8.{n}")),
        ]
    }

    /// E2B's rules, read naively.
    fn is_meant(
        allow: &[String],
        deny: &[String],
        wish: Option<bool>,
        default: DefaultEgress,
        to: IpAddr,
    ) -> bool {
        let has = |list: &[String]| {
            list.iter().any(|entry| match entry.split_once('/') {
                Some(("0.0.0.0", "0")) => true,
                Some(_) => entry.parse::<IpNet>().unwrap().contains(&to),
                None => entry.parse::<IpAddr>().unwrap() == to,
            })
        };
        let is_open = wish == Some(true) || (wish.is_none() && default == DefaultEgress::Internet);
        has(allow) || (!has(deny) && is_open)
    }

    proptest! {
        #[test]
        fn every_address_fares_as_e2b_says(
            allow in prop::collection::vec(entry(), 0..5),
            deny in prop::collection::vec(entry(), 0..5),
            wish: Option<bool>,
            is_open: bool,
        ) {
            let default = if is_open { DefaultEgress::Internet } else { DefaultEgress::Deny };
            let network = NetworkConfig {
                allow_out: Some(allow.clone()),
                deny_out: Some(deny.clone()),
                ..NetworkConfig::default()
            };
            let egress = EgressConfig { default, exceptions: Vec::new() };
            let policy = policy_of(&network, wish, &egress).unwrap();
            let addresses = (0..16u8).flat_map(|n| [format!("8.8.8.{n}"), format!("2600::{n:x}")]);
            for to in addresses.chain(["9.9.9.9".into(), "2a00::1".into()]) {
                let to = to.parse().unwrap();
                prop_assert_eq!(policy.allows(to), is_meant(&allow, &deny, wish, default, to), "{}", to);
            }
        }
    }
}
