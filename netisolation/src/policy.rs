//! What one sandbox may reach. Pure: no maps, no clock.

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

mod forbidden;
mod lists;
mod name;

pub use forbidden::{forbidden, is_forbidden};
pub use lists::DefaultEgress;
pub use name::{NamePattern, Naming};

/// A sandbox's policy. Its default is to deny everything. Addresses that the host's operator has not opened
/// ([`crate::Exception`]: private ranges, link-local, loopback, multicast, metadata) stay denied, whatever it says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// By address: the longest prefix decides; what no rule matches is denied. Order means nothing, and no two
    /// rules have the same block.
    pub rules: Vec<Rule>,
    /// By name: addresses that our resolver has answered for these names may be reached while the answer holds.
    pub names: Vec<NamePattern>,
    /// Where our resolver asks for this sandbox; empty: where the host's operator says.
    pub dns_servers: Vec<SocketAddr>,
    /// Bytes a second, each way; absent: the host's limit alone.
    pub bytes_per_s: Option<u64>,
    /// New flows a second; absent: the host's limit alone.
    pub flows_per_s: Option<u32>,
}

/// What holds for a block of addresses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// IPv4 or IPv6; host bits are zero.
    pub block: IpNet,
    /// See [`Verdict`].
    pub verdict: Verdict,
}

/// See [`Rule`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Nothing of it.
    Deny,
    /// These of its services; empty: all (TCP, UDP, ICMP echo).
    Allow(Vec<Access>),
}

/// A protocol and a range of its ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access {
    /// TCP, UDP, or ICMP echo (whose ports are meaningless).
    pub protocol: crate::Protocol,
    /// First port.
    pub first: u16,
    /// Last port.
    pub last: u16,
}

/// Why there is no such policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// Not a name that can be asked for.
    #[error(
        "{0:?} is no domain name: labels of letters, digits and hyphens, with `*.` before them or `*` alone"
    )]
    Name(String),
}

impl Policy {
    /// Reaches everything that the host's operator lets sandboxes reach.
    #[must_use]
    pub fn internet() -> Self {
        let everything = ["0.0.0.0/0", "::/0"];
        let rules = everything
            .iter()
            .filter_map(|block| block.parse().ok())
            .map(|block| Rule {
                block,
                verdict: Verdict::Allow(Vec::new()),
            });
        Self {
            rules: rules.collect(),
            ..Self::default()
        }
    }

    /// Whether the rules allow something at an address, as the programs read them: the longest prefix decides. Names
    /// and what is forbidden to all are not looked at.
    #[must_use]
    pub fn allows(&self, address: IpAddr) -> bool {
        let having = self.rules.iter().filter(|r| r.block.contains(&address));
        let longest = having.max_by_key(|rule| rule.block.prefix_len());
        longest.is_some_and(|rule| rule.verdict != Verdict::Deny)
    }
}
