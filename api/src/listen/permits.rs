//! Admission of connections: a total limit and a limit per peer, with eviction when a limit is reached.
//!
//! The loop in [`Server::serve`](super::Server::serve) owns the counts. When the last clone of a permit is dropped, the
//! permit's id is sent to this loop, so the counts need no lock. An evicted connection ([`eviction`](super::eviction))
//! is not counted from then on; the task that serves the connection closes it.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use tokio::sync::{Notify, mpsc};

use super::activity::Activity;
use super::eviction::{Candidate, Full, Newcomer, victim};
use super::limits::Limits;
use super::peer::{Peer, TrustedProxies};

/// The admitted connections and their counts.
#[derive(Debug)]
pub(super) struct Permits {
    in_all: usize,
    of_peer: usize,
    proxies: TrustedProxies,
    holders: HashMap<u64, Holder>,
    by_peer: HashMap<Peer, usize>,
    next: u64,
    back: mpsc::UnboundedSender<u64>,
}

#[derive(Debug)]
struct Holder {
    peer: Peer,
    is_proxy: bool,
    link: Arc<Link>,
}

impl Permits {
    /// The ids of dropped permits are sent to `back`; the receiver passes them to [`Permits::release`].
    pub(super) fn new(limits: &Limits, back: mpsc::UnboundedSender<u64>) -> Self {
        Self {
            in_all: limits.connections,
            of_peer: limits.connections_of_peer,
            proxies: limits.trusted_proxies.clone(),
            holders: HashMap::new(),
            by_peer: HashMap::new(),
            next: 0,
            back,
        }
    }

    /// Admits a connection from `address`, if necessary by evicting another. Connections of a trusted proxy are subject
    /// to the total limit only.
    pub(super) fn acquire(&mut self, address: IpAddr) -> Result<Permit, Full> {
        let peer = Peer::of(address);
        let is_proxy = self.proxies.has(address);
        if !is_proxy && self.count(peer) >= self.of_peer {
            self.make_room(Full::PerPeer, peer)?;
        }
        if self.taken() >= self.in_all {
            self.make_room(Full::Total, peer)?;
        }
        let id = self.next;
        self.next += 1;
        let link = Arc::new(Link::default());
        let holder = Holder {
            peer,
            is_proxy,
            link: Arc::clone(&link),
        };
        self.holders.insert(id, holder);
        *self.by_peer.entry(peer).or_default() += 1;
        let back = self.back.clone();
        Ok(Permit(Arc::new(Shared { id, link, back })))
    }

    /// Evicts a connection to make room for a new connection from `newcomer`.
    fn make_room(&mut self, full: Full, newcomer: Peer) -> Result<(), Full> {
        let newcomer = Newcomer {
            peer: newcomer,
            has: self.count(newcomer),
        };
        while let Some(id) = victim(full, newcomer, self.candidates()) {
            // If the victim was upgraded in the meantime, it is no longer a candidate, and the next iteration chooses
            // another connection.
            if self.holders.get(&id).is_some_and(|one| one.link.evict()) {
                self.release(id);
                return Ok(());
            }
        }
        Err(full)
    }

    fn candidates(&self) -> impl Iterator<Item = Candidate> {
        let closable = self
            .holders
            .iter()
            .filter(|(_, one)| one.link.is_closable());
        closable.map(|(&id, one)| {
            let (rank, since) = one.link.activity.eviction_rank();
            Candidate {
                id,
                peer: one.peer,
                of_peer: self.count(one.peer),
                is_proxy: one.is_proxy,
                rank,
                since,
            }
        })
    }

    fn count(&self, peer: Peer) -> usize {
        self.by_peer.get(&peer).copied().unwrap_or_default()
    }

    /// Stops counting a connection. Has no effect on an evicted connection, which is no longer counted.
    pub(super) fn release(&mut self, id: u64) {
        let Some(Holder { peer, .. }) = self.holders.remove(&id) else {
            return;
        };
        if let Some(of_peer) = self.by_peer.get_mut(&peer) {
            *of_peer = of_peer.saturating_sub(1);
            if *of_peer == 0 {
                self.by_peer.remove(&peer);
            }
        }
    }

    pub(super) fn taken(&self) -> usize {
        self.holders.len()
    }
}

const OPEN: u8 = 0;
const PINNED: u8 = 1;
const EVICTED: u8 = 2;

/// Shared by the admission loop and the task that serves the connection.
#[derive(Debug)]
struct Link {
    activity: Arc<Activity>,
    state: AtomicU8,
    evicted: Notify,
}

impl Default for Link {
    fn default() -> Self {
        Self {
            activity: Activity::new(),
            state: AtomicU8::new(OPEN),
            evicted: Notify::new(),
        }
    }
}

impl Link {
    fn is_closable(&self) -> bool {
        self.state.load(Ordering::Relaxed) == OPEN
    }

    fn change(&self, to: u8) -> bool {
        let changed = self
            .state
            .compare_exchange(OPEN, to, Ordering::Relaxed, Ordering::Relaxed);
        changed.is_ok()
    }

    fn evict(&self) -> bool {
        let is_closable = self.change(EVICTED);
        if is_closable {
            self.evicted.notify_one();
        }
        is_closable
    }
}

/// Admission of one connection. It is released when the last clone is dropped; an upgraded connection keeps a clone
/// until it ends.
#[derive(Clone, Debug)]
pub(super) struct Permit(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    id: u64,
    link: Arc<Link>,
    // Unbounded, but it holds at most one message per admitted connection.
    back: mpsc::UnboundedSender<u64>,
}

impl Permit {
    /// The activity of the admitted connection.
    pub(super) fn activity(&self) -> &Arc<Activity> {
        &self.0.link.activity
    }

    /// Completes when the connection is evicted. Only the task that serves the connection may wait for this.
    pub(super) async fn evicted(&self) {
        self.0.link.evicted.notified().await;
    }

    /// Exempts the connection from eviction. After an upgrade, the task that closes evicted connections no longer runs.
    pub(super) fn pin(&self) {
        // Has no effect if the connection has already been evicted; its task then closes it.
        let _gone = self.0.link.change(PINNED);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Fails only after the admission loop has ended; then the counts do not matter.
        let _ended = self.back.send(self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::Version;
    use proptest::prelude::*;

    fn peer(text: &str) -> Peer {
        Peer::of(text.parse().unwrap())
    }

    #[test]
    fn addresses_of_one_ipv6_network_are_one_peer() {
        assert_eq!(peer("2001:db8::1"), peer("2001:db8::ffff:1"));
        assert_ne!(peer("2001:db8::1"), peer("2001:db8:0:1::1"));
        assert_eq!(peer("::ffff:10.0.0.1"), peer("10.0.0.1"));
        assert_ne!(peer("10.0.0.1"), peer("10.0.0.2"));
    }

    fn permits(in_all: usize, of_peer: usize) -> (Permits, mpsc::UnboundedReceiver<u64>) {
        let limits = Limits {
            connections: in_all,
            connections_of_peer: of_peer,
            trusted_proxies: vec!["10.0.0.9/32".parse().unwrap()].into(),
            ..Limits::default()
        };
        let (back, returned) = mpsc::unbounded_channel();
        (Permits::new(&limits, back), returned)
    }

    fn is_evicted(permit: &Permit) -> bool {
        permit.0.link.state.load(Ordering::Relaxed) == EVICTED
    }

    #[test]
    fn an_upgraded_connection_is_never_evicted() {
        let (mut permits, _returned) = permits(8, 1);
        let address = IpAddr::from([10, 0, 0, 1]);
        let upgraded = permits.acquire(address).unwrap();
        upgraded.pin();
        assert_eq!(permits.acquire(address).unwrap_err(), Full::PerPeer);
        assert!(!is_evicted(&upgraded));
    }

    #[test]
    fn a_proxy_has_no_connection_limit_but_makes_room_for_other_peers() {
        let (mut permits, _returned) = permits(6, 3);
        let proxy = IpAddr::from([10, 0, 0, 9]);
        let held: Vec<_> = (0..6).map(|_| permits.acquire(proxy).unwrap()).collect();
        let _other = permits.acquire([10, 0, 0, 1].into()).unwrap();
        assert_eq!(held.iter().filter(|permit| is_evicted(permit)).count(), 1);
        assert_eq!(permits.taken(), 6);
    }

    proptest! {
        /// Random connects, disconnects and requests. A peer below its own limit is admitted if the total limit is not
        /// reached or another peer has at least two more connections.
        #[test]
        fn counts_never_exceed_their_limits(steps in proptest::collection::vec((0u8..4, 0u8..4), 0..200)) {
            let (mut permits, mut returned) = permits(6, 3);
            let mut held: Vec<(u8, Permit, Vec<super::super::activity::InFlight>)> = Vec::new();
            for (which, what) in steps {
                let count = |held: &[(u8, Permit, _)], whose| held.iter().filter(|one| one.0 == whose).count();
                match what {
                    0 | 1 => {
                        let most = (0..4).map(|one| count(&held, one)).max().unwrap_or_default();
                        let own = count(&held, which);
                        let taken = permits.acquire([10, 0, 0, which].into());
                        held.retain(|(_, permit, _)| !is_evicted(permit));
                        let has_room = own < 3 && (held.len() < 6 || most > own + 1);
                        prop_assert!(taken.is_ok() || !has_room);
                        if let Ok(permit) = taken {
                            held.push((which, permit, Vec::new()));
                        }
                    }
                    2 => if let Some(one) = held.iter_mut().find(|one| one.0 == which) {
                        one.2.push(one.1.activity().begin(Version::HTTP_11));
                    },
                    _ => if let Some(at) = held.iter().position(|one| one.0 == which) {
                        held.remove(at);
                    },
                }
                while let Ok(id) = returned.try_recv() {
                    permits.release(id);
                }
                prop_assert_eq!(permits.taken(), held.len());
                prop_assert!(held.len() <= 6 && (0..4).all(|one| count(&held, one) <= 3));
            }
            held.clear();
            while let Ok(id) = returned.try_recv() {
                permits.release(id);
            }
            prop_assert!(permits.by_peer.is_empty() && permits.taken() == 0);
        }
    }
}
