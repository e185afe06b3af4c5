//! Entry points of the fuzz target `network`: policies that clients write, names, queries of guests, records that
//! the programs make of guests' packets, and tables and answers of the kernel.

use std::{net::IpAddr, time::Duration};

use ipnet::IpNet;

use crate::{
    NamePattern, Policy,
    compile::{self, Rules},
    device,
    layout::{Address, Record, verdict},
    records, resolver,
};

/// What the bytes are, by the first of them.
///
/// # Panics
/// Something does not hold that is asserted here.
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
        4 => drop(device::acknowledgement(bytes)),
        _ => {
            let text = String::from_utf8_lossy(bytes);
            let _tables = (text.lines().filter_map(device::address6)).count();
            let _routes = (text.lines())
                .filter_map(|line| device::route4(line).or_else(|| device::route6(line)))
                .count();
        }
    }
}

/// The programs read out of their map what the policy says.
///
/// # Panics
/// They do not.
pub fn check_policy(policy: &Policy) {
    let Ok(rules) = compile::rules_of(policy) else {
        return;
    };
    // A block of IPv4 written as one of IPv6 is another rule of the same addresses: no route makes one.
    let mapped = |block: IpNet| block.addr().is_ipv6() && Address::from(block.network()).is_v4();
    if policy.rules.iter().any(|rule| mapped(rule.block)) {
        return;
    }
    for rule in policy.rules.iter().take(64) {
        for address in edges(rule.block) {
            let allowed = longest(&rules, address) == Some(verdict::ALLOW);
            assert_eq!(allowed, policy.allows(address), "{address}");
        }
    }
}

/// First and last address of a block, and their neighbours.
fn edges(block: IpNet) -> impl Iterator<Item = IpAddr> {
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
    // An address of IPv4 that is written as one of IPv6 never is in a packet, and the unspecified one marks where
    // reading the map back begins.
    let is_sent = |a: &IpAddr| match a {
        IpAddr::V4(_) => true,
        IpAddr::V6(_) => !Address::from(*a).is_v4() && !a.is_unspecified(),
    };
    edges.flat_map(near).filter(is_sent)
}

/// As `rule_at` of `bpf/net.bpf.c`: an address of IPv4 has no rule of IPv6.
fn longest(rules: &Rules, address: IpAddr) -> Option<u8> {
    let wanted = u128::from_be_bytes(Address::from(address).0);
    let matching = rules.iter().filter(|((prefix, network), _)| {
        let rest = 128 - u32::from(*prefix);
        let cut = |bits: u128| bits.checked_shr(rest).unwrap_or(0);
        cut(wanted) == cut(u128::from_be_bytes(network.0))
    });
    let ((prefix, _), rule) = matching.max_by_key(|((prefix, _), _)| *prefix)?;
    (address.is_ipv6() || *prefix >= 96).then_some(rule.verdict)
}

/// A pattern is read as it was written, and holds no more than it says.
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
    if pattern.has(name) && written != "*" {
        assert!(name.ends_with(written.trim_start_matches('*')));
    }
}

/// A record of the programs.
fn record(bytes: &[u8]) {
    let Some(record) = Record::read(bytes) else {
        return;
    };
    let refusal = record.refusal;
    let _known = (
        records::reason(refusal.reason),
        compile::protocol(refusal.protocol),
    );
    let _shown = (refusal.source.ip(), refusal.destination.ip());
    let _time = crate::clock::wall_time(record.time);
    let _later = Duration::from_nanos(record.time);
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    /// Inputs that are kept, those that failed once among them.
    #[test]
    fn the_kept_inputs_hold() {
        let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dev/fuzz/seeds/network");
        let mut read = 0;
        for seed in fs::read_dir(seeds).unwrap() {
            super::network(&fs::read(seed.unwrap().path()).unwrap());
            read += 1;
        }
        assert!(read > 0);
    }
}
