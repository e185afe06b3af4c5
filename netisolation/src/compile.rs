//! Compiles policies and operator exceptions to entries of the map of rules. Pure.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::{
    error::IsolationError,
    event::Protocol,
    layout::{ACCESSES, Address, PortRange, Rule, verdict},
    policy::{self, Access, Exception, Policy, RuleAction, forbidden},
    rule_sets::{Prefix, Rules, SENTINEL},
};

/// Maximum number of rules in one policy. All policies share the map's 2²⁰ entries.
const MAX_RULES: usize = 4096;

/// The rule set of a policy.
///
/// # Errors
/// Returns [`IsolationError::TooMany`] if the policy has too many rules, or a rule too many port ranges.
pub(crate) fn rules_of(policy: &Policy) -> Result<Rules, IsolationError> {
    if policy.rules.len() > MAX_RULES {
        return Err(IsolationError::TooMany {
            what: "rules",
            limit: MAX_RULES,
        });
    }
    let entry = |rule: &policy::Rule| {
        Ok(match &rule.action {
            RuleAction::Deny => entry(rule.block, verdict::DENY, &[])?,
            RuleAction::Allow(access) => entry(rule.block, verdict::ALLOW, access)?,
        })
    };
    let mut all: Rules = policy.rules.iter().map(entry).collect::<Result<_, _>>()?;
    add_sentinel(&mut all, verdict::DENY);
    Ok(all)
}

/// The rule set for all sandboxes: the forbidden ranges, the operator's exceptions inside them, and the addresses of
/// the host. An exception outside the forbidden ranges has no effect.
///
/// # Errors
/// Returns [`IsolationError::TooMany`] if an exception has too many port ranges.
pub(crate) fn rules_for_all(
    exceptions: &[Exception],
    host: &[IpAddr],
) -> Result<Rules, IsolationError> {
    let mapped = |block: &&IpNet| Address::from(block.network()).is_v4() && block.addr().is_ipv6();
    let mut all = Rules::new();
    for block in forbidden().iter().filter(|block| !mapped(block)) {
        all.extend([entry(*block, verdict::FORBIDDEN, &[])?]);
    }
    for Exception { block, access } in exceptions {
        if forbidden().iter().any(|range| range.contains(block)) {
            all.extend([entry(*block, verdict::ALLOW, access)?]);
        }
    }
    for address in host {
        all.extend([entry(IpNet::from(*address), verdict::HOST, &[])?]);
    }
    add_sentinel(&mut all, verdict::FORBIDDEN);
    Ok(all)
}

/// Adds the sentinel, from which a set is read back, unless the set already has a rule for `::/128`. No valid packet
/// has the address `::` as its remote address.
fn add_sentinel(all: &mut Rules, verdict: u8) {
    let (prefix, address) = SENTINEL;
    let rule = Rule {
        verdict,
        prefix,
        accesses: 0,
        zero: 0,
        access: [PortRange::default(); ACCESSES],
    };
    all.entry((prefix, address)).or_insert(rule);
}

fn entry(block: IpNet, verdict: u8, access: &[Access]) -> Result<(Prefix, Rule), IsolationError> {
    let prefix = match block {
        IpNet::V4(v4) => 96 + v4.prefix_len(),
        IpNet::V6(v6) => v6.prefix_len(),
    };
    if access.len() > ACCESSES {
        return Err(IsolationError::TooMany {
            what: "port ranges in one rule",
            limit: ACCESSES,
        });
    }
    let mut ranges = [PortRange::default(); ACCESSES];
    for (to, from) in ranges.iter_mut().zip(access) {
        *to = PortRange {
            protocol: protocol_number(from.protocol),
            zero: 0,
            first: from.first,
            last: from.last,
        };
    }
    let rule = Rule {
        verdict,
        prefix,
        accesses: u8::try_from(access.len()).unwrap_or(u8::MAX),
        zero: 0,
        access: ranges,
    };
    Ok(((prefix, block.network().into()), rule))
}

/// The IANA number that rules use: ICMP stands for ICMPv6 too.
fn protocol_number(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Icmp => 1,
        Protocol::Tcp => 6,
        Protocol::Udp => 17,
        Protocol::Other(number) => number,
    }
}

/// The protocol for the IANA number in a packet. ICMP and ICMPv6 are one protocol here.
pub(crate) fn protocol(number: u8) -> Protocol {
    match number {
        1 | 58 => Protocol::Icmp,
        6 => Protocol::Tcp,
        17 => Protocol::Udp,
        other => Protocol::Other(other),
    }
}
