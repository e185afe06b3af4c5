//! Compiles policies and operator exceptions to entries of the map of rules. Pure.

use std::net::IpAddr;

use ipnet::IpNet;
use ranges::{Access, ForbiddenAddresses, Protocol, Verdict};

use crate::{
    datapath::{
        layout::{ACCESSES, Address, PortRange, Rule, verdict},
        rule_sets::{Prefix, Rules, SENTINEL},
    },
    error::IsolationError,
    policy::{self, Policy, RuleAction},
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

/// The rule set for all sandboxes: forbidden addresses, the operator's exceptions, and the host's addresses.
///
/// # Errors
/// Returns [`IsolationError::TooMany`] if more ports of a block are opened or denied than fit into a rule.
pub(crate) fn rules_for_all(
    forbidden: &ForbiddenAddresses,
    host: &[IpAddr],
) -> Result<Rules, IsolationError> {
    let mapped = |block: &IpNet| Address::from(block.network()).is_v4() && block.addr().is_ipv6();
    let mut all = Rules::new();
    for block in forbidden.blocks().filter(|block| !mapped(block)) {
        let entry = match forbidden.verdict(&block) {
            Verdict::Open => entry(block, verdict::ALLOW, &[]),
            Verdict::Only(access) => entry(block, verdict::ALLOW, &access),
            Verdict::AllBut(access) => entry(block, verdict::FORBIDDEN, &access),
            Verdict::Forbidden => entry(block, verdict::FORBIDDEN, &[]),
        };
        all.extend([entry?]);
    }
    for address in host {
        let opened = forbidden.opened_ports_of_host(*address);
        all.extend([entry(IpNet::from(*address), verdict::HOST, &opened)?]);
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

/// The IANA number that rules use. ICMP also stands for ICMPv6.
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

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use ranges::Destinations;

    use super::*;
    use crate::fuzz::{edges, longest};

    fn destinations(block: &str, ports: &[u16]) -> Destinations {
        let access = ports.iter().flat_map(|port| {
            [Protocol::Tcp, Protocol::Udp].map(|protocol| Access {
                protocol,
                first: *port,
                last: *port,
            })
        });
        Destinations {
            block: block.parse().unwrap(),
            access: access.collect(),
        }
    }

    /// Like `evaluate` in `bpf/net.bpf.c`.
    fn is_refused(rules: &Rules, to: SocketAddr) -> bool {
        let covers = |rule: &Rule| {
            let mut access = rule.access.iter().take(rule.accesses.into());
            let is_for = |a: &PortRange| a.protocol == 6 && (a.first..=a.last).contains(&to.port());
            rule.accesses == 0 || access.any(is_for)
        };
        longest(rules, to.ip()).is_some_and(|rule| match rule.verdict {
            verdict::HOST => rule.accesses == 0 || !covers(&rule),
            verdict => (verdict == verdict::FORBIDDEN) == covers(&rule),
        })
    }

    #[test]
    fn the_map_and_the_judges_outside_of_it_refuse_the_same() {
        let forbidden = ForbiddenAddresses::new(
            vec![
                destinations("10.0.0.0/8", &[443]),
                destinations("10.0.0.0/8", &[80]),
                destinations("10.1.0.0/16", &[]),
                destinations("64:ff9b::/96", &[]),
                destinations("fd00::/8", &[]),
                destinations("198.51.100.7/32", &[]),
            ],
            vec![
                destinations("0.0.0.0/0", &[25]),
                destinations("::/0", &[25]),
                destinations("10.1.2.0/24", &[443]),
                destinations("10.1.2.4/30", &[80]),
                destinations("198.51.100.0/24", &[]),
                destinations("fd00:1::/32", &[443]),
            ],
        );
        let rules = rules_for_all(&forbidden, &[]).unwrap();
        let mut refused = 0;
        for address in forbidden.blocks().flat_map(edges) {
            for port in [25, 80, 443, 9] {
                let to = SocketAddr::new(address, port);
                assert_eq!(is_refused(&rules, to), forbidden.forbids_tcp(to), "{to}");
                refused += u32::from(forbidden.forbids_tcp(to));
            }
        }
        assert!(refused > 100, "{refused}");
        let exceptions = [
            ("192.0.2.1/32", &[][..]),
            ("192.0.2.2/32", &[80, 25]),
            ("192.0.2.0/24", &[]),
            ("10.0.0.1/32", &[80]),
            ("10.0.0.0/8", &[]),
            ("127.0.0.0/8", &[25, 443]),
            ("127.0.0.1/32", &[80]),
        ];
        let exceptions = exceptions.map(|(block, ports)| destinations(block, ports));
        let denied = vec![
            destinations("0.0.0.0/0", &[25]),
            destinations("10.0.0.3/32", &[]),
        ];
        let forbidden = ForbiddenAddresses::new(exceptions.into(), denied);
        let host = [
            "192.0.2.1",
            "192.0.2.2",
            "192.0.2.3",
            "10.0.0.1",
            "10.0.0.2",
            "127.0.0.1",
            "127.0.0.2",
        ];
        let host = host.map(|address| address.parse::<IpAddr>().unwrap());
        let rules = rules_for_all(&forbidden, &host).unwrap();
        let mut open = Vec::new();
        for to in host
            .iter()
            .flat_map(|ip| [25, 80, 443].map(|port| SocketAddr::from((*ip, port))))
        {
            let is_open = !forbidden.forbids_tcp(to) && forbidden.opens_host(to);
            assert_eq!(is_refused(&rules, to), !is_open, "{to}");
            open.extend(is_open.then(|| to.to_string()));
        }
        assert_eq!(
            open,
            [
                "192.0.2.1:80",
                "192.0.2.1:443",
                "192.0.2.2:80",
                "10.0.0.1:80",
                "127.0.0.1:80",
                "127.0.0.2:443"
            ]
        );
        let ports = [1, 2, 3, 4, 5];
        let many = vec![destinations("203.0.113.0/24", &ports)];
        let many = ForbiddenAddresses::new(Vec::new(), many);
        assert!(rules_for_all(&many, &[]).is_err());
    }
}
