//! Flows that the programs hand to the proxy, a process on this host that checks the names in TLS and HTTP.
//!
//! ```text
//! guest ── TAP ─► from_guest: TCP to 80 or 443, allowed by a name ─► resolver's device ─► proxy's listener
//! guest ◄─ TAP ◄─ from_resolver ◄────────────────────────────────── resolver's device ◄─ proxy
//! ```
//! A handed flow is an entry of the flow maps like any other, between an address that identifies the TAP and the
//! listener. The proxy asks by the peer address which sandbox it serves and where the guest wanted to go.
//!
//! What must never happen: a flow that is allowed only by a name reaches an uplink at these ports; a packet from
//! elsewhere is taken for one of the proxy.

use std::net::SocketAddr;

use model::SandboxId;

/// A flow that was handed to the proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandedFlow {
    pub sandbox: SandboxId,
    /// Where the guest connected to. The programs have evaluated the policy for this address.
    pub remote: SocketAddr,
    /// The names for which the resolver answered this address to the sandbox, in lower case, without those that expired
    /// more than a minute ago. After a restart of the server, only the last name of each address is known until the
    /// guest queries the others again. Empty if the flow is still open long after its names expired.
    pub names: Vec<String>,
    /// The policy's rules allow the flow, too: it was handed over because one of the names has header rules.
    pub admitted_by_address: bool,
    /// [`crate::Policy::hands_all`]: the flow was handed over whatever its port and names.
    pub is_of_all: bool,
}
