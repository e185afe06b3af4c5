//! What one sandbox may take of the resolver: queries a second, queries under way, connections; and its refusals,
//! summed up. Reads no clock.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use model::SandboxId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{
    event::{NetEvent, Reason},
    tap::TapIndex,
};

/// Queries: one every so often (50 a second) …
const INTERVAL: Duration = Duration::from_millis(20);
/// … and this much ahead of it (100 queries).
const BURST: Duration = Duration::from_secs(2);
/// Queries of a sandbox that wait for upstream, at most.
const MAX_WAITING: usize = 32;
/// Connections of a sandbox, at most.
const MAX_CONNECTIONS: usize = 8;

/// All sandboxes that asked lately.
#[derive(Debug, Default)]
pub(super) struct Guard {
    meters: HashMap<SandboxId, Meter>,
}

/// A place in line, free again when it is dropped.
pub(super) type Permit = OwnedSemaphorePermit;

/// A refusal that may have to be told.
pub(super) struct Refusal {
    /// The sandbox's.
    pub(super) tap: TapIndex,
    /// As it is told if it is the first of its kind in a while.
    pub(super) event: NetEvent,
    /// Now.
    pub(super) at: Instant,
}

/// One sandbox.
#[derive(Debug)]
struct Meter {
    /// When the bucket is full again.
    full_at: Instant,
    waiting: Arc<Semaphore>,
    connections: Arc<Semaphore>,
    /// Refusals of the second that runs. As many as queries were admitted in it, and one.
    told: BTreeMap<(Option<String>, Reason), Tally>,
}

/// Refusals with the same name and reason since the first was told.
#[derive(Debug)]
struct Tally {
    tap: TapIndex,
    untold: Option<NetEvent>,
}

impl Guard {
    /// A place for a query, or none if the sandbox asks too much.
    pub(super) fn admit(&mut self, sandbox: &SandboxId, now: Instant) -> Option<Permit> {
        let meter = self.meter(sandbox, now);
        let full_at = meter.full_at.max(now) + INTERVAL;
        if full_at.saturating_duration_since(now) > BURST {
            return None;
        }
        meter.full_at = full_at;
        Arc::clone(&meter.waiting).try_acquire_owned().ok()
    }

    /// A place for a connection, or none.
    pub(super) fn connect(&mut self, sandbox: &SandboxId, now: Instant) -> Option<Permit> {
        let meter = self.meter(sandbox, now);
        Arc::clone(&meter.connections).try_acquire_owned().ok()
    }

    /// Counts a refusal. The event comes back if it is to be told now, else it is part of a later one.
    pub(super) fn refuse(&mut self, refusal: Refusal) -> Option<NetEvent> {
        let Refusal { tap, event, at } = refusal;
        let meter = self.meter(&event.sandbox, at);
        let key = (event.name.clone(), event.reason);
        match meter.told.get_mut(&key) {
            None => {
                meter.told.insert(key, Tally { tap, untold: None });
                Some(event)
            }
            Some(tally) => {
                let earlier = tally.untold.take();
                tally.untold = Some(match earlier {
                    Some(earlier) => NetEvent {
                        count: earlier.count.saturating_add(event.count),
                        ..earlier
                    },
                    None => event,
                });
                None
            }
        }
    }

    /// Once a second: what was summed up, and sandboxes that ask no more are forgotten.
    pub(super) fn tick(&mut self, now: Instant) -> Vec<(TapIndex, NetEvent)> {
        let mut events = Vec::new();
        self.meters.retain(|_, meter| {
            meter.told.retain(|_, tally| match tally.untold.take() {
                Some(event) => {
                    events.push((tally.tap, event));
                    true
                }
                None => false,
            });
            !meter.is_idle(now)
        });
        events
    }

    fn meter(&mut self, sandbox: &SandboxId, now: Instant) -> &mut Meter {
        self.meters.entry(sandbox.clone()).or_insert_with(|| Meter {
            full_at: now,
            waiting: Arc::new(Semaphore::new(MAX_WAITING)),
            connections: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
            told: BTreeMap::new(),
        })
    }
}

impl Meter {
    fn is_idle(&self, now: Instant) -> bool {
        self.told.is_empty()
            && self.full_at <= now
            && self.waiting.available_permits() == MAX_WAITING
            && self.connections.available_permits() == MAX_CONNECTIONS
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::event::{Direction, Protocol};

    fn sandbox(n: u8) -> SandboxId {
        SandboxId::from_random([n; 19])
    }

    fn refusal(name: &str, at: Instant) -> Refusal {
        let event = NetEvent {
            sandbox: sandbox(1),
            time: SystemTime::UNIX_EPOCH,
            direction: Direction::Out,
            protocol: Protocol::Udp,
            source: ([169, 254, 0, 21], 1).into(),
            destination: ([169, 254, 0, 22], 53).into(),
            reason: Reason::Name,
            name: Some(name.into()),
            count: 1,
        };
        Refusal {
            tap: TapIndex(1),
            event,
            at,
        }
    }

    #[test]
    fn a_burst_passes_then_the_rate_holds_and_a_neighbour_notices_nothing() {
        let (mut guard, start) = (Guard::default(), Instant::now());
        let mut admitted = |n, ms| {
            let at = start + Duration::from_millis(ms);
            guard.admit(&sandbox(n), at).is_some()
        };
        assert_eq!((0..1000).filter(|_| admitted(1, 0)).count(), 100);
        assert!(admitted(2, 0));
        assert_eq!(
            (0..1000).filter(|ms| admitted(1, *ms)).count(),
            49,
            "a second is 1000 ms"
        );
        assert_eq!((0..1000).filter(|_| admitted(1, 100_000)).count(), 100);
    }

    #[test]
    fn places_are_bounded_and_come_back() {
        let (mut guard, start) = (Guard::default(), Instant::now());
        let late = |n: u64| start + Duration::from_secs(n);
        let held: Vec<_> = (0..80)
            .filter_map(|n| guard.admit(&sandbox(1), late(n)))
            .collect();
        assert_eq!(held.len(), MAX_WAITING);
        drop(held);
        assert!(guard.admit(&sandbox(1), late(100)).is_some());
        let held: Vec<_> = (0..20)
            .filter_map(|_| guard.connect(&sandbox(1), start))
            .collect();
        assert_eq!(held.len(), MAX_CONNECTIONS);
        guard.tick(late(200));
        assert_eq!(guard.meters.len(), 1, "connections are held");
        drop(held);
        guard.tick(late(200));
        assert!(guard.meters.is_empty());
    }

    #[test]
    fn refusals_are_told_once_and_then_summed() {
        let (mut guard, start) = (Guard::default(), Instant::now());
        assert!(guard.refuse(refusal("a.test", start)).is_some());
        assert!(guard.refuse(refusal("b.test", start)).is_some());
        for _ in 0..5 {
            assert!(guard.refuse(refusal("a.test", start)).is_none());
        }
        let summed = guard.tick(start);
        assert_eq!(
            summed
                .iter()
                .map(|(_, event)| event.count)
                .collect::<Vec<_>>(),
            [5]
        );
        assert!(guard.tick(start).is_empty(), "nothing is told twice");
        assert!(
            guard.refuse(refusal("a.test", start)).is_some(),
            "a new second"
        );
    }
}
