//! Orders and findings: what goes into the guest and what comes back.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use serde::{Deserialize, Serialize};

/// All that one start of the program does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Order {
    /// Carried out at the same time.
    pub probes: Vec<Probe>,
}

/// One attempt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Probe {
    /// Goes back with the finding, and out in every payload: by it the other end knows what it sees.
    pub name: String,
    /// Done before, one after another. One that is not [`Outcome::Ok`] ends the probe as [`Outcome::Failed`].
    #[serde(default)]
    pub first: Vec<Action>,
    /// What is tried.
    pub action: Action,
    /// How long an answer is waited for, in milliseconds.
    pub within_ms: u64,
}

/// What can be tried.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Action {
    /// Connect, send the name, and read it back.
    Tcp(SocketAddr),
    /// Send the name until it comes back.
    Udp(SocketAddr),
    /// Ask a name server.
    Dns(Query),
    /// Look a name up at the gateway, then connect to its first address as [`Action::Tcp`].
    Name(Service),
    /// Send a frame until something comes from the address that it was for.
    Frame(Frame),
    /// Ask for the owner of an address.
    Arp(Ipv4Addr),
    /// The same of IPv6.
    Solicit(Ipv6Addr),
    /// Send one datagram to each port of each address: (addresses from `to` on) × ports 1 to `ports`.
    Flood {
        /// The first address.
        to: Ipv4Addr,
        /// How many.
        addresses: u32,
        /// Ports of each.
        ports: u16,
    },
    /// Send numbered datagrams until the time is over; counts what comes back.
    Numbered {
        /// Receiver.
        to: SocketAddr,
        /// Milliseconds between two.
        every_ms: u64,
    },
    /// Send numbered lines over one connection until the time is over or it breaks; counts what comes back.
    Stream {
        /// Receiver.
        to: SocketAddr,
        /// Milliseconds between two.
        every_ms: u64,
    },
    /// Requests one after another, each on a connection of its own; the figures are their microseconds.
    Requests {
        /// Receiver.
        to: SocketAddr,
        /// How many.
        count: u32,
    },
    /// Send frames whose checksum or cutting is left to the card, by every header that does not fit them; counts those
    /// that the card's driver took.
    Unfit(SocketAddr),
    /// Send a datagram from each of so many ports, from 10 000 on, again and again until the time is over; counts the
    /// frames.
    Begin {
        /// Receiver.
        to: SocketAddr,
        /// How many.
        count: u16,
    },
    /// Send datagrams until the time is over, whatever the network says to them; counts those that were sent.
    Pulse {
        /// Receiver.
        to: SocketAddr,
        /// Microseconds between two.
        every_us: u64,
    },
    /// Connect and send everything back that comes, until the other end closes.
    Echo(SocketAddr),
    /// Connect, wait for one byte, then send zeros until the other end closes.
    Source(SocketAddr),
    /// Connect and take what comes until the other end sends no more; then tell it how many bytes that were, as
    /// eight bytes, the lowest first.
    Sink(SocketAddr),
    /// Listen to all that the card receives until the last word is heard; tells which of the others were. Without the
    /// last word nothing is known: [`Outcome::Failed`].
    Hear {
        /// Words.
        words: Vec<String>,
        /// The last one.
        until: String,
    },
    /// Do nothing for so many milliseconds.
    Wait(u64),
}

/// A question for a name server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Query {
    /// Who is asked; absent: the gateway.
    #[serde(default)]
    pub server: Option<SocketAddr>,
    /// What for.
    pub name: String,
    /// See [`RecordKind`].
    #[serde(default)]
    pub kind: RecordKind,
    /// See [`Over`].
    #[serde(default)]
    pub over: Over,
}

/// Types of records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordKind {
    /// IPv4 addresses.
    #[default]
    A,
    /// IPv6 addresses.
    Aaaa,
    /// Text.
    Txt,
}

/// What a question travels by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Over {
    /// A datagram.
    #[default]
    Udp,
    /// A connection.
    Tcp,
}

/// A port of a name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Service {
    /// Looked up.
    pub name: String,
    /// Connected to.
    pub port: u16,
    /// Which address.
    #[serde(default)]
    pub kind: RecordKind,
    /// Milliseconds between the answer and the connection.
    #[serde(default)]
    pub pause_ms: u64,
}

/// What a frame carries above IP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Transport {
    /// A datagram.
    #[default]
    Udp,
    /// A segment, SYN unless flags are given.
    Tcp,
    /// ICMP or ICMPv6, echo request unless `icmp` is given.
    Icmp,
    /// Generic routing encapsulation.
    Gre,
    /// Stream control transmission.
    Sctp,
    /// IPv4 in IP.
    IpInIp,
}

/// A frame, by what is not usual in it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Frame {
    /// Receiver; its family is the packet's.
    pub to: Option<IpAddr>,
    /// Sender; absent: the card's address.
    pub source: Option<IpAddr>,
    /// See [`Transport`].
    pub transport: Transport,
    /// Receiver's port.
    pub port: u16,
    /// TCP flags: letters of `FSRPAU`, empty for none; absent: `S`.
    pub flags: Option<String>,
    /// ICMP type and code.
    pub icmp: Option<[u8; 2]>,
    /// Sender's port; absent: 40123.
    pub source_port: Option<u16>,
    /// Sender's MAC; absent: the card's.
    pub mac: Option<[u8; 6]>,
    /// Receiver's MAC; absent: the gateway's.
    pub to_mac: Option<[u8; 6]>,
    /// A VLAN tag.
    pub vlan: Option<u16>,
    /// EtherType; absent: the family's.
    pub ethertype: Option<u16>,
    /// Offset in bytes, a multiple of 8: the packet is a fragment that is not the first.
    pub fragment_offset: u16,
    /// More fragments follow.
    pub more_fragments: bool,
    /// IPv4: options, a multiple of four bytes.
    pub options: Vec<u8>,
    /// IPv6: an extension header of this number before the transport.
    pub extension: Option<u8>,
    /// Hops; absent: 64.
    pub ttl: Option<u8>,
    /// Said length of the packet, instead of the true one.
    pub said_length: Option<u16>,
    /// Said length of the datagram, or of the segment's header in words, instead of the true one.
    pub said_inner_length: Option<u16>,
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It got through: an answer came.
    Ok,
    /// Somebody said no: reset, port unreachable, a refusal of the name server.
    Refused,
    /// No answer in time.
    Timeout,
    /// No way there, or an error of the network.
    Unreachable,
    /// It could not be tried.
    Failed,
}

/// What came of a probe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// The probe's.
    pub name: String,
    /// See [`Outcome`].
    pub outcome: Outcome,
    /// For a person.
    pub said: String,
    /// Packets, flows or words; by action.
    #[serde(default)]
    pub count: u64,
    /// Times in microseconds; by action.
    #[serde(default)]
    pub figures: Vec<u64>,
}

impl Outcome {
    /// The name in reports.
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
