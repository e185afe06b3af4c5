//! Flows that the eBPF programs redirect to the proxy, a process on this host that checks the names in TLS and HTTP.
//!
//! ```text
//! guest ── TAP ─► from_guest: TCP to 80 or 443, allowed by a name ─► resolver's device ─► proxy's listener
//! guest ◄─ TAP ◄─ from_resolver ◄────────────────────────────────── resolver's device ◄─ proxy
//! ```
//! A redirected flow is an entry of the flow maps like any other, between an address that identifies the TAP and the
//! listener. With the peer address, the proxy looks up the sandbox of a connection and the guest's destination.
//!
//! What must never happen: a flow that only a name allows reaches an uplink at these ports; a packet from elsewhere is
//! mistaken for a packet of the proxy.

use std::net::SocketAddr;

use model::SandboxId;

/// A flow that was redirected to the proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandedFlow {
    pub sandbox: SandboxId,
    /// The guest's destination. The programs have evaluated the policy for this address.
    pub remote: SocketAddr,
    /// The names that the resolver resolved to this address for the sandbox, in lower case, without names that expired
    /// more than a minute ago. After a restart of the server, only the last name of each address is known until the
    /// guest queries the others again. Empty if the flow is still open long after its names expired.
    pub names: Vec<String>,
    /// The policy's rules also allow the flow. It was redirected because one of the names has header rules.
    pub admitted_by_address: bool,
    /// [`crate::Policy::hands_all`]: the flow was redirected whatever its port and names.
    pub is_of_all: bool,
}
