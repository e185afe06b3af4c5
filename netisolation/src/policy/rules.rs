//! Policies and their rules.

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use ranges::{Access, Protocol};
use serde::{Deserialize, Serialize};

use super::name::{NamePattern, Naming};

/// The network access of a sandbox. The default denies everything. No policy opens a forbidden range
/// ([`crate::ForbiddenAddresses`]). Only the operator can.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// Rules by address. The longest matching prefix decides; addresses that no rule matches are denied. The order
    /// matters only among rules with the same block, of which the last one applies.
    pub rules: Vec<Rule>,
    /// Names that the sandbox may resolve. It may reach the resolved addresses even if `rules` deny them, but not if
    /// they are forbidden. New flows are allowed for the TTL of the answer, at least 60 s and at most 1 h.
    pub names: Vec<NamePattern>,
    /// Names with header rules: TCP flows to ports 80 and 443 of the resolved addresses go to the proxy, even if
    /// `rules` allow the addresses. These names do not allow access: `rules` or `names` must allow the flow.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ruled: Vec<NamePattern>,
    /// All TCP flows that the policy allows go to the proxy, whatever their port. Other packets are refused, except DNS
    /// queries.
    #[serde(default, skip_serializing_if = "is_false")]
    pub hands_all: bool,
    /// Upstream DNS servers for this sandbox. Empty: the operator's servers.
    pub dns_servers: Vec<SocketAddr>,
    /// Bandwidth limit in bytes per second, for each direction, in addition to the host's limit. `None`: only the
    /// host's limit applies.
    pub bytes_per_s: Option<u64>,
    /// Limit on new flows per second. `None` or 0: unlimited.
    pub flows_per_s: Option<u32>,
}

/// For serde, which passes a reference.
fn is_false(value: &bool) -> bool {
    !value
}

/// Allows or denies a block of addresses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// IPv4 or IPv6; host bits are ignored. Must not be inside `::ffff:0:0/96`: such a block would replace the rule for
    /// the embedded IPv4 block.
    pub block: IpNet,
    /// Serialized as `verdict`, the name in stored policies.
    #[serde(rename = "verdict")]
    pub action: RuleAction,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RuleAction {
    Deny,
    /// Allows these services. Empty: all TCP and UDP ports and ICMP echo.
    Allow(Vec<Access>),
}

impl Policy {
    /// Allows every address except the host's and those in forbidden ranges.
    #[must_use]
    pub fn internet() -> Self {
        let everything = ["0.0.0.0/0", "::/0"];
        let rules = everything
            .iter()
            .filter_map(|block| block.parse().ok())
            .map(|block| Rule {
                block,
                action: RuleAction::Allow(Vec::new()),
            });
        Self {
            rules: rules.collect(),
            ..Self::default()
        }
    }

    /// Whether the rules allow at least one service at `address`. As in the eBPF programs, the longest matching prefix
    /// decides. Ignores `names` and forbidden ranges.
    #[must_use]
    pub fn allows(&self, address: IpAddr) -> bool {
        let rule = self.rule_for(address);
        rule.is_some_and(|rule| rule.action != RuleAction::Deny)
    }

    /// Whether the rules allow TCP connections to `remote`. As in the eBPF programs, the longest matching prefix
    /// decides, and only its services count. Ignores `names` and forbidden ranges.
    #[must_use]
    pub fn allows_tcp(&self, remote: SocketAddr) -> bool {
        let covers = |access: &Access| {
            let ports = access.first..=access.last;
            access.protocol == Protocol::Tcp && ports.contains(&remote.port())
        };
        match self.rule_for(remote.ip()).map(|rule| &rule.action) {
            Some(RuleAction::Allow(services)) => services.is_empty() || services.iter().any(covers),
            Some(RuleAction::Deny) | None => false,
        }
    }

    fn rule_for(&self, address: IpAddr) -> Option<&Rule> {
        let matching = self.rules.iter().filter(|r| r.block.contains(&address));
        matching.max_by_key(|rule| rule.block.prefix_len())
    }

    /// How the resolver treats a query for `name`, which must be lower case without a trailing dot. If a rule for
    /// `0.0.0.0/0` or `::/0` allows any service, all names are resolved, and names with header rules are pinned, so
    /// that their flows can be recognized.
    #[must_use]
    pub fn naming(&self, name: &str) -> Naming {
        let allows_internet = |rule: &Rule| {
            rule.block.prefix_len() == 0 && matches!(rule.action, RuleAction::Allow(_))
        };
        let is_open = self.rules.iter().any(allows_internet);
        match (self.admits_name(name), is_open) {
            (true, _) => Naming::Pinned,
            (false, true) if self.has_rules_for(name) => Naming::Pinned,
            (false, true) => Naming::Answered,
            (false, false) => Naming::Refused,
        }
    }

    /// Whether a pattern in `names` matches `name`.
    pub(crate) fn admits_name(&self, name: &str) -> bool {
        self.names.iter().any(|pattern| pattern.matches(name))
    }

    /// Whether a pattern in `ruled` matches `name`.
    pub(crate) fn has_rules_for(&self, name: &str) -> bool {
        self.ruled.iter().any(|pattern| pattern.matches(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ruled_name_is_pinned_only_if_it_can_be_reached() {
        let mut policy = Policy {
            ruled: vec!["*.a.test".parse().unwrap()],
            ..Policy::default()
        };
        assert_eq!(policy.naming("x.a.test"), Naming::Refused);
        policy.rules = Policy::internet().rules;
        assert_eq!(policy.naming("x.a.test"), Naming::Pinned);
        assert_eq!(policy.naming("a.test"), Naming::Answered);
        policy.rules.clear();
        policy.names = vec!["x.a.test".parse().unwrap()];
        assert_eq!(policy.naming("x.a.test"), Naming::Pinned);
        assert_eq!(policy.naming("y.a.test"), Naming::Refused);
    }

    #[test]
    fn a_stored_policy_without_ruled_names_is_read_and_written_unchanged() {
        let stored = r#"{"rules":[],"names":["a.test"],"dns_servers":[],"bytes_per_s":null,"flows_per_s":null}"#;
        let policy: Policy = serde_json::from_str(stored).unwrap();
        assert!(policy.ruled.is_empty());
        assert_eq!(serde_json::to_string(&policy).unwrap(), stored);
    }

    #[test]
    fn the_longest_rule_decides_about_tcp_to_a_port() {
        let rule = |block: &str, action| Rule {
            block: block.parse().unwrap(),
            action,
        };
        let access = |protocol, first, last| Access {
            protocol,
            first,
            last,
        };
        let web = vec![
            access(Protocol::Udp, 80, 80),
            access(Protocol::Tcp, 440, 443),
        ];
        let policy = Policy {
            rules: vec![
                rule("0.0.0.0/0", RuleAction::Allow(Vec::new())),
                rule("198.51.100.0/24", RuleAction::Deny),
                rule("198.51.100.8/30", RuleAction::Allow(web)),
            ],
            ..Policy::default()
        };
        for (remote, allowed) in [
            ("192.0.2.1:80", true),
            ("198.51.100.1:443", false),
            ("198.51.100.9:443", true),
            ("198.51.100.9:444", false),
            ("198.51.100.9:80", false),
            ("[2001:db8::1]:443", false),
        ] {
            assert_eq!(
                policy.allows_tcp(remote.parse().unwrap()),
                allowed,
                "{remote}"
            );
        }
    }

    #[test]
    fn a_name_is_pinned_by_a_pattern_answered_by_an_open_policy_and_else_refused() {
        let mut policy = Policy::default();
        assert_eq!(policy.naming("a.test"), Naming::Refused);
        policy.names.push("a.test".parse().unwrap());
        assert_eq!(policy.naming("a.test"), Naming::Pinned);
        assert_eq!(policy.naming("b.test"), Naming::Refused);
        policy.rules = Policy::internet().rules;
        assert_eq!(policy.naming("b.test"), Naming::Answered);
        policy
            .rules
            .iter_mut()
            .for_each(|rule| rule.action = RuleAction::Deny);
        assert_eq!(policy.naming("b.test"), Naming::Refused);
    }
}
