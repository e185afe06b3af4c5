//! Who may connect: so many in all, so many of one peer.
//!
//! The accept loop owns the counts. A seat is given back when its last holder drops it, which tells the loop
//! over a channel: nothing is locked.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use tokio::sync::mpsc;

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
    taken: usize,
    by_peer: HashMap<Peer, usize>,
}

/// Why there is no seat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    InAll,
    OfPeer,
}

impl Seats {
    pub(super) fn new(in_all: usize, of_peer: usize) -> Self {
        let by_peer = HashMap::new();
        Self {
            in_all,
            of_peer,
            taken: 0,
            by_peer,
        }
    }

    pub(super) fn take(&mut self, peer: Peer) -> Result<(), Full> {
        if self.taken >= self.in_all {
            return Err(Full::InAll);
        }
        let of_peer = self.by_peer.entry(peer).or_default();
        if *of_peer >= self.of_peer {
            return Err(Full::OfPeer);
        }
        *of_peer += 1;
        self.taken += 1;
        Ok(())
    }

    pub(super) fn give_back(&mut self, peer: Peer) {
        self.taken = self.taken.saturating_sub(1);
        if let Some(of_peer) = self.by_peer.get_mut(&peer) {
            *of_peer = of_peer.saturating_sub(1);
            if *of_peer == 0 {
                self.by_peer.remove(&peer);
            }
        }
    }

    pub(super) fn taken(&self) -> usize {
        self.taken
    }
}

/// A connection's right to be. It is given back with the last clone: upgraded connections keep one.
#[derive(Clone, Debug)]
pub(super) struct Seat {
    _shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    peer: Peer,
    // Unbounded, but no longer than there are seats.
    back: mpsc::UnboundedSender<Peer>,
}

impl Seat {
    pub(super) fn new(peer: Peer, back: mpsc::UnboundedSender<Peer>) -> Self {
        let _shared = Arc::new(Shared { peer, back });
        Self { _shared }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Nobody counts any more once the loop has ended.
        let _ended = self.back.send(self.peer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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

    proptest! {
        #[test]
        fn counts_never_pass_their_limits(steps in proptest::collection::vec((0u8..4, any::<bool>()), 0..200)) {
            let mut seats = Seats::new(6, 3);
            let mut held: Vec<Peer> = Vec::new();
            for (which, takes) in steps {
                let peer = Peer::of(IpAddr::from([10, 0, 0, which]));
                match takes {
                    true => {
                        let of_peer = held.iter().filter(|one| **one == peer).count();
                        let expected = match (held.len(), of_peer) {
                            (6.., _) => Err(Full::InAll),
                            (_, 3..) => Err(Full::OfPeer),
                            _ => Ok(()),
                        };
                        prop_assert_eq!(seats.take(peer), expected);
                        if expected.is_ok() {
                            held.push(peer);
                        }
                    }
                    false => {
                        if let Some(at) = held.iter().position(|one| *one == peer) {
                            held.remove(at);
                            seats.give_back(peer);
                        }
                    }
                }
                prop_assert_eq!(seats.taken(), held.len());
            }
            for peer in held {
                seats.give_back(peer);
            }
            prop_assert!(seats.by_peer.is_empty());
        }
    }
}
