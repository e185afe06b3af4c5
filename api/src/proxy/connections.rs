//! Counts the in-flight requests to each sandbox, and keeps idle connections to the sandbox's agent.
//!
//! Each entry belongs to one VM. When a sandbox resumes, it gets a new VM and a higher generation; connections to the
//! old VM are never used again. An entry is removed when it has neither requests in flight nor idle connections. Locks
//! are held for a few instructions, never across an await.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use model::SandboxId;

use super::upstream::Sender;

/// Maximum number of in-flight requests to one sandbox.
pub const IN_FLIGHT_MAX: usize = 400;
/// While at least this many requests are in flight to all sandboxes together, each sandbox is limited to [`FAIR`]. This
/// bounds the memory for responses, and busy sandboxes cannot lock out the others.
const CROWD: usize = 2048;
/// Maximum number of in-flight requests to one sandbox while the total is at or above [`CROWD`].
const FAIR: usize = 8;
/// Maximum number of idle connections to one agent.
const IDLE_MAX: usize = 8;
/// Maximum number of idle connections to all agents together.
const IDLE_TOTAL: usize = 1024;
/// Idle time after which a connection is closed.
const IDLE_LIMIT: Duration = Duration::from_secs(30);
/// Interval at which expired idle connections are closed.
const SWEEP_EVERY: Duration = Duration::from_secs(5);
/// How long an idle connection may take to become ready for the next request. Normally it is ready as soon as its task
/// has run once; otherwise it is still writing a request that the guest does not read.
const READY_LIMIT: Duration = Duration::from_millis(20);

/// The entries of all sandboxes.
#[derive(Clone, Debug, Default)]
pub(super) struct Connections {
    by_id: Arc<Mutex<HashMap<SandboxId, Arc<VmConnections>>>>,
    idle: Arc<AtomicUsize>,
    /// Number of in-flight requests to all sandboxes.
    total: Arc<AtomicUsize>,
}

/// Requests and idle connections of one VM.
#[derive(Debug)]
struct VmConnections {
    generation: u64,
    in_flight: AtomicUsize,
    idle: Mutex<Vec<IdleConnection>>,
    idle_total: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct IdleConnection {
    sender: Sender,
    since: Instant,
}

/// Permission for one request, which counts as in flight until the permit is dropped.
#[derive(Debug)]
pub(super) struct RequestPermit {
    vm: Arc<VmConnections>,
    total: Arc<AtomicUsize>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code that holds one of these locks can panic halfway through a change, so the content of a poisoned lock is
    // valid.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Connections {
    /// Admits a request to the VM of a sandbox.
    ///
    /// # Errors
    /// Returns the limit in force if the sandbox has reached it.
    pub(super) fn admit(&self, id: &SandboxId, generation: u64) -> Result<RequestPermit, usize> {
        let mut by_id = lock(&self.by_id);
        let vm = match by_id.get(id) {
            Some(vm) if vm.generation == generation => Arc::clone(vm),
            known => {
                let vm = Arc::new(VmConnections::new(generation, Arc::clone(&self.idle)));
                // A request with an outdated route must not replace the entry of the new VM.
                if known.is_none_or(|known| known.generation < generation) {
                    by_id.insert(id.clone(), Arc::clone(&vm));
                }
                vm
            }
        };
        let before = vm.in_flight.fetch_add(1, Ordering::Relaxed);
        let limit = if self.total.fetch_add(1, Ordering::Relaxed) < CROWD {
            IN_FLIGHT_MAX
        } else {
            FAIR
        };
        let total = Arc::clone(&self.total);
        let permit = RequestPermit { vm, total };
        if before < limit {
            Ok(permit)
        } else {
            Err(limit)
        }
    }

    /// Closes expired idle connections; never returns.
    pub(super) async fn close_expired(&self) {
        loop {
            tokio::time::sleep(SWEEP_EVERY).await;
            self.sweep(Instant::now());
        }
    }

    fn sweep(&self, now: Instant) {
        lock(&self.by_id).retain(|_, vm| {
            let idle = vm.sweep(now);
            idle > 0 || vm.in_flight.load(Ordering::Relaxed) > 0
        });
    }
}

impl VmConnections {
    fn new(generation: u64, idle_total: Arc<AtomicUsize>) -> Self {
        Self {
            generation,
            in_flight: AtomicUsize::new(0),
            idle: Mutex::default(),
            idle_total,
        }
    }

    fn take(&self) -> Option<Sender> {
        let taken = lock(&self.idle).pop()?;
        self.idle_total.fetch_sub(1, Ordering::Relaxed);
        Some(taken.sender)
    }

    fn put(&self, sender: Sender) {
        let mut idle = lock(&self.idle);
        let has_room = idle.len() < IDLE_MAX
            && self.idle_total.load(Ordering::Relaxed) < IDLE_TOTAL
            && !sender.is_closed();
        if has_room {
            self.idle_total.fetch_add(1, Ordering::Relaxed);
            let since = Instant::now();
            idle.push(IdleConnection { sender, since });
        }
    }

    /// Closes expired connections and returns how many are left.
    fn sweep(&self, now: Instant) -> usize {
        let mut idle = lock(&self.idle);
        let before = idle.len();
        idle.retain(|one| {
            !one.sender.is_closed() && now.saturating_duration_since(one.since) < IDLE_LIMIT
        });
        let dropped = before - idle.len();
        self.idle_total.fetch_sub(dropped, Ordering::Relaxed);
        idle.len()
    }
}

impl Drop for VmConnections {
    fn drop(&mut self) {
        let idle = lock(&self.idle).len();
        self.idle_total.fetch_sub(idle, Ordering::Relaxed);
    }
}

impl RequestPermit {
    /// Takes an idle connection to the agent that is ready for a request. Idle connections that are not ready are
    /// closed. `None`: a new connection is needed.
    pub(super) async fn take_idle(&self) -> Option<Sender> {
        while let Some(mut sender) = self.vm.take() {
            let ready = tokio::time::timeout(READY_LIMIT, sender.ready());
            if let Ok(Ok(())) = ready.await {
                return Some(sender);
            }
        }
        None
    }

    /// Keeps a connection for reuse, or closes it if too many are idle. Its last exchange must be complete.
    pub(super) fn keep(&self, sender: Sender) {
        self.vm.put(sender);
    }
}

impl Drop for RequestPermit {
    fn drop(&mut self) {
        self.vm.in_flight.fetch_sub(1, Ordering::Relaxed);
        self.total.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> SandboxId {
        SandboxId::from_random([7; 19])
    }

    #[test]
    fn requests_in_flight_to_one_sandbox_are_limited() {
        let connections = Connections::default();
        let mut permits: Vec<_> = (0..IN_FLIGHT_MAX)
            .map(|_| connections.admit(&id(), 1).unwrap())
            .collect();
        assert_eq!(connections.admit(&id(), 1).unwrap_err(), IN_FLIGHT_MAX);
        permits.pop();
        assert!(connections.admit(&id(), 1).is_ok());
        let other = SandboxId::from_random([8; 19]);
        assert!(connections.admit(&other, 1).is_ok());
    }

    #[test]
    fn busy_sandboxes_leave_a_share_to_every_other_sandbox() {
        let connections = Connections::default();
        let mut permits = Vec::new();
        for n in 0..30 {
            let busy = SandboxId::from_random([n; 19]);
            while let Ok(permit) = connections.admit(&busy, 1) {
                permits.push(permit);
            }
        }
        assert!(permits.len() < CROWD + 30 * FAIR);
        let late = SandboxId::from_random([33; 19]);
        let own: Vec<_> = (0..FAIR)
            .map(|_| connections.admit(&late, 1).unwrap())
            .collect();
        assert_eq!(connections.admit(&late, 1).unwrap_err(), FAIR);
        drop((own, permits));
        assert_eq!(connections.total.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn entries_without_requests_and_connections_are_removed() {
        let connections = Connections::default();
        let permit = connections.admit(&id(), 1);
        connections.sweep(Instant::now());
        assert_eq!(lock(&connections.by_id).len(), 1);
        drop(permit);
        connections.sweep(Instant::now());
        assert_eq!(lock(&connections.by_id).len(), 0);
    }

    #[test]
    fn a_new_vm_does_not_share_an_entry_with_its_predecessor() {
        let connections = Connections::default();
        let old = connections.admit(&id(), 1).unwrap();
        let new = connections.admit(&id(), 2).unwrap();
        assert!(!Arc::ptr_eq(&old.vm, &new.vm));
        let late = connections.admit(&id(), 1).unwrap();
        assert!(!Arc::ptr_eq(&late.vm, &new.vm));
        assert_eq!(lock(&connections.by_id)[&id()].generation, 2);
    }
}
