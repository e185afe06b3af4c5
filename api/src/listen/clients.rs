//! Clients behind proxies: a proxy's connections are those of many clients, so what is counted for each client there
//! is its requests under way.
//!
//! A proxy is trusted by its address alone (`--trusted-proxy`); what other peers write into `X-Forwarded-For` is not
//! looked at.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use axum::body::Body;
use axum::http::{HeaderMap, Response};
use ipnet::IpNet;

use super::seats::Peer;
use crate::proxy::{Form, Refusal};

/// Each proxy on the way adds the address that it was asked from at the end.
const FORWARDED_FOR: &str = "x-forwarded-for";

/// The addresses of proxies that speak for others. Empty: there are none.
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

    /// The client that a proxy asks for: the last address that is not a trusted proxy's itself. `None`: the peer is no
    /// trusted proxy, or it names no client.
    fn client(&self, peer: IpAddr, headers: &HeaderMap) -> Option<IpAddr> {
        if !self.has(peer) {
            return None;
        }
        let values = headers.get_all(FORWARDED_FOR).iter().rev();
        let texts = values.map(|value| value.to_str().unwrap_or_default());
        let hops = texts.flat_map(|text| text.rsplit(',')).map(parse);
        // Behind an entry that is no address, anything may have been written by the client.
        hops.map_while(|hop| hop).find(|hop| !self.has(*hop))
    }
}

/// An address with or without a port.
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

/// Counts requests under way of clients behind trusted proxies.
#[derive(Clone, Debug)]
pub(super) struct Clients {
    trusted: TrustedProxies,
    limit: usize,
    under_way: Arc<Mutex<HashMap<Peer, usize>>>,
}

/// Too many requests of one client are under way.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Crowded {
    pub(super) limit: usize,
}

impl Crowded {
    /// The answer to a request with these fields.
    pub(super) fn answer(&self, asked: &HeaderMap) -> Response<Body> {
        let limit = self.limit;
        Refusal::TooManyOfClient { limit }.answer(Form::wanted(asked))
    }
}

impl Clients {
    pub(super) fn new(trusted: TrustedProxies, limit: usize) -> Self {
        Self {
            trusted,
            limit,
            under_way: Arc::default(),
        }
    }

    /// A request of a peer. It counts until the result is dropped; `None`: it is not counted, since the peer asks for
    /// itself and its connections are counted.
    pub(super) fn enter(
        &self,
        peer: SocketAddr,
        headers: &HeaderMap,
    ) -> Result<Option<Client>, Crowded> {
        let Some(client) = self.trusted.client(peer.ip(), headers) else {
            return Ok(None);
        };
        let client = Peer::of(client);
        let mut under_way = self
            .under_way
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let count = under_way.entry(client).or_default();
        if *count >= self.limit {
            return Err(Crowded { limit: self.limit });
        }
        *count += 1;
        let counts = Arc::clone(&self.under_way);
        Ok(Some(Client(Arc::new(Counted { client, counts }))))
    }
}

/// A request that counts; with the last clone it is over.
#[derive(Clone, Debug)]
pub(super) struct Client(#[expect(dead_code, reason = "held for its end")] Arc<Counted>);

#[derive(Debug)]
struct Counted {
    client: Peer,
    counts: Arc<Mutex<HashMap<Peer, usize>>>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.client) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                counts.remove(&self.client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trusted() -> TrustedProxies {
        let blocks = ["10.0.0.0/8", "fd00::/8", "127.0.0.1/32"];
        blocks.map(|block| block.parse().unwrap()).to_vec().into()
    }

    fn client(peer: &str, forwarded: &[&str]) -> Option<String> {
        let mut headers = HeaderMap::new();
        for value in forwarded {
            headers.append(FORWARDED_FOR, value.parse().unwrap());
        }
        let client = trusted().client(peer.parse().unwrap(), &headers);
        client.map(|client| client.to_string())
    }

    #[test]
    fn a_client_is_the_last_address_that_no_trusted_proxy_has() {
        let found = |peer, forwarded: &[&str]| client(peer, forwarded).unwrap_or_default();
        assert_eq!(found("10.0.0.1", &["192.0.2.1"]), "192.0.2.1");
        assert_eq!(
            found("10.0.0.1", &["192.0.2.9, 192.0.2.1, 10.1.1.1"]),
            "192.0.2.1"
        );
        assert_eq!(
            found("fd00::1", &["192.0.2.9", "192.0.2.1:443"]),
            "192.0.2.1"
        );
        assert_eq!(
            found("::ffff:10.0.0.1", &["[2001:db8::1]:443"]),
            "2001:db8::1"
        );
        assert_eq!(found("10.0.0.1", &["2001:db8::1"]), "2001:db8::1");
        // Others may write what they like.
        assert_eq!(client("192.0.2.5", &["192.0.2.1"]), None);
        for none in [
            &["unknown"][..],
            &[""],
            &[],
            &["192.0.2.1, unknown"],
            &["10.0.0.2"],
        ] {
            assert_eq!(client("10.0.0.1", none), None, "{none:?}");
        }
    }

    #[test]
    fn requests_of_one_client_are_bounded_and_a_neighbour_s_are_not() {
        let clients = Clients::new(trusted(), 2);
        let enter = |from: &str| {
            let headers = HeaderMap::from_iter([(
                axum::http::HeaderName::from_static(FORWARDED_FOR),
                from.parse().unwrap(),
            )]);
            clients.enter("10.0.0.1:9".parse().unwrap(), &headers)
        };
        let first = enter("192.0.2.1").unwrap();
        let second = enter("192.0.2.1").unwrap();
        assert!(first.is_some() && second.is_some());
        assert_eq!(enter("192.0.2.1").unwrap_err(), Crowded { limit: 2 });
        assert!(enter("192.0.2.2").is_ok());
        drop(first);
        assert!(enter("192.0.2.1").is_ok());
        drop(second);
        assert!(clients.under_way.lock().unwrap().is_empty());
    }
}
