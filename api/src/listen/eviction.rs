//! Chooses the connection to close to make room for a new one. Performs no I/O.
//!
//! At the limit per peer, only connections of the newcomer's own peer can be closed; at the total limit, also those of
//! peers that hold more connections. Connections are closed in this order: connections that never carried a request,
//! connections that wait for their next request, connections whose client does not read the response. Among equals, a
//! connection of the peer with the most connections is closed, and of that peer's connections the one that has been in
//! its state longest. A connection with a request in flight is closed last, only for a newcomer from another peer, only
//! if its own peer then still has at least as many connections as the newcomer's peer, and never if its peer is a
//! trusted proxy.

use std::cmp::Reverse;

use tokio::time::Instant;

use super::activity::EvictionRank;
use super::peer::Peer;

/// The limit that a new connection exceeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    Total,
    PerPeer,
}

/// A connection that could be closed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) id: u64,
    pub(super) peer: Peer,
    /// Number of connections that `peer` has.
    pub(super) of_peer: usize,
    /// The peer is a trusted proxy, whose connections carry the requests of many clients.
    pub(super) is_proxy: bool,
    pub(super) rank: EvictionRank,
    pub(super) since: Instant,
}

/// The peer whose new connection needs room, and how many connections it already has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Newcomer {
    pub(super) peer: Peer,
    pub(super) has: usize,
}

/// The id of the connection to close. `None`: no candidate may be closed, so the new connection must be refused.
pub(super) fn victim(
    full: Full,
    newcomer: Newcomer,
    candidates: impl Iterator<Item = Candidate>,
) -> Option<u64> {
    let may_go = |one: &Candidate| match (one.peer == newcomer.peer, full) {
        (true, _) => one.rank < EvictionRank::Busy,
        (false, Full::PerPeer) => false,
        (false, Full::Total) if one.rank < EvictionRank::Busy => one.of_peer > newcomer.has,
        (false, Full::Total) => !one.is_proxy && one.of_peer > newcomer.has + 1,
    };
    candidates
        .filter(may_go)
        .min_by_key(|one| (one.rank, Reverse(one.of_peer), one.since))
        .map(|one| one.id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn peer(last: u8) -> Peer {
        Peer::of([192, 0, 2, last].into())
    }

    /// `all` lists `(peer, connections of that peer, rank, seconds in that rank)`; the id of a candidate is its
    /// position.
    fn ask(
        full: Full,
        newcomer: (u8, usize),
        all: &[(u8, usize, EvictionRank, u64)],
    ) -> Option<u64> {
        let now = Instant::now() + Duration::from_secs(1000);
        let candidates = all
            .iter()
            .zip(0..)
            .map(|(&(whose, of_peer, rank, age), id)| Candidate {
                id,
                peer: peer(whose),
                of_peer,
                is_proxy: whose == 99,
                rank,
                since: now - Duration::from_secs(age),
            });
        let newcomer = Newcomer {
            peer: peer(newcomer.0),
            has: newcomer.1,
        };
        victim(full, newcomer, candidates)
    }

    #[test]
    fn connections_are_closed_in_the_order_of_their_rank() {
        use EvictionRank::{Busy, Idle, Reading, Silent};
        let all = [
            (1, 9, Busy, 9),
            (1, 9, Reading, 9),
            (1, 9, Idle, 1),
            (1, 9, Idle, 5),
            (2, 8, Idle, 60),
            (2, 8, Silent, 1),
            (2, 8, Silent, 2),
        ];
        let mut left = all.to_vec();
        for gone in [
            (2, 8, Silent, 2),
            (2, 8, Silent, 1),
            (1, 9, Idle, 5),
            (1, 9, Idle, 1),
        ] {
            let id = ask(Full::Total, (3, 0), &left).unwrap();
            assert_eq!(left.remove(usize::try_from(id).unwrap()), gone);
        }
        // All idle connections of the larger peer are gone. Next: the idle one of the smaller peer, then reading, then
        // busy.
        for gone in [(2, 8, Idle, 60), (1, 9, Reading, 9), (1, 9, Busy, 9)] {
            let id = ask(Full::Total, (3, 0), &left).unwrap();
            assert_eq!(left.remove(usize::try_from(id).unwrap()), gone);
        }
    }

    #[test]
    fn no_connection_is_closed_for_a_peer_that_has_as_many() {
        use EvictionRank::{Busy, Idle, Silent};
        for rank in [Silent, Idle, Busy] {
            let all = [(1, 4, rank, 9)];
            assert_eq!(ask(Full::Total, (2, 4), &all), None);
            assert_eq!(ask(Full::Total, (2, 5), &all), None);
        }
        assert_eq!(ask(Full::Total, (2, 3), &[(1, 4, Busy, 9)]), None);
        assert_eq!(ask(Full::Total, (2, 2), &[(1, 4, Busy, 9)]), Some(0));
        assert_eq!(ask(Full::Total, (2, 2), &[(99, 4, Busy, 9)]), None);
    }

    #[test]
    fn a_peer_at_its_own_limit_loses_its_own_connection() {
        use EvictionRank::{Busy, Idle};
        let all = [(1, 4, Busy, 1), (2, 9, Idle, 99), (1, 4, Idle, 1)];
        assert_eq!(ask(Full::PerPeer, (1, 4), &all), Some(2));
        assert_eq!(ask(Full::PerPeer, (1, 4), &all[..2]), None);
    }
}
