//! Keys and values of the maps, with the same members as in `bpf/layout.h`, where they are documented. Addresses and
//! ports are in network byte order unless a comment says otherwise.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

mod sys;

/// Maximum number of port ranges of one rule.
pub(crate) const ACCESSES: usize = 8;
/// The last [`crate::Reason`] plus one.
pub(crate) const REASONS: usize = 19;
/// Size of a name padded with zeros, in bytes.
const NAME: usize = 256;

/// An IPv6 address, or an IPv4 address as `::ffff:a.b.c.d`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(C, align(4))]
pub(crate) struct Address(pub(crate) [u8; 16]);

#[derive(Clone, Copy, Debug, Hash)]
#[repr(C)]
pub(crate) struct Settings {
    pub(crate) guest4: Address,
    pub(crate) guest6: Address,
    pub(crate) gateway4: Address,
    pub(crate) gateway6: Address,
    pub(crate) resolver4: Address,
    pub(crate) resolver6: Address,
    pub(crate) resolver_ifindex: u32,
    pub(crate) route_ifindex: u32,
    pub(crate) resolver_port: u16,
    pub(crate) proxy_port: u16,
    /// In host byte order, like `ports`.
    pub(crate) first_port: u16,
    pub(crate) ports: u16,
    pub(crate) zero: u16,
    pub(crate) guest_mac: [u8; 6],
    pub(crate) gateway_mac: [u8; 6],
    pub(crate) resolver_mac: [u8; 6],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Tap {
    pub(crate) bytes_per_s: u64,
    pub(crate) flows_per_s: u64,
    pub(crate) closed: u64,
    pub(crate) policy: u64,
    pub(crate) ifindex: u32,
    pub(crate) tenure: u32,
    pub(crate) max_flows: u32,
    pub(crate) hands_all: u32,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct State {
    pub(crate) packets_out: u64,
    pub(crate) bytes_out: u64,
    pub(crate) packets_in: u64,
    pub(crate) bytes_in: u64,
    pub(crate) opened: u64,
    pub(crate) refused: [u64; REASONS],
    pub(crate) out_due: u64,
    pub(crate) in_due: u64,
    pub(crate) flows_due: u64,
    pub(crate) records_due: u64,
}

/// The key of a rule without the prefix length, which `aya::maps::lpm_trie::Key` adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(C)]
pub(crate) struct RuleKey {
    pub(crate) number: u32,
    pub(crate) address: Address,
}

/// Ports are in host byte order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(C)]
pub(crate) struct PortRange {
    pub(crate) protocol: u8,
    pub(crate) zero: u8,
    pub(crate) first: u16,
    pub(crate) last: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub(crate) struct Rule {
    pub(crate) verdict: u8,
    pub(crate) prefix: u8,
    pub(crate) accesses: u8,
    pub(crate) zero: u8,
    pub(crate) access: [PortRange; ACCESSES],
}

pub(crate) mod verdict {
    pub(crate) const DENY: u8 = 1;
    pub(crate) const ALLOW: u8 = 2;
    pub(crate) const FORBIDDEN: u8 = 3;
    pub(crate) const HOST: u8 = 4;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(C)]
pub(crate) struct PinKey {
    pub(crate) tap: u32,
    pub(crate) address: Address,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Pin {
    pub(crate) expires: u64,
    pub(crate) tenure: u32,
    pub(crate) marks: u32,
    pub(crate) name: [u8; NAME],
}

pub(crate) mod pin_mark {
    pub(crate) const ADMITS: u32 = 1;
    pub(crate) const RULED: u32 = 2;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct FlowKey {
    pub(crate) tap: u32,
    pub(crate) port: u16,
    pub(crate) remote_port: u16,
    pub(crate) remote: Address,
    pub(crate) protocol: u8,
    pub(crate) zero: [u8; 3],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct WireKey {
    pub(crate) local: Address,
    pub(crate) remote: Address,
    pub(crate) port: u16,
    pub(crate) remote_port: u16,
    pub(crate) protocol: u8,
    pub(crate) zero: [u8; 3],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Flow {
    pub(crate) seen: u64,
    pub(crate) policy: u64,
    pub(crate) tap: u32,
    pub(crate) tenure: u32,
    pub(crate) port: u16,
    pub(crate) marks: u16,
    pub(crate) handed: u16,
    pub(crate) zero: u16,
    pub(crate) local: Address,
}

pub(crate) mod mark {
    pub(crate) const REPLIED: u16 = 1;
    pub(crate) const FIN_OUT: u16 = 2;
    pub(crate) const FIN_IN: u16 = 4;
    pub(crate) const RESET: u16 = 8;
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Uplink {
    pub(crate) local4: Address,
    pub(crate) local6: Address,
    pub(crate) mtu: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(C)]
pub(crate) struct Refusal {
    pub(crate) tap: u32,
    pub(crate) tenure: u32,
    pub(crate) reason: u8,
    pub(crate) direction: u8,
    pub(crate) protocol: u8,
    pub(crate) family: u8,
    pub(crate) source_port: u16,
    pub(crate) destination_port: u16,
    pub(crate) source: Address,
    pub(crate) destination: Address,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Record {
    pub(crate) time: u64,
    pub(crate) refusal: Refusal,
}

impl Tap {
    /// Number of the TAP's rule set: the lower half of `policy`. 0 if the TAP has no policy.
    pub(crate) fn rule_set(&self) -> u32 {
        let [a, b, c, d, ..] = self.policy.to_le_bytes();
        u32::from_le_bytes([a, b, c, d])
    }
}

impl Record {
    /// Reads a record that the programs wrote. `None` if `bytes` is too short.
    pub(crate) fn read(bytes: &[u8]) -> Option<Self> {
        let u64_at = |at: usize| Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let u32_at = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let u16_at = |at: usize| Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
        let address_at = |at: usize| Some(Address(bytes.get(at..at + 16)?.try_into().ok()?));
        Some(Self {
            time: u64_at(0)?,
            refusal: Refusal {
                tap: u32_at(8)?,
                tenure: u32_at(12)?,
                reason: *bytes.get(16)?,
                direction: *bytes.get(17)?,
                protocol: *bytes.get(18)?,
                family: *bytes.get(19)?,
                source_port: u16_at(20)?,
                destination_port: u16_at(22)?,
                source: address_at(24)?,
                destination: address_at(40)?,
            },
        })
    }
}

impl Pin {
    pub(crate) fn new(expires: u64, tenure: u32, marks: u32, text: &str) -> Self {
        let mut name = [0; NAME];
        // Domain names have at most 253 bytes, so the last byte stays zero.
        for (to, from) in name.iter_mut().zip(text.bytes().take(NAME - 1)) {
            *to = from;
        }
        Self {
            expires,
            tenure,
            marks,
            name,
        }
    }

    pub(crate) fn name(&self) -> String {
        let end = self.name.iter().position(|b| *b == 0).unwrap_or(NAME);
        String::from_utf8_lossy(&self.name[..end]).into_owned()
    }
}

impl Address {
    pub(crate) fn ip(self) -> IpAddr {
        Ipv6Addr::from(self.0).to_canonical()
    }

    pub(crate) fn is_v4(self) -> bool {
        self.ip().is_ipv4()
    }

    /// The address that is lower by `distance`.
    pub(crate) fn before(self, distance: u32) -> Self {
        let bits = u128::from_be_bytes(self.0);
        Self(bits.wrapping_sub(distance.into()).to_be_bytes())
    }
}

impl From<IpAddr> for Address {
    fn from(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(v4) => v4.into(),
            IpAddr::V6(v6) => v6.into(),
        }
    }
}

impl From<Ipv4Addr> for Address {
    fn from(v4: Ipv4Addr) -> Self {
        v4.to_ipv6_mapped().into()
    }
}

impl From<Ipv6Addr> for Address {
    fn from(v6: Ipv6Addr) -> Self {
        Self(v6.octets())
    }
}

/// A port in network byte order.
pub(crate) fn wire_port(port: u16) -> u16 {
    port.to_be()
}

#[cfg(test)]
#[path = "../../build/layout_hash.rs"]
mod layout_hash;
#[cfg(test)]
mod tests;
