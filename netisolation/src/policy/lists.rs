//! Policies made from an allow list and a deny list.

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::rules::{Policy, Rule, RuleAction};

/// The default for addresses in neither list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DefaultEgress {
    #[default]
    Deny,
    /// Allowed, except for forbidden ranges.
    Internet,
}

impl Policy {
    /// Makes a policy in which an allowed block overrides every denied block, whatever their prefix lengths; `default`
    /// decides for addresses in neither list. Host bits of the blocks are ignored.
    #[must_use]
    pub fn of_lists(default: DefaultEgress, denied: &[IpNet], allowed: &[IpNet]) -> Self {
        let allowed = merged(allowed);
        let is_allowed = |block: &IpNet| allowed.iter().any(|a| a.contains(block));
        let open = match default {
            DefaultEgress::Deny => Vec::new(),
            DefaultEgress::Internet => Self::internet().rules,
        };
        let denied = merged(denied);
        let is_all_denied = |block: &IpNet| denied.contains(block);
        let mut rules: Vec<Rule> = open
            .into_iter()
            .filter(|rule| !is_allowed(&rule.block) && !is_all_denied(&rule.block))
            .collect();
        if !rules.is_empty() {
            let closed = denied.iter().filter(|block| !is_allowed(block));
            rules.extend(closed.map(|block| rule(*block, RuleAction::Deny)));
        }
        let opened = allowed
            .iter()
            .map(|block| rule(*block, RuleAction::Allow(Vec::new())));
        rules.extend(opened);
        Self {
            rules,
            ..Self::default()
        }
    }
}

fn rule(block: IpNet, action: RuleAction) -> Rule {
    Rule { block, action }
}

/// The smallest set of disjoint blocks with the same addresses; host bits are cleared.
fn merged(blocks: &[IpNet]) -> Vec<IpNet> {
    IpNet::aggregate(&blocks.iter().map(IpNet::trunc).collect())
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    use proptest::prelude::*;

    use super::*;

    /// The model: whether the lists allow `address`.
    fn is_allowed(
        default: DefaultEgress,
        denied: &[IpNet],
        allowed: &[IpNet],
        address: IpAddr,
    ) -> bool {
        let has = |list: &[IpNet]| list.iter().any(|block| block.contains(&address));
        has(allowed) || (default == DefaultEgress::Internet && !has(denied))
    }

    /// Few addresses of both families, so that blocks often overlap.
    fn address() -> impl Strategy<Value = IpAddr> {
        prop_oneof![
            (0u32..32).prop_map(|n| IpAddr::V4(Ipv4Addr::from_bits(0x0808_0800 | n))),
            (0u128..32).prop_map(|n| IpAddr::V6(Ipv6Addr::from_bits((0x2600 << 112) | n))),
        ]
    }

    fn block() -> impl Strategy<Value = IpNet> {
        (address(), prop_oneof![Just(0u8), Just(1), 2..=8u8]).prop_map(|(address, host_bits)| {
            let bits = if address.is_ipv4() { 32 } else { 128 };
            // Mostly small blocks, and sometimes the whole address space.
            let length = if host_bits == 8 { 0 } else { bits - host_bits };
            IpNet::new(address, length).unwrap()
        })
    }

    fn blocks() -> impl Strategy<Value = Vec<IpNet>> {
        prop::collection::vec(block(), 0..6)
    }

    proptest! {
        #[test]
        fn the_longest_prefix_decides_as_the_lists_do(
            denied in blocks(), allowed in blocks(), is_open: bool, addresses in prop::collection::vec(address(), 32),
        ) {
            let default = if is_open { DefaultEgress::Internet } else { DefaultEgress::Deny };
            let policy = Policy::of_lists(default, &denied, &allowed);
            for address in addresses {
                let expected = is_allowed(default, &denied, &allowed, address);
                prop_assert_eq!(policy.allows(address), expected, "{} by {:?}", address, &policy.rules);
            }
            let mut seen: Vec<IpNet> = policy.rules.iter().map(|rule| rule.block).collect();
            prop_assert!(seen.iter().all(|block| *block == block.trunc()));
            seen.sort();
            seen.dedup();
            prop_assert_eq!(seen.len(), policy.rules.len());
        }
    }

    #[test]
    fn a_denied_block_inside_an_allowed_block_stays_allowed() {
        let denied = ["8.8.8.8/32".parse().unwrap()];
        let allowed = ["8.8.0.0/16".parse().unwrap()];
        let policy = Policy::of_lists(DefaultEgress::Internet, &denied, &allowed);
        assert!(policy.allows("8.8.8.8".parse().unwrap()));
    }
}
