//! Services at an address.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Protocol {
    Tcp,
    Udp,
    /// ICMP and ICMPv6. Only echo and errors about known flows can pass.
    Icmp,
    /// Any other IP protocol, by its IANA number. Never passes.
    Other(u8),
}

/// A protocol and an inclusive range of remote ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access {
    /// TCP, UDP or ICMP; no other protocol passes. ICMP means echo and ignores the ports.
    pub protocol: Protocol,
    pub first: u16,
    pub last: u16,
}
