//! A policy as entries of the maps. Pure.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;

use crate::{
    Access, Exception, IsolationError, Policy, Protocol, Verdict, forbidden,
    layout::{ACCESSES, Address, PortRange, Rule, verdict},
    rules,
};

/// The number of what holds for all sandboxes; see `bpf/layout.h`.
pub(crate) const FOR_ALL: u32 = 0;
/// Rules of one policy at most: what the programs' map has room for, shared by all.
const MAX_RULES: usize = 4096;

/// Bits of an address, and the address.
pub(crate) type Prefix = (u8, Address);
/// Entries of the map of rules, all under one number.
pub(crate) type Rules = BTreeMap<Prefix, Rule>;

/// The rules of a policy.
pub(crate) fn rules_of(policy: &Policy) -> Result<Rules, IsolationError> {
    if policy.rules.len() > MAX_RULES {
        return Err(IsolationError::TooMany {
            what: "rules",
            limit: MAX_RULES,
        });
    }
    let entry = |rule: &crate::Rule| {
        Ok(match &rule.verdict {
            Verdict::Deny => entry(rule.block, verdict::DENY, &[])?,
            Verdict::Allow(access) => entry(rule.block, verdict::ALLOW, access)?,
        })
    };
    let mut all: Rules = policy.rules.iter().map(entry).collect::<Result<_, _>>()?;
    add_mark(&mut all, verdict::DENY);
    Ok(all)
}

/// What is denied to all, what of it the operator opens, and the host's own addresses. An exception outside of what is
/// denied to all changes nothing.
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
    add_mark(&mut all, verdict::FORBIDDEN);
    Ok(all)
}

/// Where reading back begins: at the address that is nobody's. A rule for it alone does as well.
fn add_mark(all: &mut Rules, verdict: u8) {
    let (prefix, address) = rules::MARK;
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

/// In IPv4's registry; ICMP stands for ICMPv6 too.
fn protocol_number(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Icmp => 1,
        Protocol::Tcp => 6,
        Protocol::Udp => 17,
        Protocol::Other(number) => number,
    }
}

/// Of a number in a packet.
pub(crate) fn protocol(number: u8) -> Protocol {
    match number {
        1 | 58 => Protocol::Icmp,
        6 => Protocol::Tcp,
        17 => Protocol::Udp,
        other => Protocol::Other(other),
    }
}
