//! Address ranges that no sandbox can reach unless the operator opens them, and addresses that the operator denies. All
//! checks of addresses use a [`ForbiddenAddresses`]: the eBPF rules, the resolver, the API's checks of network options,
//! and the connections that the host makes for clients.
//!
//! The documentation ranges (192.0.2.0/24, 198.51.100.0/24, 203.0.113.0/24, 2001:db8::/32) are not forbidden: they are
//! not routed, and tests use them as the internet.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{Arc, LazyLock},
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::service::{Access, Protocol};

/// A block of addresses, and services in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destinations {
    pub block: IpNet,
    /// Empty: all services.
    pub access: Vec<Access>,
}

/// The addresses that no sandbox can reach, whatever its policy allows: built-in ranges, except for the operator's
/// exceptions inside them, and addresses that the operator denies, without exception.
#[derive(Clone, Debug, Default)]
pub struct ForbiddenAddresses(Arc<Lists>);

#[derive(Debug, Default)]
struct Lists {
    exceptions: Vec<Destinations>,
    /// Includes the IPv6 forms of IPv4 blocks.
    denied: Vec<Destinations>,
}

const ALL_TCP: Access = Access {
    protocol: Protocol::Tcp,
    first: 0,
    last: u16::MAX,
};

/// What applies to a block for all sandboxes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The sandbox's policy decides.
    Open,
    /// Services for which the sandbox's policy decides; at least one.
    Only(Vec<Access>),
    /// Services that are forbidden; at least one.
    AllBut(Vec<Access>),
    Forbidden,
}

/// IANA's special-purpose address registries, every IPv6 range that is not global unicast, and public addresses at which
/// clouds serve their virtual machines. The ranges do not overlap.
///
/// `::ffff:0:0/96` has no entry in the map of rules. The map stores IPv4 addresses as IPv4-mapped ones, so the entry
/// would forbid all of IPv4. Instead, the program refuses IPv6 packets with an IPv4-mapped remote address before it
/// looks up a rule.
static FORBIDDEN: [IpNet; 25] = [
    v4([0, 0, 0, 0], 8),     // this network; Linux treats 0.0.0.0 as the local host
    v4([10, 0, 0, 0], 8),    // private
    v4([100, 64, 0, 0], 10), // carrier-grade NAT; metadata of Alibaba Cloud
    v4([127, 0, 0, 0], 8),   // loopback
    v4([168, 63, 129, 16], 32), // Azure's WireServer
    v4([169, 254, 0, 0], 16), // link-local; metadata of most clouds
    v4([172, 16, 0, 0], 12), // private
    v4([192, 0, 0, 0], 24),  // protocol assignments; metadata of Oracle Cloud
    v4([192, 88, 99, 0], 24), // 6to4 relays
    v4([192, 168, 0, 0], 16), // private
    v4([198, 18, 0, 0], 15), // benchmarks; the resolver of sandboxes
    v4([224, 0, 0, 0], 3),   // multicast, reserved, broadcast
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

/// [`FORBIDDEN`], and the IPv6 forms of its IPv4 ranges, so that an exception for all of NAT64 opens none of them.
static RANGES: LazyLock<Vec<IpNet>> = LazyLock::new(|| {
    let embedded = FORBIDDEN.iter().flat_map(embedded);
    FORBIDDEN.iter().copied().chain(embedded).collect()
});

impl ForbiddenAddresses {
    /// An exception opens its block if a built-in range contains it. Outside of these ranges it has no effect. `denied`
    /// includes the IPv4-mapped, NAT64 and 6to4 forms of IPv4 blocks.
    #[must_use]
    pub fn new(exceptions: Vec<Destinations>, denied: Vec<Destinations>) -> Self {
        let canonical = |all: Vec<Destinations>| -> Vec<Destinations> {
            let canonical = all.into_iter().map(|one| Destinations {
                block: canonical(one.block),
                ..one
            });
            canonical.collect()
        };
        let with_forms = |one: Destinations| {
            let blocks = std::iter::once(one.block).chain(embedded(&one.block));
            let blocks: Vec<IpNet> = blocks.collect();
            blocks.into_iter().map(move |block| Destinations {
                block,
                access: one.access.clone(),
            })
        };
        Self(Arc::new(Lists {
            exceptions: canonical(exceptions),
            denied: canonical(denied).into_iter().flat_map(with_forms).collect(),
        }))
    }

    /// Whether every service of an address is forbidden.
    #[must_use]
    pub fn forbids(&self, address: IpAddr) -> bool {
        self.verdict(&address.into()) == Verdict::Forbidden
    }

    /// Whether a TCP connection to this address and port is forbidden.
    #[must_use]
    pub fn forbids_tcp(&self, to: SocketAddr) -> bool {
        let covered = |access: &[Access]| access.iter().any(|access| is_for(access, to.port()));
        match self.verdict(&to.ip().into()) {
            Verdict::Open => false,
            Verdict::Only(access) => !covered(&access),
            Verdict::AllBut(access) => covered(&access),
            Verdict::Forbidden => true,
        }
    }

    /// Whether an exception names an address of this host: it opens only this address, or a part of the loopback range.
    #[must_use]
    pub fn opens_host(&self, to: SocketAddr) -> bool {
        self.naming_host(to.ip()).any(|exception| {
            exception.access.is_empty() || exception.access.iter().any(|a| is_for(a, to.port()))
        })
    }

    fn naming_host(&self, address: IpAddr) -> impl Iterator<Item = &Destinations> {
        let is_exact = |block: &IpNet| block.prefix_len() == block.max_prefix_len();
        self.0.exceptions.iter().filter(move |exception| {
            exception.block.contains(&address)
                && (is_exact(&exception.block) || address.is_loopback())
        })
    }

    /// The TCP ports of an address of this host to which [`Self::check_connection`] lets the host connect.
    #[must_use]
    pub fn opened_ports_of_host(&self, address: IpAddr) -> Vec<Access> {
        let allowed = match self.verdict(&address.into()) {
            Verdict::Open => vec![ALL_TCP],
            Verdict::Only(access) => access,
            Verdict::AllBut(denied) => without(&denied),
            Verdict::Forbidden => Vec::new(),
        };
        let opened = self.naming_host(address).flat_map(|exception| {
            let all = exception.access.is_empty().then_some(ALL_TCP);
            exception.access.iter().copied().chain(all)
        });
        let both = opened.flat_map(|one| allowed.iter().map(move |other| meet(one, *other)));
        let mut both: Vec<Access> = both.flatten().collect();
        both.sort_unstable_by_key(|access| (access.first, access.last));
        both.dedup();
        both
    }

    /// Every block with a verdict of its own. The longest one that contains an address has the address's verdict.
    pub fn blocks(&self) -> impl Iterator<Item = IpNet> {
        let own = self.0.exceptions.iter().chain(&self.0.denied);
        RANGES.iter().copied().chain(own.map(|own| own.block))
    }

    /// The verdict for a block that has one of its own, or for a single address.
    #[must_use]
    pub fn verdict(&self, block: &IpNet) -> Verdict {
        let mut denied = Vec::new();
        let around = |one: &&Destinations| one.block.contains(block);
        for Destinations { access, .. } in self.0.denied.iter().filter(around) {
            if access.is_empty() {
                return Verdict::Forbidden;
            }
            let new = access.iter().filter(|a| !denied.contains(*a));
            denied.extend(new.copied().collect::<Vec<_>>());
        }
        match self.without_denials(block) {
            Verdict::Open if denied.is_empty() => Verdict::Open,
            Verdict::Open => Verdict::AllBut(denied),
            Verdict::Only(mut access) => {
                access.retain(|opened| !denied.iter().any(|denied| overlap(opened, denied)));
                match access.as_slice() {
                    [] => Verdict::Forbidden,
                    _ => Verdict::Only(access),
                }
            }
            closed @ (Verdict::AllBut(_) | Verdict::Forbidden) => closed,
        }
    }

    /// The verdict of the built-in ranges and the exceptions. An exception counts if its prefix is at least as long as
    /// the range's. The longest ones decide.
    fn without_denials(&self, block: &IpNet) -> Verdict {
        let length = |around: &IpNet| around.contains(block).then(|| around.prefix_len());
        let Some(range) = RANGES.iter().filter_map(length).max() else {
            return Verdict::Open;
        };
        let opened = || {
            let exceptions = self.0.exceptions.iter();
            exceptions.filter_map(|e| length(&e.block).map(|bits| (bits, &e.access)))
        };
        let longest = opened().map(|(bits, _)| bits).max();
        let Some(longest) = longest.filter(|bits| *bits >= range) else {
            return Verdict::Forbidden;
        };
        let decisive = || opened().filter(|(bits, _)| *bits == longest);
        if decisive().any(|(_, access)| access.is_empty()) {
            return Verdict::Open;
        }
        Verdict::Only(decisive().flat_map(|(_, access)| access).copied().collect())
    }
}

fn is_for(access: &Access, port: u16) -> bool {
    access.protocol == Protocol::Tcp && (access.first..=access.last).contains(&port)
}

fn overlap(a: &Access, b: &Access) -> bool {
    a.protocol == b.protocol && a.first <= b.last && b.first <= a.last
}

/// The TCP ports in both ranges.
fn meet(a: Access, b: Access) -> Option<Access> {
    let both = Access {
        protocol: Protocol::Tcp,
        first: a.first.max(b.first),
        last: a.last.min(b.last),
    };
    (a.protocol == Protocol::Tcp && overlap(&a, &b)).then_some(both)
}

/// The TCP ports that are in none of the ranges.
fn without(denied: &[Access]) -> Vec<Access> {
    let is_tcp = |access: &&Access| access.protocol == Protocol::Tcp;
    denied
        .iter()
        .filter(is_tcp)
        .fold(vec![ALL_TCP], |left, denied| {
            let around = [
                denied.first.checked_sub(1).map(|last| (0, last)),
                denied.last.checked_add(1).map(|first| (first, u16::MAX)),
            ];
            let around = around.into_iter().flatten().map(|(first, last)| Access {
                protocol: Protocol::Tcp,
                first,
                last,
            });
            let around: Vec<_> = around.collect();
            let parts = left
                .iter()
                .flat_map(|one| around.iter().map(|part| meet(*one, *part)));
            parts.flatten().collect()
        })
}

/// The block without host bits. An IPv4-mapped block becomes the IPv4 block.
#[must_use]
pub fn canonical(block: IpNet) -> IpNet {
    let mapped = match block.addr() {
        IpAddr::V6(address) => address
            .to_ipv4_mapped()
            .zip(block.prefix_len().checked_sub(96)),
        IpAddr::V4(_) => None,
    };
    let plain = mapped.and_then(|(address, bits)| IpNet::new(address.into(), bits).ok());
    plain.unwrap_or(block).trunc()
}

/// The blocks of IPv6 addresses that stand for the addresses of an IPv4 block: IPv4-mapped (RFC 4291, 2.5.5.2), NAT64
/// (RFC 6052, 2.1) and 6to4 (RFC 3056, 2).
fn embedded(block: &IpNet) -> Vec<IpNet> {
    let IpNet::V4(block) = block else {
        return Vec::new();
    };
    let (bits, length) = (u128::from(block.network().to_bits()), block.prefix_len());
    let form = |prefix: u128, shift: u8| {
        let address = Ipv6Addr::from_bits(prefix | bits << shift);
        IpNet::new(address.into(), 96 - shift + length).ok()
    };
    let forms = [
        form(0xffff << 32, 0),
        form(0x64_ff9b << 96, 0),
        form(0x2002 << 112, 80),
    ];
    forms.into_iter().flatten().collect()
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

    /// `CIDR`, or `CIDR:PORT` for a port of TCP and UDP.
    fn destinations(texts: &[&str]) -> Vec<Destinations> {
        let read = |text: &&str| {
            let (block, port) = match text.rsplit_once('/') {
                Some((_, tail)) if tail.contains(':') => text.rsplit_once(':').unwrap(),
                _ => (*text, ""),
            };
            let access = port.parse().ok().map(|port| {
                [Protocol::Tcp, Protocol::Udp].map(|protocol| Access {
                    protocol,
                    first: port,
                    last: port,
                })
            });
            Destinations {
                block: block.parse().unwrap(),
                access: access.into_iter().flatten().collect(),
            }
        };
        texts.iter().map(read).collect()
    }

    fn is_open(address: &str, exceptions: &[&str]) -> bool {
        let forbidden = ForbiddenAddresses::new(destinations(exceptions), Vec::new());
        !forbidden.forbids(address.parse().unwrap())
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
            "168.63.129.16",
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
            "100.100.100.200",
            "192.0.0.192",
            "fd00:ec2::254",
            "fd20:ce::254",
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
            "168.63.129.15",
            "168.63.129.17",
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
    #[test]
    fn a_denied_block_is_forbidden_in_all_forms_and_no_exception_opens_it() {
        let denied = destinations(&["203.0.113.0/24", "2600:1::/32"]);
        let exceptions = [
            "203.0.113.9/32",
            "64:ff9b::/96",
            "2002::/16",
            "::ffff:0:0/96",
        ];
        let forbidden = ForbiddenAddresses::new(destinations(&exceptions), denied);
        for address in [
            "203.0.113.9",
            "::ffff:203.0.113.9",
            "64:ff9b::203.0.113.9",
            "2002:cb00:7109::1",
            "2600:1:2::3",
            // The forms of a built-in range.
            "64:ff9b::169.254.169.254",
            "2002:a9fe:a9fe::1",
            "::ffff:10.0.0.1",
        ] {
            assert!(forbidden.forbids(address.parse().unwrap()), "{address}");
        }
        for address in [
            "203.0.114.1",
            "64:ff9b::203.0.114.1",
            "2002:cb00:7209::1",
            "2600:2::1",
        ] {
            assert!(!forbidden.forbids(address.parse().unwrap()), "{address}");
        }
        let mapped = ForbiddenAddresses::new(Vec::new(), destinations(&["::ffff:203.0.113.0/120"]));
        assert!(mapped.forbids("203.0.113.9".parse().unwrap()));
    }

    #[test]
    fn a_port_is_denied_or_opened_alone() {
        let forbidden = ForbiddenAddresses::new(
            destinations(&["10.0.0.0/8:443", "10.0.0.0/8:25", "10.1.0.0/16"]),
            destinations(&["0.0.0.0/0:25", "203.0.113.0/24:443", "203.0.113.9/32:80"]),
        );
        let is_open = |to: &str| !forbidden.forbids_tcp(to.parse().unwrap());
        for open in [
            "10.2.0.1:443",
            "10.1.0.1:22",
            "203.0.113.8:80",
            "192.0.2.1:26",
        ] {
            assert!(is_open(open), "{open}");
        }
        for closed in [
            "10.2.0.1:25",
            "10.1.0.1:25",
            "10.2.0.1:80",
            "203.0.113.8:443",
            "203.0.113.9:443",
            "203.0.113.9:80",
            "203.0.113.9:25",
            "192.0.2.1:25",
            "127.0.0.1:443",
        ] {
            assert!(!is_open(closed), "{closed}");
        }
        assert!(!forbidden.forbids("203.0.113.9".parse().unwrap()));
    }

    #[test]
    fn an_exception_for_a_range_does_not_open_the_addresses_of_this_host_in_it() {
        let forbidden = ForbiddenAddresses::new(
            destinations(&[
                "10.0.0.0/8",
                "10.0.0.5/32:53",
                "203.0.113.9/32",
                "127.0.0.0/8",
            ]),
            Vec::new(),
        );
        let opens = |to: &str| forbidden.opens_host(to.parse().unwrap());
        for open in ["10.0.0.5:53", "203.0.113.9:1", "127.0.0.1:80"] {
            assert!(opens(open), "{open}");
        }
        for closed in ["10.0.0.5:80", "10.0.0.6:53", "203.0.113.8:1", "[::1]:80"] {
            assert!(!opens(closed), "{closed}");
        }
    }
}
