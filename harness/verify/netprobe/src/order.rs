//! Orders, which the prover sends into the guest, and findings, which come back.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use serde::{Deserialize, Serialize};

/// The probes of one run of the program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Order {
    /// Carried out in parallel.
    pub probes: Vec<Probe>,
}

/// One attempt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Probe {
    /// Identifies the probe in its finding and in every payload that it sends, so that the other end can attribute
    /// packets.
    pub name: String,
    /// Actions to perform before `action`, in order. If any of them does not end with [`Outcome::Ok`], the probe ends
    /// with [`Outcome::Failed`].
    #[serde(default)]
    pub first: Vec<Action>,
    pub action: Action,
    /// Time limit of each action, in milliseconds.
    pub within_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Action {
    /// Connect, send the probe's name, and read it back.
    Tcp(SocketAddr),
    /// Send the probe's name repeatedly until it comes back.
    Udp(SocketAddr),
    /// Query a name server.
    Dns(Query),
    /// Resolve a name at the gateway, then connect to its first address as [`Action::Tcp`] does.
    Name(Service),
    /// Send a frame repeatedly until a frame arrives from its destination address.
    Frame(Frame),
    /// Send an ARP request for an address repeatedly until a reply arrives.
    Arp(Ipv4Addr),
    /// Send a neighbour solicitation for an address repeatedly until a reply arrives.
    Solicit(Ipv6Addr),
    /// Send one datagram to each port from 1 to `ports` of each address, starting at `to`.
    Flood {
        to: Ipv4Addr,
        /// Number of addresses.
        addresses: u32,
        ports: u16,
    },
    /// Send numbered datagrams until the time limit. Counts the datagrams that come back; the figure is the number
    /// sent.
    Numbered {
        to: SocketAddr,
        /// Milliseconds between two datagrams.
        every_ms: u64,
    },
    /// Send numbered lines over one connection until the time limit or until the connection fails. Counts the lines
    /// that come back.
    Stream {
        to: SocketAddr,
        /// Milliseconds between two lines.
        every_ms: u64,
    },
    /// Send requests one after another, each on a new connection. The figures are their durations in microseconds.
    Requests {
        to: SocketAddr,
        /// Number of requests.
        count: u32,
    },
    /// Send frames whose headers request offloads (checksum, segmentation) that do not match the frame. Counts the
    /// frames that the card's driver accepted.
    Unfit(SocketAddr),
    /// Send a datagram from each of `count` source ports, starting at 10 000, repeatedly until the time limit. Counts
    /// the datagrams that the card's driver accepted.
    Begin {
        to: SocketAddr,
        /// Number of source ports.
        count: u16,
    },
    /// Send datagrams until the time limit and ignore errors. Counts the datagrams that were sent.
    Pulse {
        to: SocketAddr,
        /// Microseconds between two datagrams.
        every_us: u64,
    },
    /// Connect and echo all received bytes until the other end closes the connection.
    Echo(SocketAddr),
    /// Connect, wait for one byte, then send zeros until the other end closes the connection.
    Source(SocketAddr),
    /// Connect, receive until the other end shuts down its side, then send the number of received bytes as a
    /// little-endian 64-bit integer.
    Sink(SocketAddr),
    /// Watch all frames that the card receives until one contains `until`. Reports which of `words` occurred. If no
    /// frame contains `until` in time, the result is unknown: [`Outcome::Failed`].
    Hear { words: Vec<String>, until: String },
    /// Wait for a number of milliseconds.
    Wait(u64),
}

/// A DNS query.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Query {
    /// `None`: the gateway.
    #[serde(default)]
    pub server: Option<SocketAddr>,
    pub name: String,
    #[serde(default)]
    pub kind: RecordKind,
    #[serde(default)]
    pub over: Over,
}

/// Type of a DNS record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordKind {
    #[default]
    A,
    Aaaa,
    Txt,
}

/// Transport of a DNS query.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Over {
    #[default]
    Udp,
    Tcp,
}

/// A port at a name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Service {
    pub name: String,
    pub port: u16,
    /// Family of the address.
    #[serde(default)]
    pub kind: RecordKind,
    /// Milliseconds between the DNS response and the connection.
    #[serde(default)]
    pub pause_ms: u64,
}

/// The protocol above IP in a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Transport {
    #[default]
    Udp,
    /// A segment, by default with SYN.
    Tcp,
    /// ICMP or ICMPv6, by default an echo request.
    Icmp,
    Gre,
    Sctp,
    /// IPv4 in IPv4 or IPv6.
    IpInIp,
}

/// A frame, described by its unusual properties. With `to` set and all other fields `None`, zero or empty, it is a
/// valid UDP datagram.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Frame {
    /// Destination address. Required; its family is the family of the packet.
    pub to: Option<IpAddr>,
    /// Source address. `None`: the guest's address.
    pub source: Option<IpAddr>,
    pub transport: Transport,
    /// Destination port.
    pub port: u16,
    /// TCP flags as letters of `FSRPAU`, empty for no flags. `None`: `S`.
    pub flags: Option<String>,
    /// ICMP type and code. `None`: an echo request.
    pub icmp: Option<[u8; 2]>,
    /// `None`: 40123.
    pub source_port: Option<u16>,
    /// Source MAC address. `None`: the guest's.
    pub mac: Option<[u8; 6]>,
    /// Destination MAC address. `None`: the gateway's.
    pub to_mac: Option<[u8; 6]>,
    /// VLAN tag. `None`: untagged.
    pub vlan: Option<u16>,
    /// `None`: the EtherType of the address family.
    pub ethertype: Option<u16>,
    /// Fragment offset in bytes, a multiple of 8. Not zero: the packet is a fragment after the first one.
    pub fragment_offset: u16,
    /// Sets the flag "more fragments".
    pub more_fragments: bool,
    /// IPv4 options, a multiple of four bytes.
    pub options: Vec<u8>,
    /// Protocol number of an IPv6 extension header before the transport header.
    pub extension: Option<u8>,
    /// TTL or hop limit. `None`: 64.
    pub ttl: Option<u8>,
    /// Value of the length field in the IP header. `None`: the correct length.
    pub said_length: Option<u16>,
    /// Length field of a UDP datagram in bytes, or of a TCP header in 32-bit words. `None`: the correct length.
    pub said_inner_length: Option<u16>,
}

/// Result of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// A response arrived.
    Ok,
    /// A TCP reset, an ICMP "port unreachable", or an error code of the name server.
    Refused,
    /// No response within the time limit.
    Timeout,
    /// No route, or another network error.
    Unreachable,
    /// The attempt could not be made.
    Failed,
}

/// The result of a probe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// Name of the probe.
    pub name: String,
    pub outcome: Outcome,
    /// Description for readers of the report.
    pub said: String,
    /// Number of packets, lines or bytes, depending on the action.
    #[serde(default)]
    pub count: u64,
    /// Durations in microseconds or other numbers, depending on the action.
    #[serde(default)]
    pub figures: Vec<u64>,
}

impl Outcome {
    /// The name in reports, the same as in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Refused => "refused",
            Self::Timeout => "timeout",
            Self::Unreachable => "unreachable",
            Self::Failed => "failed",
        }
    }
}
