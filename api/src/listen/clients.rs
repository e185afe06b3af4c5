//! Limits for clients behind reverse proxies. A proxy's connections carry the requests of many clients, so the server
//! limits each client's in-flight requests rather than the proxy's connections.
//!
//! Only the peer's address determines whether it is a trusted proxy (`server.trusted_proxies`). `X-Forwarded-For` from any
//! other peer is ignored.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use axum::body::Body;
use axum::http::{HeaderMap, Response};

use super::peer::{Peer, TrustedProxies};
use crate::proxy::{Form, Refusal};

/// Limits the in-flight requests of each client behind a trusted proxy.
#[derive(Clone, Debug)]
pub(super) struct ClientLimiter {
    trusted: TrustedProxies,
    limit: usize,
    under_way: Arc<Mutex<HashMap<Peer, usize>>>,
}

/// The client has reached its limit of in-flight requests.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooManyRequests {
    pub(super) limit: usize,
}

impl TooManyRequests {
    /// The 429 response, as JSON or HTML depending on the request headers `asked`.
    pub(super) fn answer(&self, asked: &HeaderMap) -> Response<Body> {
        let limit = self.limit;
        Refusal::TooManyOfClient { limit }.answer(Form::wanted(asked))
    }
}

impl ClientLimiter {
    pub(super) fn new(trusted: TrustedProxies, limit: usize) -> Self {
        Self {
            trusted,
            limit,
            under_way: Arc::default(),
        }
    }

    /// Counts a request until the last clone of the returned permit is dropped. Returns `None` if the peer is not a
    /// trusted proxy, because the connection limit applies instead. Requests for which a proxy names no client count
    /// for the proxy's own address.
    pub(super) fn admit(
        &self,
        peer: SocketAddr,
        headers: &HeaderMap,
    ) -> Result<Option<ClientPermit>, TooManyRequests> {
        if !self.trusted.has(peer.ip()) {
            return Ok(None);
        }
        let client = self.trusted.client_of(peer, headers);
        let mut under_way = self
            .under_way
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let count = under_way.entry(client).or_default();
        if *count >= self.limit {
            return Err(TooManyRequests { limit: self.limit });
        }
        *count += 1;
        let counts = Arc::clone(&self.under_way);
        Ok(Some(ClientPermit(Arc::new(CountedRequest {
            client,
            counts,
        }))))
    }
}

/// Counts one request for its client until the last clone is dropped.
#[derive(Clone, Debug)]
pub(super) struct ClientPermit(
    #[expect(dead_code, reason = "held for its Drop")] Arc<CountedRequest>,
);

#[derive(Debug)]
struct CountedRequest {
    client: Peer,
    counts: Arc<Mutex<HashMap<Peer, usize>>>,
}

impl Drop for CountedRequest {
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
    use crate::listen::peer::FORWARDED_FOR;

    fn trusted() -> TrustedProxies {
        let blocks = ["10.0.0.0/8", "fd00::/8", "127.0.0.1/32"];
        blocks.map(|block| block.parse().unwrap()).to_vec().into()
    }

    fn client(peer: &str, forwarded: &[&str]) -> Option<String> {
        let mut headers = HeaderMap::new();
        for value in forwarded {
            headers.append(FORWARDED_FOR, value.parse().unwrap());
        }
        let trusted = trusted();
        let peer = peer.parse().unwrap();
        let client = trusted
            .has(peer)
            .then(|| trusted.client(&headers))
            .flatten();
        client.map(|client| client.to_string())
    }

    #[test]
    fn a_client_is_the_last_forwarded_address_that_is_not_a_trusted_proxy() {
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
        // `X-Forwarded-For` from an untrusted peer is ignored.
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
    fn each_client_behind_a_proxy_has_its_own_limit() {
        let clients = ClientLimiter::new(trusted(), 2);
        let admit = |from: &str| {
            let headers = HeaderMap::from_iter([(
                axum::http::HeaderName::from_static(FORWARDED_FOR),
                from.parse().unwrap(),
            )]);
            clients.admit("10.0.0.1:9".parse().unwrap(), &headers)
        };
        let first = admit("192.0.2.1").unwrap();
        let second = admit("192.0.2.1").unwrap();
        assert!(first.is_some() && second.is_some());
        assert_eq!(
            admit("192.0.2.1").unwrap_err(),
            TooManyRequests { limit: 2 }
        );
        assert!(admit("192.0.2.2").is_ok());
        drop(first);
        assert!(admit("192.0.2.1").is_ok());
        drop(second);
        assert!(clients.under_way.lock().unwrap().is_empty());
    }

    #[test]
    fn requests_without_a_client_share_the_limit_of_their_proxy() {
        let clients = ClientLimiter::new(trusted(), 2);
        let admit = |peer: &str| clients.admit(peer.parse().unwrap(), &HeaderMap::new());
        let held = [admit("10.0.0.1:9").unwrap(), admit("10.0.0.1:8").unwrap()];
        assert!(held.iter().all(Option::is_some));
        assert_eq!(
            admit("10.0.0.1:9").unwrap_err(),
            TooManyRequests { limit: 2 }
        );
        assert!(admit("10.0.0.2:9").unwrap().is_some());
        // Peers that are not proxies are subject to the connection limit instead.
        assert!(admit("192.0.2.1:9").unwrap().is_none());
    }
}
