//! Policies and their rules.

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::name::{NamePattern, Naming};
use crate::event::Protocol;

/// What a sandbox may reach. The default denies everything. No policy opens a forbidden range
/// ([`crate::forbidden`]); only the operator can, with an [`crate::Exception`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// Rules by address. The longest matching prefix decides; addresses that no rule matches are denied. The order
    /// has no meaning, and no two rules have the same block.
    pub rules: Vec<Rule>,
    /// Names whose resolved addresses the sandbox may reach until the DNS answer expires.
    pub names: Vec<NamePattern>,
    /// Upstream DNS servers for this sandbox. Empty: the operator's servers.
    pub dns_servers: Vec<SocketAddr>,
    /// Bandwidth limit in bytes per second, for each direction. `None`: only the host's limit applies.
    pub bytes_per_s: Option<u64>,
    /// Limit on new flows per second. `None`: unlimited.
    pub flows_per_s: Option<u32>,
}

/// Allows or denies a block of addresses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// IPv4 or IPv6. Host bits are zero.
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

/// A protocol and an inclusive range of its ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access {
    /// TCP, UDP or ICMP; ICMP means echo and ignores the ports.
    pub protocol: Protocol,
    pub first: u16,
    pub last: u16,
}

impl Policy {
    /// Allows every address outside the forbidden ranges.
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

    /// Whether the rules allow any service at `address`; the longest prefix decides, as in the eBPF programs. Ignores
    /// names and forbidden ranges.
    #[must_use]
    pub fn allows(&self, address: IpAddr) -> bool {
        let matching = self.rules.iter().filter(|r| r.block.contains(&address));
        let longest = matching.max_by_key(|rule| rule.block.prefix_len());
        longest.is_some_and(|rule| rule.action != RuleAction::Deny)
    }

    /// How the resolver treats a query for `name`, which is in lower case and has no final dot. A policy that allows
    /// all of IPv4 or all of IPv6 permits queries for every name.
    #[must_use]
    pub fn naming(&self, name: &str) -> Naming {
        let allows_internet = |rule: &Rule| {
            rule.block.prefix_len() == 0 && matches!(rule.action, RuleAction::Allow(_))
        };
        if self.matches_name(name) {
            Naming::Pinned
        } else if self.rules.iter().any(allows_internet) {
            Naming::Answered
        } else {
            Naming::Refused
        }
    }

    /// Whether a name pattern matches `name`.
    pub(crate) fn matches_name(&self, name: &str) -> bool {
        self.names.iter().any(|pattern| pattern.matches(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
