//! What is under way to each sandbox, and connections to its agent that wait for the next request.
//!
//! A lane belongs to one VM: when a sandbox is resumed, its generation counts up, and connections of the
//! former VM are never used again. A lane goes when nothing is under way and nothing waits. Locks are held
//! for a few instructions, never across a wait.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use model::SandboxId;

use super::upstream::Sender;

/// Requests under way to one sandbox.
pub const IN_FLIGHT_MAX: usize = 400;
/// Requests under way to all sandboxes from which on each may have [`FAIR`] only: what answers hold in the server is
/// bounded, and no number of busy sandboxes shuts the others out.
const CROWD: usize = 2048;
/// Requests under way to one sandbox of a server that is crowded.
const FAIR: usize = 8;
/// Connections to one agent that wait for a request.
const IDLE_MAX: usize = 8;
/// Such connections to all agents.
const IDLE_IN_ALL: usize = 1024;
/// How long one waits.
const IDLE_LIMIT: Duration = Duration::from_secs(30);
/// How often what has waited too long is dropped.
const SWEEP_EVERY: Duration = Duration::from_secs(5);
/// How long a connection may take to be ready for the next request. It is ready as soon as its task has run
/// once; one that is not still writes a request that the guest does not read.
const READY_LIMIT: Duration = Duration::from_millis(20);

/// All lanes.
#[derive(Clone, Debug, Default)]
pub(super) struct Lanes {
    by_id: Arc<Mutex<HashMap<SandboxId, Arc<Lane>>>>,
    idle: Arc<AtomicUsize>,
    /// Requests under way to all.
    in_all: Arc<AtomicUsize>,
}

/// One VM.
#[derive(Debug)]
struct Lane {
    generation: u64,
    in_flight: AtomicUsize,
    waiting: Mutex<Vec<Waiting>>,
    idle_in_all: Arc<AtomicUsize>,
}

/// A connection that waits for the next request.
#[derive(Debug)]
struct Waiting {
    sender: Sender,
    since: Instant,
}

/// A request under way. It counts until this is dropped.
#[derive(Debug)]
pub(super) struct Pass {
    lane: Arc<Lane>,
    in_all: Arc<AtomicUsize>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it holds one of these locks, and if it did, the content would still be whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Lanes {
    /// A request to a VM.
    ///
    /// # Errors
    /// Too many are under way: how many may be.
    pub(super) fn enter(&self, id: &SandboxId, generation: u64) -> Result<Pass, usize> {
        let mut by_id = lock(&self.by_id);
        let lane = match by_id.get(id) {
            Some(lane) if lane.generation == generation => Arc::clone(lane),
            known => {
                let lane = Arc::new(Lane::new(generation, Arc::clone(&self.idle)));
                // A request with an old route does not turn the new VM's lane out.
                if known.is_none_or(|known| known.generation < generation) {
                    by_id.insert(id.clone(), Arc::clone(&lane));
                }
                lane
            }
        };
        let before = lane.in_flight.fetch_add(1, Ordering::Relaxed);
        let limit = if self.in_all.fetch_add(1, Ordering::Relaxed) < CROWD {
            IN_FLIGHT_MAX
        } else {
            FAIR
        };
        let in_all = Arc::clone(&self.in_all);
        let pass = Pass { lane, in_all };
        if before < limit { Ok(pass) } else { Err(limit) }
    }

    /// Drops what has waited too long, for ever.
    pub(super) async fn tend(&self) {
        loop {
            tokio::time::sleep(SWEEP_EVERY).await;
            self.sweep(Instant::now());
        }
    }

    fn sweep(&self, now: Instant) {
        lock(&self.by_id).retain(|_, lane| {
            let waiting = lane.sweep(now);
            waiting > 0 || lane.in_flight.load(Ordering::Relaxed) > 0
        });
    }
}

impl Lane {
    fn new(generation: u64, idle_in_all: Arc<AtomicUsize>) -> Self {
        Self {
            generation,
            in_flight: AtomicUsize::new(0),
            waiting: Mutex::default(),
            idle_in_all,
        }
    }

    fn take(&self) -> Option<Sender> {
        let taken = lock(&self.waiting).pop()?;
        self.idle_in_all.fetch_sub(1, Ordering::Relaxed);
        Some(taken.sender)
    }

    fn put(&self, sender: Sender) {
        let mut waiting = lock(&self.waiting);
        let has_room = waiting.len() < IDLE_MAX
            && self.idle_in_all.load(Ordering::Relaxed) < IDLE_IN_ALL
            && !sender.is_closed();
        if has_room {
            self.idle_in_all.fetch_add(1, Ordering::Relaxed);
            let since = Instant::now();
            waiting.push(Waiting { sender, since });
        }
    }

    /// Returns how many still wait.
    fn sweep(&self, now: Instant) -> usize {
        let mut waiting = lock(&self.waiting);
        let before = waiting.len();
        waiting.retain(|one| {
            !one.sender.is_closed() && now.saturating_duration_since(one.since) < IDLE_LIMIT
        });
        let dropped = before - waiting.len();
        self.idle_in_all.fetch_sub(dropped, Ordering::Relaxed);
        waiting.len()
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let waiting = lock(&self.waiting).len();
        self.idle_in_all.fetch_sub(waiting, Ordering::Relaxed);
    }
}

impl Pass {
    /// A connection to the agent that takes a request at once, if one waits.
    pub(super) async fn take(&self) -> Option<Sender> {
        while let Some(mut sender) = self.lane.take() {
            let ready = tokio::time::timeout(READY_LIMIT, sender.ready());
            if let Ok(Ok(())) = ready.await {
                return Some(sender);
            }
        }
        None
    }

    /// Keeps a connection whose last exchange is complete.
    pub(super) fn put(&self, sender: Sender) {
        self.lane.put(sender);
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.lane.in_flight.fetch_sub(1, Ordering::Relaxed);
        self.in_all.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> SandboxId {
        SandboxId::from_random([7; 19])
    }

    #[test]
    fn only_so_many_are_under_way() {
        let lanes = Lanes::default();
        let mut passes: Vec<_> = (0..IN_FLIGHT_MAX)
            .map(|_| lanes.enter(&id(), 1).unwrap())
            .collect();
        assert_eq!(lanes.enter(&id(), 1).unwrap_err(), IN_FLIGHT_MAX);
        passes.pop();
        assert!(lanes.enter(&id(), 1).is_ok());
        let other = SandboxId::from_random([8; 19]);
        assert!(lanes.enter(&other, 1).is_ok());
    }

    #[test]
    fn busy_sandboxes_leave_a_share_to_each_other_one() {
        let lanes = Lanes::default();
        let mut passes = Vec::new();
        for n in 0..30 {
            let busy = SandboxId::from_random([n; 19]);
            while let Ok(pass) = lanes.enter(&busy, 1) {
                passes.push(pass);
            }
        }
        assert!(passes.len() < CROWD + 30 * FAIR);
        let late = SandboxId::from_random([33; 19]);
        let own: Vec<_> = (0..FAIR).map(|_| lanes.enter(&late, 1).unwrap()).collect();
        assert_eq!(lanes.enter(&late, 1).unwrap_err(), FAIR);
        drop((own, passes));
        assert_eq!(lanes.in_all.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn lanes_go_when_nothing_is_under_way() {
        let lanes = Lanes::default();
        let pass = lanes.enter(&id(), 1);
        lanes.sweep(Instant::now());
        assert_eq!(lock(&lanes.by_id).len(), 1);
        drop(pass);
        lanes.sweep(Instant::now());
        assert_eq!(lock(&lanes.by_id).len(), 0);
    }

    #[test]
    fn a_new_vm_has_a_lane_of_its_own() {
        let lanes = Lanes::default();
        let old = lanes.enter(&id(), 1).unwrap();
        let new = lanes.enter(&id(), 2).unwrap();
        assert!(!Arc::ptr_eq(&old.lane, &new.lane));
        let late = lanes.enter(&id(), 1).unwrap();
        assert!(!Arc::ptr_eq(&late.lane, &new.lane));
        assert_eq!(lock(&lanes.by_id)[&id()].generation, 2);
    }
}
