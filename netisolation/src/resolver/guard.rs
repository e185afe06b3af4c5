//! Limits on each sandbox's use of the resolver (query rate, pending queries, connections), and totals of its refusals.
//! Reads no clock.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use model::SandboxId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

use crate::{
    events::event::{NetEvent, Reason},
    taps::tap::TapIndex,
};

/// Time in which a sandbox's token bucket gains one query: 50 queries per second.
const INTERVAL: Duration = Duration::from_millis(20);
/// Time in which an empty token bucket becomes full: its capacity is 100 queries.
const BURST: Duration = Duration::from_secs(2);
/// Maximum number of one sandbox's pending queries: a burst, which may have waited in the sockets during a reload.
const MAX_PENDING: usize = 100;
/// Maximum number of them that are sent upstream at the same time.
const MAX_ASKED: usize = 32;
/// Maximum number of connections of a sandbox.
const MAX_CONNECTIONS: usize = 8;
/// Maximum number of waiting queries and connections, of one sandbox during its adoption, and of all sandboxes
/// together.
const MAX_HELD: usize = 100;
const MAX_ALL_HELD: usize = 8192;

/// Usage of the resolver by all sandboxes that sent queries recently.
#[derive(Debug)]
pub(super) struct Guard {
    meters: HashMap<SandboxId, Meter>,
    /// Queries and connections that wait until their sender's sandbox is adopted, by source address.
    held: HashMap<IpAddr, Arc<Semaphore>>,
    all_held: Arc<Semaphore>,
}

/// The place of a query or connection that waits for the adoption of its sender's sandbox.
pub(super) type Place = (OwnedSemaphorePermit, OwnedSemaphorePermit);

/// Counts one connection against the sandbox's limit until dropped.
pub(super) type Connection = OwnedSemaphorePermit;

/// Counts one pending query against the sandbox's limit until dropped.
#[derive(Debug)]
pub(super) struct Permit {
    turns: Arc<Semaphore>,
    _place: OwnedSemaphorePermit,
}

impl Permit {
    /// Waits until the query may be sent upstream.
    pub(super) async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        self.turns.acquire().await.ok()
    }
}

/// A refused query.
pub(super) struct Refusal {
    pub(super) tap: TapIndex,
    /// The event to report if no refusal with the same name and reason was reported recently.
    pub(super) event: NetEvent,
    /// The current time.
    pub(super) at: Instant,
}

/// The usage of one sandbox.
#[derive(Debug)]
struct Meter {
    /// Time at which the token bucket is full again.
    full_at: Instant,
    pending: Arc<Semaphore>,
    turns: Arc<Semaphore>,
    connections: Arc<Semaphore>,
    /// Refusals whose first event was reported, by name and reason. `take_sums` removes an entry without refusals since
    /// the previous call. The rate limit bounds the number of entries.
    reported: BTreeMap<(Option<String>, Reason), Tally>,
}

/// Counts the refusals that follow a reported one with the same name and reason.
#[derive(Debug)]
struct Tally {
    tap: TapIndex,
    unreported: Option<NetEvent>,
}

impl Default for Guard {
    fn default() -> Self {
        Self {
            meters: HashMap::new(),
            held: HashMap::new(),
            all_held: Arc::new(Semaphore::new(MAX_ALL_HELD)),
        }
    }
}

impl Guard {
    /// Takes a permit for a query. `None` if the sandbox exceeds its query rate or has too many pending queries. In the
    /// latter case, the query still counts towards the rate.
    pub(super) fn admit(&mut self, sandbox: &SandboxId, now: Instant) -> Option<Permit> {
        let meter = self.meter(sandbox, now);
        let full_at = meter.full_at.max(now) + INTERVAL;
        if full_at.saturating_duration_since(now) > BURST {
            return None;
        }
        meter.full_at = full_at;
        Some(Permit {
            turns: Arc::clone(&meter.turns),
            _place: Arc::clone(&meter.pending).try_acquire_owned().ok()?,
        })
    }

    /// Takes a permit for a connection. `None` if the sandbox has too many connections.
    pub(super) fn connect(&mut self, sandbox: &SandboxId, now: Instant) -> Option<Connection> {
        let meter = self.meter(sandbox, now);
        Arc::clone(&meter.connections).try_acquire_owned().ok()
    }

    /// Takes a place for a query or a connection whose sender is not adopted yet. `None` if too many wait.
    pub(super) fn hold(&mut self, source: IpAddr) -> Option<Place> {
        let held = self.held.entry(source);
        let held = held.or_insert_with(|| Arc::new(Semaphore::new(MAX_HELD)));
        let of_sandbox = Arc::clone(held).try_acquire_owned().ok()?;
        let of_all = Arc::clone(&self.all_held).try_acquire_owned().ok()?;
        Some((of_sandbox, of_all))
    }

    /// Counts a refusal. Returns the event if it must be reported now. Otherwise a later total includes it.
    pub(super) fn refuse(&mut self, refusal: Refusal) -> Option<NetEvent> {
        let Refusal { tap, event, at } = refusal;
        let meter = self.meter(&event.sandbox, at);
        let key = (event.name.clone(), event.reason);
        match meter.reported.get_mut(&key) {
            None => {
                let unreported = None;
                meter.reported.insert(key, Tally { tap, unreported });
                Some(event)
            }
            Some(tally) => {
                let earlier = tally.unreported.take();
                tally.unreported = Some(match earlier {
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

    /// Returns the totals of the refusals since the previous call that were not reported, and drops idle sandboxes.
    /// Must be called periodically.
    pub(super) fn take_sums(&mut self, now: Instant) -> Vec<(TapIndex, NetEvent)> {
        let mut events = Vec::new();
        self.held
            .retain(|_, held| held.available_permits() < MAX_HELD);
        self.meters.retain(|_, meter| {
            meter
                .reported
                .retain(|_, tally| match tally.unreported.take() {
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
            pending: Arc::new(Semaphore::new(MAX_PENDING)),
            turns: Arc::new(Semaphore::new(MAX_ASKED)),
            connections: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
            reported: BTreeMap::new(),
        })
    }
}

impl Meter {
    fn is_idle(&self, now: Instant) -> bool {
        self.reported.is_empty()
            && self.full_at <= now
            && self.pending.available_permits() == MAX_PENDING
            && self.connections.available_permits() == MAX_CONNECTIONS
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use ranges::Protocol;

    use super::*;
    use crate::events::event::Direction;

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
    fn a_burst_passes_then_the_rate_applies_and_other_sandboxes_are_unaffected() {
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
            "queries in the next 1000 ms"
        );
        assert_eq!((0..1000).filter(|_| admitted(1, 100_000)).count(), 100);
    }

    #[test]
    fn permits_are_limited_and_released() {
        let (mut guard, start) = (Guard::default(), Instant::now());
        let late = |n: u64| start + Duration::from_secs(n);
        let held: Vec<_> = (0..200)
            .filter_map(|n| guard.admit(&sandbox(1), late(n)))
            .collect();
        assert_eq!(held.len(), MAX_PENDING);
        let turns = held
            .iter()
            .filter_map(|permit| permit.turns.try_acquire().ok());
        assert_eq!(turns.collect::<Vec<_>>().len(), MAX_ASKED);
        drop(held);
        assert!(guard.admit(&sandbox(1), late(300)).is_some());
        let held: Vec<_> = (0..20)
            .filter_map(|_| guard.connect(&sandbox(1), start))
            .collect();
        assert_eq!(held.len(), MAX_CONNECTIONS);
        guard.take_sums(late(400));
        assert_eq!(
            guard.meters.len(),
            1,
            "a sandbox with connections is not idle"
        );
        drop(held);
        guard.take_sums(late(400));
        assert!(guard.meters.is_empty());
    }

    #[test]
    fn what_waits_for_an_adoption_is_limited_for_each_source() {
        let (mut guard, now) = (Guard::default(), Instant::now());
        let source = |n| IpAddr::from([198, 18, 0, n]);
        let held: Vec<_> = (0..200).filter_map(|_| guard.hold(source(1))).collect();
        assert_eq!(held.len(), MAX_HELD);
        assert!(guard.hold(source(2)).is_some());
        guard.take_sums(now);
        assert_eq!(guard.held.len(), 1, "only the one with queries");
        drop(held);
        guard.take_sums(now);
        assert!(guard.held.is_empty());
        let all = (1..=100).flat_map(|n| [n; MAX_HELD]);
        let held: Vec<_> = all.filter_map(|n| guard.hold(source(n))).collect();
        assert_eq!(held.len(), MAX_ALL_HELD);
    }

    #[test]
    fn the_first_refusal_is_reported_and_the_next_are_summed() {
        let (mut guard, start) = (Guard::default(), Instant::now());
        assert!(guard.refuse(refusal("a.test", start)).is_some());
        assert!(guard.refuse(refusal("b.test", start)).is_some());
        for _ in 0..5 {
            assert!(guard.refuse(refusal("a.test", start)).is_none());
        }
        let summed = guard.take_sums(start);
        assert_eq!(
            summed
                .iter()
                .map(|(_, event)| event.count)
                .collect::<Vec<_>>(),
            [5]
        );
        assert!(
            guard.take_sums(start).is_empty(),
            "no refusal is reported twice"
        );
        assert!(
            guard.refuse(refusal("a.test", start)).is_some(),
            "first refusal after the sum"
        );
    }
}
