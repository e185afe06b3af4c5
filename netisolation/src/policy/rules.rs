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
    /// matters only among rules with the same block, of which the last one applies.
    pub rules: Vec<Rule>,
    /// Names that the sandbox may resolve. It may reach the answered addresses even if `rules` deny them, but not if
    /// they are forbidden. New flows are allowed for the TTL of the answer, at least 60 s and at most 1 h.
    pub names: Vec<NamePattern>,
    /// Names whose requests are rewritten by the egress proxy. They open nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ruled: Vec<NamePattern>,
    /// Upstream DNS servers for this sandbox. Empty: the operator's servers.
    pub dns_servers: Vec<SocketAddr>,
    /// Bandwidth limit in bytes per second, for each direction, in addition to the host's limit. `None`: only the
    /// host's limit applies.
    pub bytes_per_s: Option<u64>,
    /// Limit on new flows per second. `None` or 0: unlimited.
    pub flows_per_s: Option<u32>,
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

/// A protocol and an inclusive range of remote ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access {
    /// TCP, UDP or ICMP; no other protocol passes. ICMP means echo and ignores the ports.
    pub protocol: Protocol,
    pub first: u16,
    pub last: u16,
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
        let matching = self.rules.iter().filter(|r| r.block.contains(&address));
        let longest = matching.max_by_key(|rule| rule.block.prefix_len());
        longest.is_some_and(|rule| rule.action != RuleAction::Deny)
    }

    /// How the resolver treats a query for `name`, which must be lower case without a trailing dot. If a rule for
    /// `0.0.0.0/0` or `::/0` allows any service at all, every name is answered.
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

    /// Whether a pattern in `names` matches `name`.
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
