use netisolation::{Destinations, Naming};
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

fn message_of(network: &NetworkConfig) -> String {
    policy_of(network, None, &EgressConfig::default())
        .unwrap_err()
        .to_string()
}

fn reaches(network: &NetworkConfig, allow: Option<bool>, default: DefaultEgress, to: &str) -> bool {
    let egress = EgressConfig {
        default,
        forbidden: ForbiddenAddresses::default(),
        rewriting: Rewriting::Off,
    };
    let policy = policy_of(network, allow, &egress).unwrap();
    policy.allows(to.parse().unwrap())
}

#[test]
fn the_default_applies_unless_the_client_chooses_otherwise() {
    use DefaultEgress::{Deny, Internet};
    let none = NetworkConfig::default();
    for to in ["8.8.8.8", "2600::1"] {
        assert!(!reaches(&none, None, Deny, to));
        assert!(reaches(&none, None, Internet, to));
        assert!(reaches(&none, Some(true), Deny, to));
        assert!(!reaches(&none, Some(false), Internet, to));
    }
    assert_eq!(chosen_access(Some(true), OptionSource::ClientDefault), None);
    assert_eq!(
        chosen_access(Some(false), OptionSource::ClientDefault),
        Some(false)
    );
    assert_eq!(chosen_access(Some(true), OptionSource::Chosen), Some(true));
}

#[test]
fn all_traffic_includes_both_address_families() {
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
fn domains_require_that_all_traffic_is_denied() {
    for deny in [&[][..], &["8.0.0.0/8"], &["::/0"]] {
        let domain = options(&["*.example.com"], deny);
        assert_eq!(status(&domain, None), 400);
        assert_eq!(status(&domain, Some(true)), 400);
        assert!(message_of(&domain).contains("ALL_TRAFFIC"));
    }
    let domain = options(&["*.example.com", "8.8.8.8"], &["0.0.0.0/0"]);
    let policy = policy_of(&domain, None, &EgressConfig::default()).unwrap();
    assert_eq!(policy.naming("www.example.com"), Naming::Pinned);
    assert_eq!(policy.naming("example.com"), Naming::Refused);
    assert_eq!(status(&options(&["a.test"], &[]), Some(false)), 200);
}

#[test]
fn invalid_entries_are_refused_by_name() {
    for entry in [
        "example.com",
        "10.0.0.0/33",
        "10.0.0.0/",
        "fd00::/129",
        "8.8.8.8:53",
        "",
    ] {
        assert!(
            message_of(&options(&[], &[entry])).contains(&format!("invalid denied CIDR {entry}"))
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
        let message = message_of(&options(&[entry], &["0.0.0.0/0"]));
        assert!(
            message.contains("invalid allowed domain") && message.contains(entry),
            "{message}"
        );
    }
}

#[test]
fn too_long_lists_are_refused_by_name() {
    let many: Vec<String> = (0..=MAX_ENTRIES)
        .map(|n| format!("8.8.{}.{}", n / 256, n % 256))
        .collect();
    let long = NetworkConfig {
        deny_out: Some(many),
        ..NetworkConfig::default()
    };
    assert!(message_of(&long).contains("denyOut has 1001 entries; at most 1000"));
    let servers = NetworkConfig {
        dns_servers: list(&["8.8.8.8"; 9]),
        ..NetworkConfig::default()
    };
    assert!(message_of(&servers).contains("dnsServers has 9 entries; at most 8"));
}

#[test]
fn dns_servers_are_addresses_that_sandboxes_may_reach() {
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
        assert!(message_of(&servers(&[wrong])).contains(wrong));
    }
    let destinations = |block: &str| {
        vec![Destinations {
            block: block.parse().unwrap(),
            access: Vec::new(),
        }]
    };
    let egress = EgressConfig {
        default: DefaultEgress::Deny,
        forbidden: ForbiddenAddresses::new(
            destinations("10.0.0.2/32"),
            destinations("2600:1::/32"),
        ),
        rewriting: Rewriting::Off,
    };
    let policy = policy_of(&servers(&["10.0.0.2", "2600::53"]), None, &egress).unwrap();
    let expected: Vec<SocketAddr> = ["10.0.0.2:53", "[2600::53]:53"]
        .map(|a| a.parse().unwrap())
        .into();
    assert_eq!(policy.dns_servers, expected);
    assert!(policy_of(&servers(&["2600:1::53"]), None, &egress).is_err());
}

#[test]
fn net_a_dns_server_on_this_host_must_be_opened_by_its_address() {
    use crate::namespace::{IN_LOCAL_PREFIX, SECONDARY, in_namespace};
    in_namespace(|| {
        let grant = |server: &str, exceptions: &[&str]| {
            let exceptions = exceptions.iter().map(|block| Destinations {
                block: block.parse().unwrap(),
                access: Vec::new(),
            });
            let egress = EgressConfig {
                forbidden: ForbiddenAddresses::new(exceptions.collect(), Vec::new()),
                ..EgressConfig::default()
            };
            let network = NetworkConfig {
                dns_servers: list(&[server]),
                ..NetworkConfig::default()
            };
            policy_of(&network, None, &egress).is_ok()
        };
        assert!(grant("203.0.113.4", &[]));
        for own in [SECONDARY, IN_LOCAL_PREFIX] {
            assert!(!grant(own, &["203.0.113.0/24"]), "{own}");
            assert!(grant(own, &[&format!("{own}/32")]), "{own}");
        }
    });
}

#[test]
fn unsupported_options_are_refused_by_name() {
    let proxy = NetworkConfig {
        egress_proxy: Some(serde_json::json!({"address": "h.test:1"})),
        ..NetworkConfig::default()
    };
    let rules = NetworkConfig {
        rules: Some(
            [(
                "a.test".to_owned(),
                serde_json::json!([{"transform": {"headers": {"a": "b"}}}]),
            )]
            .into(),
        ),
        ..NetworkConfig::default()
    };
    for (network, option) in [(proxy, "egressProxy"), (rules, "rules")] {
        assert_eq!(status(&network, None), 501);
        assert!(message_of(&network).contains(option));
    }
}

#[test]
fn a_proxy_of_the_sandbox_takes_all_flows() {
    let egress = EgressConfig {
        rewriting: Rewriting::On,
        ..EgressConfig::default()
    };
    let with = |address: &str| NetworkConfig {
        egress_proxy: Some(serde_json::json!({"address": address})),
        ..NetworkConfig::default()
    };
    let policy = policy_of(&with("proxy.test:1080"), Some(true), &egress).unwrap();
    assert!(policy.hands_all);
    for wrong in ["proxy.test", "127.0.0.1:1080"] {
        let wrong = policy_of(&with(wrong), Some(true), &egress).unwrap_err();
        assert_eq!(wrong.status(), 400);
    }
    let plain = policy_of(&NetworkConfig::default(), Some(true), &egress).unwrap();
    assert!(!plain.hands_all);
}

#[test]
fn https_ports_are_limited_and_never_that_of_the_agent() {
    let ports = |ports: Vec<u16>| NetworkConfig {
        https_ports: Some(ports),
        ..NetworkConfig::default()
    };
    for accepted in [vec![], vec![443, 8443], (1..=128).collect()] {
        let policy = policy_of(&ports(accepted), None, &EgressConfig::default());
        assert!(policy.is_ok());
    }
    for refused in [vec![0], vec![443, 49_983], (1..=129).collect()] {
        assert_eq!(status(&ports(refused.clone()), None), 400, "{refused:?}");
        assert!(message_of(&ports(refused)).contains("httpsPorts"));
    }
}

#[test]
fn rules_name_what_is_ruled_and_open_nothing() {
    let egress = EgressConfig {
        rewriting: Rewriting::On,
        ..EgressConfig::default()
    };
    let rule = serde_json::json!([{"transform": {"headers": {"a": "${e2b.secrets.KEY}"}}}]);
    let with = |host: &str, rule: &serde_json::Value| NetworkConfig {
        rules: Some([(host.to_owned(), rule.clone())].into()),
        ..NetworkConfig::default()
    };
    let policy = policy_of(&with("*.A.test", &rule), None, &egress).unwrap();
    assert_eq!(policy.ruled, ["*.a.test".parse().unwrap()]);
    assert_eq!(policy.naming("b.a.test"), Naming::Refused);
    let wrong = policy_of(&with("a.test:1", &rule), None, &egress).unwrap_err();
    assert_eq!(wrong.status(), 400);
    let identity =
        serde_json::json!([{"transform": {"headers": {"a": "${e2b.identity.tokens.b}"}}}]);
    let later = policy_of(&with("a.test", &identity), None, &egress).unwrap_err();
    assert_eq!(later.status(), 501);
    assert!(later.to_string().contains("e2b.identity"), "{later}");
}

#[test]
fn without_a_network_options_that_permit_traffic_are_refused() {
    let status = |network: &NetworkConfig, allow, source| {
        grant(network, chosen_access(allow, source), None)
            .map_or_else(|error| error.status().as_u16(), |_| 204)
    };
    let none = NetworkConfig::default();
    assert_eq!(status(&none, None, OptionSource::Chosen), 204);
    assert_eq!(status(&none, Some(false), OptionSource::Chosen), 204);
    assert_eq!(status(&none, Some(true), OptionSource::Chosen), 501);
    assert_eq!(status(&none, Some(true), OptionSource::ClientDefault), 204);
    let deny = options(&[], &["0.0.0.0/0", "10.0.0.1", "fd00::/8"]);
    assert_eq!(status(&deny, None, OptionSource::Chosen), 204);
    let allow = options(&["8.8.8.8"], &["0.0.0.0/0"]);
    assert_eq!(status(&allow, None, OptionSource::Chosen), 501);
}

#[test]
fn an_empty_update_clears_all_outbound_options() {
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

/// A naive implementation of E2B's rules, to which the policy is compared.
fn is_meant(
    allow: &[String],
    deny: &[String],
    source: Option<bool>,
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
    let is_open = source == Some(true) || (source.is_none() && default == DefaultEgress::Internet);
    has(allow) || (!has(deny) && is_open)
}

proptest! {
    #[test]
    fn every_address_is_treated_according_to_the_rules_of_e2b(
        allow in prop::collection::vec(entry(), 0..5),
        deny in prop::collection::vec(entry(), 0..5),
        source: Option<bool>,
        is_open: bool,
    ) {
        let default = if is_open { DefaultEgress::Internet } else { DefaultEgress::Deny };
        let network = NetworkConfig {
            allow_out: Some(allow.clone()),
            deny_out: Some(deny.clone()),
            ..NetworkConfig::default()
        };
        let egress = EgressConfig { default, forbidden: ForbiddenAddresses::default(), rewriting: Rewriting::Off };
        let policy = policy_of(&network, source, &egress).unwrap();
        let addresses = (0..16u8).flat_map(|n| [format!("8.8.8.{n}"), format!("2600::{n:x}")]);
        for to in addresses.chain(["9.9.9.9".into(), "2a00::1".into()]) {
            let to = to.parse().unwrap();
            prop_assert_eq!(policy.allows(to), is_meant(&allow, &deny, source, default, to), "{}", to);
        }
    }
}

#[test]
fn a_rule_that_sends_a_secret_elsewhere_is_refused_with_both_names() {
    let dir = tempfile::tempdir().unwrap();
    let secrets = Secrets::open(dir.path(), &crate::secrets::KeySource::Generated).unwrap();
    let hosts = vec!["*.api.test".to_owned()];
    secrets
        .create("key", "v", Default::default(), hosts, 1)
        .unwrap();
    let egress = EgressConfig {
        rewriting: Rewriting::On,
        ..EgressConfig::default()
    };
    for (host, text, is_allowed) in [
        ("a.api.test", "${e2b.secrets.key}", true),
        ("*.api.test", "Bearer ${e2b.secrets.KEY}", true),
        ("evil.test", "${e2b.secrets.later}", true),
        ("evil.test", "a literal", true),
        ("evil.test", "${e2b.secrets.key}", false),
        ("*.test", "x ${e2b.secrets.Key}", false),
    ] {
        let rule = serde_json::json!([{"transform": {"headers": {"a": text}}}]);
        let network = NetworkConfig {
            rules: Some([(host.to_owned(), rule)].into()),
            ..NetworkConfig::default()
        };
        match check_secrets(&network, Some(&egress), &secrets) {
            Ok(()) => assert!(is_allowed, "{host} {text}"),
            Err(why) => {
                assert_eq!(why.status().as_u16(), 400);
                let why = why.to_string();
                assert!(
                    !is_allowed && why.contains("\"key\"") && why.contains(host),
                    "{why}"
                );
            }
        }
    }
}
