//! Address ranges that no sandbox can reach unless the operator opens them. The eBPF rules, the resolver and the
//! API's checks of network options all derive from this list.
//!
//! The documentation ranges (192.0.2.0/24, 198.51.100.0/24, 203.0.113.0/24, 2001:db8::/32) are not forbidden: they are
//! not routed, and tests use them as the internet.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::rules::Access;

/// A block inside a forbidden range that the operator opens. A sandbox can reach the block only if the sandbox's policy
/// allows it too. A block outside the forbidden ranges has no effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exception {
    pub block: IpNet,
    /// Services that are opened. Empty: all.
    pub access: Vec<Access>,
}

/// IANA's special-purpose address registries, and every IPv6 range that is not global unicast. The ranges do not
/// overlap, so at most one contains a given address.
///
/// `::ffff:0:0/96` has no entry in the map of rules. The map stores IPv4 addresses as IPv4-mapped ones, so the entry
/// would forbid all of IPv4. Instead, the program refuses IPv6 packets with an IPv4-mapped remote address before it
/// looks up a rule.
static FORBIDDEN: [IpNet; 24] = [
    v4([0, 0, 0, 0], 8),      // this network; Linux treats 0.0.0.0 as the local host
    v4([10, 0, 0, 0], 8),     // private
    v4([100, 64, 0, 0], 10),  // carrier-grade NAT
    v4([127, 0, 0, 0], 8),    // loopback
    v4([169, 254, 0, 0], 16), // link-local, cloud metadata
    v4([172, 16, 0, 0], 12),  // private
    v4([192, 0, 0, 0], 24),   // protocol assignments
    v4([192, 88, 99, 0], 24), // 6to4 relays
    v4([192, 168, 0, 0], 16), // private
    v4([198, 18, 0, 0], 15),  // benchmarks; this crate's resolver
    v4([224, 0, 0, 0], 3),    // multicast, reserved, broadcast
    v6([0, 0, 0, 0, 0, 0], 96), // unspecified, loopback, v4-compatible
    v6([0, 0, 0, 0, 0, 0xffff], 96), // v4-mapped
    v6([0, 0, 0, 0, 0xffff, 0], 96), // v4-translated
    v6([0x64, 0xff9b, 0, 0, 0, 0], 32), // NAT64, well-known and local
    v6([0x100, 0, 0, 0, 0, 0], 8), // discard
    v6([0x200, 0, 0, 0, 0, 0], 7), // not allocated; overlays use it
    v6([0x400, 0, 0, 0, 0, 0], 6), // not allocated
    v6([0x800, 0, 0, 0, 0, 0], 5), // not allocated
    v6([0x1000, 0, 0, 0, 0, 0], 4), // not allocated
    v6([0x2001, 0, 0, 0, 0, 0], 23), // Teredo, benchmarks, ORCHID
    v6([0x2002, 0, 0, 0, 0, 0], 16), // 6to4
    v6([0x4000, 0, 0, 0, 0, 0], 2), // not allocated; segment routing
    v6([0x8000, 0, 0, 0, 0, 0], 1), // unique local (with metadata), link-local, site-local, multicast
];

/// The forbidden ranges, IPv4 first. Host bits are zero.
#[must_use]
pub fn forbidden() -> &'static [IpNet] {
    &FORBIDDEN
}

/// Whether `address` is in a forbidden range and no exception opens it. An exception that contains `address` opens it
/// if the exception's prefix is at least as long as the range's; the exception's `access` is ignored.
#[must_use]
pub fn is_forbidden(address: IpAddr, exceptions: &[Exception]) -> bool {
    let length = |block: &IpNet| block.contains(&address).then(|| block.prefix_len());
    let range = FORBIDDEN.iter().find_map(length);
    let opened = exceptions.iter().filter_map(|e| length(&e.block)).max();
    range.is_some_and(|range| opened.is_none_or(|opened| opened < range))
}

const fn v4([a, b, c, d]: [u8; 4], bits: u8) -> IpNet {
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), bits))
}

const fn v6([a, b, c, d, e, f]: [u16; 6], bits: u8) -> IpNet {
    IpNet::V6(Ipv6Net::new_assert(
        Ipv6Addr::new(a, b, c, d, e, f, 0, 0),
        bits,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_open(address: &str, exceptions: &[&str]) -> bool {
        let exceptions = exceptions.iter().map(|block| Exception {
            block: block.parse().unwrap(),
            access: Vec::new(),
        });
        !is_forbidden(address.parse().unwrap(), &exceptions.collect::<Vec<_>>())
    }

    #[test]
    fn ranges_do_not_overlap_and_have_no_host_bits() {
        for (n, a) in FORBIDDEN.iter().enumerate() {
            assert_eq!(*a, a.trunc());
            for b in &FORBIDDEN[n + 1..] {
                assert!(!a.contains(b) && !b.contains(a), "{a} and {b}");
            }
        }
    }

    #[test]
    fn private_and_special_addresses_are_forbidden() {
        let forbidden = [
            "0.0.0.0",
            "10.1.2.3",
            "100.64.0.1",
            "100.127.255.255",
            "127.0.0.53",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.1",
            "192.88.99.1",
            "192.168.1.1",
            "198.18.0.1",
            "198.19.255.255",
            "224.0.0.251",
            "239.255.255.250",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::7f00:1",
            "::ffff:8.8.8.8",
            "::ffff:127.0.0.1",
            "::ffff:0:10.0.0.1",
            "64:ff9b::a00:1",
            "64:ff9b:1::a00:1",
            "100::1",
            "200::1",
            "2001::1",
            "2001:2::1",
            "2001:20::1",
            "2002:a00:1::1",
            "5f00::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "fec0::1",
            "ff02::1",
        ];
        for address in forbidden {
            assert!(!is_open(address, &[]), "{address}");
        }
    }

    #[test]
    fn public_and_documentation_addresses_are_not_forbidden() {
        let public = [
            "1.1.1.1",
            "8.8.8.8",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "128.0.0.1",
            "172.15.255.255",
            "172.32.0.0",
            "192.0.2.1",
            "198.17.255.255",
            "198.20.0.0",
            "198.51.100.7",
            "203.0.113.9",
            "223.255.255.255",
            "2000::1",
            "2001:200::1",
            "2001:db8::1",
            "2001:4860:4860::8888",
            "2003::1",
            "2606:4700::1111",
            "3fff:ffff::1",
        ];
        for address in public {
            assert!(is_open(address, &[]), "{address}");
        }
    }

    #[test]
    fn an_exception_opens_its_block_if_the_prefix_is_long_enough() {
        assert!(is_open("10.1.2.3", &["10.1.0.0/16"]));
        assert!(is_open("10.1.2.3", &["10.0.0.0/8"]));
        assert!(!is_open("10.1.2.3", &["10.2.0.0/16"]));
        assert!(!is_open("10.1.2.3", &["0.0.0.0/0"]));
        assert!(is_open("fd00:1::1", &["fe80::/10", "fd00:1::/32"]));
    }
}
