//! Limits how often a client may send signed file URLs that match no sandbox. Such a URL needs no key, and each is
//! compared with every sandbox of the server, or of all servers in a cluster. URLs that match do not count.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use axum::http::HeaderMap;

use super::peer::{Peer, TrustedProxies};
use crate::auth::{Bucket, Rate};
use crate::proxy::Refusal;

/// The burst allows a client as many concurrent checks as one sandbox serves requests.
const RATE: Rate = Rate {
    per_second: 20,
    burst: 400,
};
/// Maximum number of clients with individual limits. Above it, further clients share one limit.
const CLIENTS: usize = 4096;

/// The buckets of clients that have recently sent signed URLs.
#[derive(Clone, Debug, Default)]
pub(super) struct GuessLimiter {
    trusted: TrustedProxies,
    buckets: Arc<Mutex<HashMap<Peer, Bucket>>>,
}

/// A signed URL that counts as a guess unless it turns out to match.
#[derive(Debug)]
pub(super) struct Guess<'a> {
    limiter: &'a GuessLimiter,
    client: Peer,
}

impl GuessLimiter {
    pub(super) fn new(trusted: TrustedProxies) -> Self {
        let buckets = Arc::default();
        Self { trusted, buckets }
    }

    /// Counts a signed URL.
    ///
    /// # Errors
    /// Returns [`Refusal::TooManyGuesses`] if the client has reached its limit.
    pub(super) fn take(&self, peer: SocketAddr, headers: &HeaderMap) -> Result<Guess<'_>, Refusal> {
        let client = self.trusted.client_of(peer, headers);
        self.take_at(client, Instant::now())
    }

    fn take_at(&self, client: Peer, now: Instant) -> Result<Guess<'_>, Refusal> {
        let mut buckets = self.lock();
        if buckets.len() >= CLIENTS {
            buckets.retain(|_, bucket| !bucket.is_full(RATE, now));
        }
        let client = if buckets.len() < CLIENTS || buckets.contains_key(&client) {
            client
        } else {
            Peer::of(IpAddr::V4(Ipv4Addr::UNSPECIFIED))
        };
        let bucket = buckets
            .entry(client)
            .or_insert_with(|| Bucket::full(RATE, now));
        let taken = bucket.take(RATE, now);
        taken.map_err(|_| Refusal::TooManyGuesses)?;
        let limiter = self;
        Ok(Guess { limiter, client })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Peer, Bucket>> {
        self.buckets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Guess<'_> {
    /// Does not count the URL, because it matches a sandbox.
    pub(super) fn forgive(self) {
        if let Some(bucket) = self.limiter.lock().get_mut(&self.client) {
            bucket.give_back(RATE);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn peer(n: u32) -> Peer {
        Peer::of(IpAddr::V4(n.into()))
    }

    #[test]
    fn a_client_may_guess_at_its_rate_and_right_guesses_are_free() {
        let limiter = GuessLimiter::default();
        let now = Instant::now();
        for _ in 0..1000 {
            limiter.take_at(peer(1), now).unwrap().forgive();
        }
        for _ in 0..RATE.burst {
            limiter.take_at(peer(1), now).unwrap();
        }
        let refused = limiter.take_at(peer(1), now).map(drop);
        assert_eq!(refused, Err(Refusal::TooManyGuesses));
        assert!(limiter.take_at(peer(2), now).is_ok());
        let later = now + Duration::from_secs(1);
        assert!(limiter.take_at(peer(1), later).is_ok());
    }

    #[test]
    fn the_number_of_clients_is_limited_and_those_that_wait_are_forgotten() {
        let limiter = GuessLimiter::default();
        let now = Instant::now();
        for n in 1..=10_000 {
            let _ = limiter.take_at(peer(n), now);
        }
        assert_eq!(limiter.lock().len(), CLIENTS + 1);
        let refused = limiter.take_at(peer(10_001), now).map(drop);
        assert_eq!(refused, Err(Refusal::TooManyGuesses));
        let later = now + Duration::from_secs(60);
        assert!(limiter.take_at(peer(10_001), later).is_ok());
        assert_eq!(limiter.lock().len(), 1);
    }
}
