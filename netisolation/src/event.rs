//! What was refused, and what was counted.

use std::{collections::BTreeMap, net::SocketAddr, time::SystemTime};

use model::SandboxId;
use serde::{Deserialize, Serialize};

/// A protocol that can be let through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Protocol {
    /// Transmission Control Protocol.
    Tcp,
    /// User Datagram Protocol.
    Udp,
    /// ICMP and ICMPv6: echo, and the errors of known flows.
    Icmp,
    /// Anything else: never passes.
    Other(u8),
}

/// As the sandbox sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// From the sandbox.
    Out,
    /// Towards it.
    In,
}

/// Why something did not pass. The wire form is the name in snake case; the numbers are shared with the programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Reason {
    /// No rule and no name of the policy allows it.
    Policy = 1,
    /// A range that only the operator can open: private, link-local, loopback, multicast, metadata.
    Forbidden = 2,
    /// An address of the host itself.
    Host = 3,
    /// The source is not the sandbox's address, or the source MAC not its MAC.
    Spoofed = 4,
    /// Neither IPv4, IPv6 nor an ARP request for the gateway; VLAN tags.
    NotIp = 5,
    /// A fragment: its ports cannot be seen.
    Fragment = 6,
    /// IP options or extension headers.
    Options = 7,
    /// Headers that lie about lengths, or TCP flags that no stack sends.
    Malformed = 8,
    /// A protocol that never passes.
    Protocol = 9,
    /// Port 53 of somebody else than the gateway.
    Dns = 10,
    /// The resolver was asked for a name that the policy has not.
    Name = 11,
    /// A name led to a forbidden address (rebinding).
    Rebinding = 12,
    /// Nothing of the sandbox's began it.
    Unsolicited = 13,
    /// The bandwidth limit.
    Bandwidth = 14,
    /// The limit of new flows, or of flows at a time.
    Flows = 15,
    /// The host has no route, or none through an uplink.
    NoRoute = 16,
    /// Something inside: a map is full. Never lets anything pass.
    Internal = 17,
    /// A checksum or a segmentation that is left to the host and is not of the packet's own transport header.
    Offload = 18,
}

/// A refused flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetEvent {
    /// Whose.
    pub sandbox: SandboxId,
    /// When its first packet was refused.
    pub time: SystemTime,
    /// See [`Direction`].
    pub direction: Direction,
    /// See [`Protocol`].
    pub protocol: Protocol,
    /// Sender; port 0 where there is none.
    pub source: SocketAddr,
    /// Receiver.
    pub destination: SocketAddr,
    /// See [`Reason`].
    pub reason: Reason,
    /// The name that was asked for, or by which the address is known.
    pub name: Option<String>,
    /// Packets that this record stands for.
    pub count: u64,
}

/// Figures of one sandbox since its TAP was given to it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Packets that passed, from the sandbox. What a network card would cut into segments is one.
    pub packets_out: u64,
    /// Their bytes, Ethernet header included.
    pub bytes_out: u64,
    /// Packets that passed, to the sandbox.
    pub packets_in: u64,
    /// Their bytes.
    pub bytes_in: u64,
    /// Flows that began.
    pub flows: u64,
    /// Packets refused, by reason.
    pub refused: BTreeMap<Reason, u64>,
    /// Refused packets whose record was lost because there were too many; counted in `refused` all the same.
    pub events_lost: u64,
}
