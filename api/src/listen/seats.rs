//! Who may connect: so many in all, so many of one peer; and who makes room when there is none.
//!
//! The accept loop owns the counts. A seat is given back when its last holder drops it, which tells the loop
//! over a channel: nothing is locked. A connection that has to go ([`eviction`](super::eviction)) counts no more from
//! then on; it is closed by its own task.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use tokio::sync::{Notify, mpsc};

use super::activity::Activity;
use super::clients::TrustedProxies;
use super::eviction::{Candidate, Newcomer, victim};
use super::limits::Limits;

/// Those who are counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Peer(IpAddr);

impl Peer {
    /// Whoever has one IPv6 address has 2^64 of them.
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

/// The counts.
#[derive(Debug)]
pub(super) struct Seats {
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

/// Why there is no seat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    InAll,
    OfPeer,
}

impl Seats {
    /// What is given back is sent to `back`, for [`Seats::give_back`].
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

    /// A seat for a connection, for which another one may have to go.
    pub(super) fn take(&mut self, address: IpAddr) -> Result<Seat, Full> {
        let peer = Peer::of(address);
        let is_proxy = self.proxies.has(address);
        if !is_proxy && self.count(peer) >= self.of_peer {
            self.make_room(Full::OfPeer, peer)?;
        }
        if self.taken() >= self.in_all {
            self.make_room(Full::InAll, peer)?;
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
        Ok(Seat(Arc::new(Shared { id, link, back })))
    }

    /// Has a connection closed, so that `newcomer` has room.
    fn make_room(&mut self, full: Full, newcomer: Peer) -> Result<(), Full> {
        let newcomer = Newcomer {
            peer: newcomer,
            has: self.count(newcomer),
        };
        while let Some(id) = victim(full, newcomer, self.candidates()) {
            // One that has been upgraded meanwhile is no candidate in the next round.
            if self.holders.get(&id).is_some_and(|one| one.link.evict()) {
                self.give_back(id);
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
            let (standing, since) = one.link.activity.standing();
            Candidate {
                id,
                peer: one.peer,
                of_peer: self.count(one.peer),
                is_proxy: one.is_proxy,
                standing,
                since,
            }
        })
    }

    fn count(&self, peer: Peer) -> usize {
        self.by_peer.get(&peer).copied().unwrap_or_default()
    }

    /// Nothing happens for one that had to go: it counts no more.
    pub(super) fn give_back(&mut self, id: u64) {
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

/// What the accept loop and a connection share.
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

/// A connection's right to be. It is given back with the last clone: upgraded connections keep one.
#[derive(Clone, Debug)]
pub(super) struct Seat(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    id: u64,
    link: Arc<Link>,
    // Unbounded, but no longer than there are seats and connections that end.
    back: mpsc::UnboundedSender<u64>,
}

impl Seat {
    /// What its connection is doing.
    pub(super) fn activity(&self) -> &Arc<Activity> {
        &self.0.link.activity
    }

    /// Returns when the connection has to go. For the one task that serves it.
    pub(super) async fn evicted(&self) {
        self.0.link.evicted.notified().await;
    }

    /// From now on the connection is not HTTP, and no longer served by a task that could close it.
    pub(super) fn pin(&self) {
        // One that has to go already does.
        let _gone = self.0.link.change(PINNED);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Nobody counts any more once the loop has ended.
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
    fn neighbours_in_one_network_are_one_peer() {
        assert_eq!(peer("2001:db8::1"), peer("2001:db8::ffff:1"));
        assert_ne!(peer("2001:db8::1"), peer("2001:db8:0:1::1"));
        assert_eq!(peer("::ffff:10.0.0.1"), peer("10.0.0.1"));
        assert_ne!(peer("10.0.0.1"), peer("10.0.0.2"));
    }

    fn seats(in_all: usize, of_peer: usize) -> (Seats, mpsc::UnboundedReceiver<u64>) {
        let limits = Limits {
            connections: in_all,
            connections_of_peer: of_peer,
            trusted_proxies: vec!["10.0.0.9/32".parse().unwrap()].into(),
            ..Limits::default()
        };
        let (back, returned) = mpsc::unbounded_channel();
        (Seats::new(&limits, back), returned)
    }

    fn is_evicted(seat: &Seat) -> bool {
        seat.0.link.state.load(Ordering::Relaxed) == EVICTED
    }

    #[test]
    fn an_upgraded_connection_never_has_to_go() {
        let (mut seats, _returned) = seats(8, 1);
        let address = IpAddr::from([10, 0, 0, 1]);
        let upgraded = seats.take(address).unwrap();
        upgraded.pin();
        assert_eq!(seats.take(address).unwrap_err(), Full::OfPeer);
        assert!(!is_evicted(&upgraded));
    }

    #[test]
    fn a_proxy_has_no_limit_of_its_own_but_leaves_room_for_others() {
        let (mut seats, _returned) = seats(6, 3);
        let proxy = IpAddr::from([10, 0, 0, 9]);
        let held: Vec<_> = (0..6).map(|_| seats.take(proxy).unwrap()).collect();
        let _other = seats.take([10, 0, 0, 1].into()).unwrap();
        assert_eq!(held.iter().filter(|seat| is_evicted(seat)).count(), 1);
        assert_eq!(seats.taken(), 6);
    }

    proptest! {
        /// Peers come, go and ask; a peer with fewer connections than another always gets in.
        #[test]
        fn counts_never_pass_their_limits(steps in proptest::collection::vec((0u8..4, 0u8..4), 0..200)) {
            let (mut seats, mut returned) = seats(6, 3);
            let mut held: Vec<(u8, Seat, Vec<super::super::activity::Request>)> = Vec::new();
            for (which, what) in steps {
                let count = |held: &[(u8, Seat, _)], whose| held.iter().filter(|one| one.0 == whose).count();
                match what {
                    0 | 1 => {
                        let most = (0..4).map(|one| count(&held, one)).max().unwrap_or_default();
                        let own = count(&held, which);
                        let taken = seats.take([10, 0, 0, which].into());
                        held.retain(|(_, seat, _)| !is_evicted(seat));
                        let has_room = own < 3 && (held.len() < 6 || most > own + 1);
                        prop_assert!(taken.is_ok() || !has_room);
                        if let Ok(seat) = taken {
                            held.push((which, seat, Vec::new()));
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
                    seats.give_back(id);
                }
                prop_assert_eq!(seats.taken(), held.len());
                prop_assert!(held.len() <= 6 && (0..4).all(|one| count(&held, one) <= 3));
            }
            held.clear();
            while let Ok(id) = returned.try_recv() {
                seats.give_back(id);
            }
            prop_assert!(seats.by_peer.is_empty() && seats.taken() == 0);
        }
    }
}
