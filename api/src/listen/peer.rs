//! Peers and clients: which addresses are counted together, and which proxies are trusted to name their clients.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use axum::http::HeaderMap;
use ipnet::IpNet;

/// Addresses that are counted together: one IPv4 address or one IPv6 /64 network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Peer(IpAddr);

impl Peer {
    /// All IPv6 addresses of a /64 network are one peer: a client with one of them usually controls them all.
    pub(super) fn of(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V6(address) => {
                let network = u128::from(address) >> 64 << 64;
                IpAddr::V6(Ipv6Addr::from(network))
            }
            v4 => v4,
        })
    }
}

/// The header to which each proxy appends the address of the peer that sent it the request.
pub(super) const FORWARDED_FOR: &str = "x-forwarded-for";

/// Addresses of reverse proxies whose `X-Forwarded-For` is trusted. Empty: no proxy is trusted.
#[derive(Clone, Debug, Default)]
pub struct TrustedProxies(Arc<[IpNet]>);

impl From<Vec<IpNet>> for TrustedProxies {
    fn from(blocks: Vec<IpNet>) -> Self {
        Self(blocks.into())
    }
}

impl TrustedProxies {
    pub(super) fn has(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.0.iter().any(|block| block.contains(&address))
    }

    /// The client of a request: its peer, or the client that a trusted proxy names. If a proxy names no client, the
    /// proxy itself counts as the client.
    pub(super) fn client_of(&self, peer: SocketAddr, headers: &HeaderMap) -> Peer {
        let named = self.has(peer.ip()).then(|| self.client(headers)).flatten();
        Peer::of(named.unwrap_or(peer.ip()))
    }

    /// The client that a trusted proxy names: the last address in `X-Forwarded-For` that is not itself a trusted proxy.
    /// `None` if there is no such address, or if an entry after it is not an address.
    pub(super) fn client(&self, headers: &HeaderMap) -> Option<IpAddr> {
        let values = headers.get_all(FORWARDED_FOR).iter().rev();
        let texts = values.map(|value| value.to_str().unwrap_or_default());
        let hops = texts.flat_map(|text| text.rsplit(',')).map(parse);
        // Proxies write only addresses. Everything to the left of any other entry may come from the client.
        hops.map_while(|hop| hop).find(|hop| !self.has(*hop))
    }
}

/// Parses an address with or without a port. `None`: `hop` is not an address.
fn parse(hop: &str) -> Option<IpAddr> {
    let hop = hop.trim();
    let bare = hop.trim_start_matches('[').trim_end_matches(']');
    let address = bare.parse().ok();
    address.or_else(|| {
        hop.parse::<SocketAddr>()
            .ok()
            .map(|with_port| with_port.ip())
    })
}
