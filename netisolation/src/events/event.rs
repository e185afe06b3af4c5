//! Refusal events and counters, as clients of this crate see them.

use std::{collections::BTreeMap, net::SocketAddr, time::SystemTime};

use model::SandboxId;
use ranges::Protocol;
use serde::{Deserialize, Serialize};

/// Direction from the sandbox's point of view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// From the sandbox.
    Out,
    /// To the sandbox.
    In,
}

/// Reason why a packet or DNS query was refused. Serialized as the name in snake case; `enum reason` in `bpf/layout.h`
/// uses the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Reason {
    /// Neither a rule nor a name of the policy allows the destination.
    Policy = 1,
    /// The address is in a range that only the operator can open: private, link-local, loopback, multicast, metadata.
    Forbidden = 2,
    /// The destination is an address of the host.
    Host = 3,
    /// The source IP or MAC address is not the sandbox's.
    Spoofed = 4,
    /// The frame has a VLAN tag, or is not IPv4, IPv6, or an ARP request for the gateway.
    NotIp = 5,
    /// The packet is a fragment: later fragments carry no ports to check.
    Fragment = 6,
    /// The packet has IP options or IPv6 extension headers.
    Options = 7,
    /// A header or a DNS query is invalid: for example, lengths are inconsistent, or no network stack sends this
    /// combination of TCP flags.
    Malformed = 8,
    /// The IP protocol or ICMP type is never allowed.
    Protocol = 9,
    /// A packet to port 53 of an address other than the gateway.
    Dns = 10,
    /// A DNS query for a name that the policy does not allow, or for a record type that is never answered.
    Name = 11,
    /// DNS rebinding: an allowed name resolved to a forbidden address.
    Rebinding = 12,
    /// The packet belongs to no flow that the sandbox opened.
    Unsolicited = 13,
    /// The bandwidth limit is exceeded.
    Bandwidth = 14,
    /// The limit on new flows per second, open flows or DNS queries is exceeded, or no port is free for a new flow.
    Flows = 15,
    /// The host has no route through an uplink with a usable address, the packet is larger than the route's MTU, or the
    /// packet's TTL has run out.
    NoRoute = 16,
    /// An internal failure, such as a full map, or a resolved address that could not be pinned.
    Internal = 17,
    /// The frame's offload request (checksum or segmentation) does not match the packet's transport header.
    Offload = 18,
}

/// One or more refused packets of the same flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetEvent {
    pub sandbox: SandboxId,
    /// For a flow's first refused packet, the time of its refusal. For a total, the time at which it was taken.
    pub time: SystemTime,
    pub direction: Direction,
    pub protocol: Protocol,
    /// Port 0 if the packet has no ports.
    pub source: SocketAddr,
    /// Port 0 if the packet has no ports.
    pub destination: SocketAddr,
    pub reason: Reason,
    /// The queried DNS name, or the name under which the remote address is pinned.
    pub name: Option<String>,
    /// Number of packets or DNS queries that this event stands for.
    pub count: u64,
}

/// Traffic of one sandbox since it received its TAP. Byte counts include Ethernet headers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Packets from the sandbox that passed. A packet that is segmented later counts once.
    pub packets_out: u64,
    pub bytes_out: u64,
    /// Packets to the sandbox that passed.
    pub packets_in: u64,
    pub bytes_in: u64,
    /// Flows opened.
    pub flows: u64,
    /// Refused packets and DNS queries, by reason.
    pub refused: BTreeMap<Reason, u64>,
    /// Refused packets and DNS queries that are in no event, because there were too many. `refused` includes them.
    pub events_lost: u64,
}
