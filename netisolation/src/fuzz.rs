//! Entry points of the fuzz target `network`: clients' policies and names, guests' DNS queries, the programs' records
//! of guests' packets, and the kernel's tables and netlink responses.

use std::{net::IpAddr, time::Duration};

use ipnet::IpNet;

use crate::{
    datapath::{
        clock,
        layout::{Address, Record, Rule, verdict},
        rule_sets::Rules,
    },
    enforcement::{compile, refusals},
    policy::{NamePattern, Policy},
    resolver,
    taps::device,
};

/// Passes `bytes` to the parser that their first byte selects.
///
/// # Panics
/// Panics if a parsed value violates an assertion.
pub fn network(bytes: &[u8]) {
    let Some((choice, bytes)) = bytes.split_first() else {
        return;
    };
    match choice % 6 {
        0 => {
            if let Ok(policy) = serde_json::from_slice(bytes) {
                check_policy(&policy);
            }
        }
        1 => name(bytes),
        2 => resolver::fuzz::query(bytes),
        3 => record(bytes),
        4 => drop(ranges::rtnetlink::acknowledgement(bytes)),
        _ => {
            let text = String::from_utf8_lossy(bytes);
            let _tables = (text.lines().filter_map(device::address6)).count();
            let _routes = (text.lines())
                .filter_map(|line| device::route4(line).or_else(|| device::route6(line)))
                .count();
        }
    }
}

/// Checks that the compiled rules and [`Policy::allows`] make the same decisions.
///
/// # Panics
/// Panics if they differ.
pub fn check_policy(policy: &Policy) {
    let Ok(rules) = compile::rules_of(policy) else {
        return;
    };
    // A rule for an IPv4-mapped IPv6 block would have the same key as a rule for the IPv4 block. The API rejects such
    // blocks.
    let mapped = |block: IpNet| block.addr().is_ipv6() && Address::from(block.network()).is_v4();
    if policy.rules.iter().any(|rule| mapped(rule.block)) {
        return;
    }
    for rule in policy.rules.iter().take(64) {
        for address in edges(rule.block) {
            let rule = longest(&rules, address);
            let allowed = rule.is_some_and(|rule| rule.verdict == verdict::ALLOW);
            assert_eq!(allowed, policy.allows(address), "{address}");
        }
    }
}

/// The first and last address of a block, and their neighbours.
pub(crate) fn edges(block: IpNet) -> impl Iterator<Item = IpAddr> {
    let near = |address: IpAddr| match address {
        IpAddr::V4(v4) => [-1, 0, 1].map(|by| {
            let bits = v4.to_bits().wrapping_add_signed(by);
            IpAddr::V4(bits.into())
        }),
        IpAddr::V6(v6) => [-1, 0, 1].map(|by| {
            let bits = v6.to_bits().wrapping_add_signed(by);
            IpAddr::V6(bits.into())
        }),
    };
    let edges = [block.network(), block.broadcast()].into_iter();
    // The programs refuse IPv4-mapped addresses in IPv6 packets, and the unspecified address is the sentinel's.
    let is_evaluated = |a: &IpAddr| match a {
        IpAddr::V4(_) => true,
        IpAddr::V6(_) => !Address::from(*a).is_v4() && !a.is_unspecified(),
    };
    edges.flat_map(near).filter(is_evaluated)
}

/// The longest match, as in `rule_for` of `bpf/net.bpf.c`: rules for IPv6 do not apply to IPv4 addresses.
pub(crate) fn longest(rules: &Rules, address: IpAddr) -> Option<Rule> {
    let wanted = u128::from_be_bytes(Address::from(address).0);
    let matching = rules.iter().filter(|((prefix, network), _)| {
        let host_bits = 128 - u32::from(*prefix);
        let network_of = |bits: u128| bits.checked_shr(host_bits).unwrap_or(0);
        network_of(wanted) == network_of(u128::from_be_bytes(network.0))
    });
    let ((prefix, _), rule) = matching.max_by_key(|((prefix, _), _)| *prefix)?;
    (address.is_ipv6() || *prefix >= 96).then_some(*rule)
}

/// Checks that a pattern survives serialization and matches only names with its suffix.
fn name(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let (pattern, name) = text.split_once('\n').unwrap_or((text, "example.com"));
    let Ok(pattern) = pattern.parse::<NamePattern>() else {
        return;
    };
    let written = String::from(pattern.clone());
    assert!(written.len() <= 255 && written.is_ascii(), "{written:?}");
    assert_eq!(written, written.to_ascii_lowercase());
    assert_eq!(written.parse::<NamePattern>().as_ref(), Ok(&pattern));
    if pattern.matches(name) && written != "*" {
        assert!(name.ends_with(written.trim_start_matches('*')));
    }
}

fn record(bytes: &[u8]) {
    let Some(record) = Record::read(bytes) else {
        return;
    };
    let refusal = record.refusal;
    let _known = (
        refusals::reason(refusal.reason),
        compile::protocol(refusal.protocol),
    );
    let _shown = (refusal.source.ip(), refusal.destination.ip());
    let _time = clock::wall_time(record.time);
    let _later = Duration::from_nanos(record.time);
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    /// The seeds include inputs that once failed.
    #[test]
    fn the_fuzz_seeds_pass() {
        let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dev/fuzz/seeds/network");
        let mut read = 0;
        for seed in fs::read_dir(seeds).unwrap() {
            super::network(&fs::read(seed.unwrap().path()).unwrap());
            read += 1;
        }
        assert!(read > 0);
    }
}
