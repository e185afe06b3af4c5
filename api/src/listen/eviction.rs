//! Which connection makes room for another. Pure.
//!
//! Nobody is turned away while somebody holds more. A connection that has never asked goes first, then one that waits
//! for its next request, then one whose answer is not read; among equals one of the peer with the most connections, and
//! of those the one that has been so for longest. A request under way is broken off only for a newcomer of another peer,
//! and only if its own peer still has as many connections as the newcomer's then.

use std::cmp::Reverse;

use tokio::time::Instant;

use super::activity::Standing;
use super::seats::{Full, Peer};

/// A connection that could go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    /// Which.
    pub(super) id: u64,
    /// Whose.
    pub(super) peer: Peer,
    /// How many that peer has.
    pub(super) of_peer: usize,
    /// The peer is a proxy, which speaks for many.
    pub(super) is_proxy: bool,
    pub(super) standing: Standing,
    pub(super) since: Instant,
}

/// Whose connection is to be admitted, and how many it has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Newcomer {
    pub(super) peer: Peer,
    pub(super) has: usize,
}

/// The connection that goes; `None`: the newcomer does.
pub(super) fn victim(
    full: Full,
    newcomer: Newcomer,
    candidates: impl Iterator<Item = Candidate>,
) -> Option<u64> {
    let may_go = |one: &Candidate| match (one.peer == newcomer.peer, full) {
        (true, _) => one.standing < Standing::Busy,
        (false, Full::OfPeer) => false,
        (false, Full::InAll) if one.standing < Standing::Busy => one.of_peer > newcomer.has,
        (false, Full::InAll) => !one.is_proxy && one.of_peer > newcomer.has + 1,
    };
    candidates
        .filter(may_go)
        .min_by_key(|one| (one.standing, Reverse(one.of_peer), one.since))
        .map(|one| one.id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn peer(last: u8) -> Peer {
        Peer::of([192, 0, 2, last].into())
    }

    /// `(peer, its connections, standing, seconds of it)`; ids are positions.
    fn ask(full: Full, newcomer: (u8, usize), all: &[(u8, usize, Standing, u64)]) -> Option<u64> {
        let now = Instant::now() + Duration::from_secs(1000);
        let candidates = all
            .iter()
            .zip(0..)
            .map(|(&(whose, of_peer, standing, age), id)| Candidate {
                id,
                peer: peer(whose),
                of_peer,
                is_proxy: whose == 99,
                standing,
                since: now - Duration::from_secs(age),
            });
        let newcomer = Newcomer {
            peer: peer(newcomer.0),
            has: newcomer.1,
        };
        victim(full, newcomer, candidates)
    }

    #[test]
    fn what_would_be_missed_least_goes_first() {
        use Standing::{Busy, Idle, Reading, Silent};
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
            let id = ask(Full::InAll, (3, 0), &left).unwrap();
            assert_eq!(left.remove(usize::try_from(id).unwrap()), gone);
        }
        // The greater peer's idle ones are gone: the other's, then who reads, then who is served.
        for gone in [(2, 8, Idle, 60), (1, 9, Reading, 9), (1, 9, Busy, 9)] {
            let id = ask(Full::InAll, (3, 0), &left).unwrap();
            assert_eq!(left.remove(usize::try_from(id).unwrap()), gone);
        }
    }

    #[test]
    fn nobody_s_connection_goes_for_a_peer_with_as_many() {
        use Standing::{Busy, Idle, Silent};
        for standing in [Silent, Idle, Busy] {
            let all = [(1, 4, standing, 9)];
            assert_eq!(ask(Full::InAll, (2, 4), &all), None);
            assert_eq!(ask(Full::InAll, (2, 5), &all), None);
        }
        assert_eq!(ask(Full::InAll, (2, 3), &[(1, 4, Busy, 9)]), None);
        assert_eq!(ask(Full::InAll, (2, 2), &[(1, 4, Busy, 9)]), Some(0));
        assert_eq!(ask(Full::InAll, (2, 2), &[(99, 4, Busy, 9)]), None);
    }

    #[test]
    fn a_peer_at_its_own_limit_makes_room_itself() {
        use Standing::{Busy, Idle};
        let all = [(1, 4, Busy, 1), (2, 9, Idle, 99), (1, 4, Idle, 1)];
        assert_eq!(ask(Full::OfPeer, (1, 4), &all), Some(2));
        assert_eq!(ask(Full::OfPeer, (1, 4), &all[..2]), None);
    }
}
