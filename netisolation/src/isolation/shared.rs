//! The state that handles and threads share: the owner and the flow maps, each behind its own lock.

use std::{
    io,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::{
    datapath::{Programs, clock::monotonic_ns, flows::FlowMaps, gateway::Gateway},
    error::{IsolationError, system},
    isolation::owner::Owner,
    taps::{device, tap::Tap},
};

/// Longest wait of [`crate::Isolation::take`] for a TAP.
const TAKE_TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) struct Shared {
    owner: Mutex<Owner>,
    /// Notified when the stock changes: wakes the thread that makes TAPs, and callers that wait for a TAP.
    pub(crate) stock_changed: Condvar,
    flows: Mutex<FlowMaps>,
    /// For [`crate::Isolation::handed`], which must not wait for a sweep.
    pub(crate) handed: FlowMaps,
    pub(crate) programs: Programs,
    pub(crate) gateway: Gateway,
}

impl Shared {
    pub(crate) fn new(owner: Owner, flows: FlowMaps, handed: FlowMaps, gateway: Gateway) -> Self {
        Self {
            programs: owner.enforcement.datapath.programs.clone(),
            owner: Mutex::new(owner),
            stock_changed: Condvar::new(),
            flows: Mutex::new(flows),
            handed,
            gateway,
        }
    }

    /// Runs `work` under the owner's lock. `work` must not block.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&mut Owner) -> T) -> T {
        work(&mut self.lock())
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Owner> {
        self.owner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a TAP from the stock; waits for one if the stock is empty.
    pub(crate) fn take(&self) -> Result<Tap, IsolationError> {
        let deadline = Instant::now() + TAKE_TIMEOUT;
        let mut owner = self.lock();
        owner.stock.begin_wait();
        let outcome = loop {
            match owner.take() {
                Ok(None) => {}
                Ok(Some(tap)) => break Ok(tap),
                Err(error) => break Err(error),
            }
            if let Some(error) = owner.stock.take_failure() {
                break Err(error);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let timeout = io::Error::from(io::ErrorKind::TimedOut);
                break Err(system("wait for a TAP", timeout));
            }
            self.stock_changed.notify_all();
            let waited = self.stock_changed.wait_timeout(owner, left);
            owner = waited.unwrap_or_else(PoisonError::into_inner).0;
        };
        owner.stock.end_wait();
        drop(owner);
        self.stock_changed.notify_all();
        outcome
    }

    /// Removes a TAP that no process has open (at most one, because the kernel's RTNL lock is contended), the entries
    /// of TAPs whose devices are gone, flows that are expired or belong to an earlier tenure, and expired pins. The
    /// lock of the flow maps is held throughout, so that only one sweep runs at a time. Otherwise two sweeps could find
    /// the same TAP gone, and the second could clear the TAP's number after a new TAP has got it. While no flow is
    /// open, the tables of flows and pins are left alone for up to ten seconds. The programs ignore expired pins.
    pub(crate) fn sweep(&self) {
        let mut flows = self.flows.lock().unwrap_or_else(PoisonError::into_inner);
        let unclaimed = self.with(|owner| owner.enforcement.taps.next_unclaimed());
        if let Some((name, ifindex)) = unclaimed
            && device::index(&name).ok() == Some(ifindex)
        {
            device::remove_unopened(&name, ifindex);
        }
        let gone = self.with(Owner::close_gone);
        let now = monotonic_ns();
        let may_skip = gone.is_empty() && !flows.is_due(now);
        if may_skip && !self.with(|owner| owner.enforcement.taps.may_have_open_flows()) {
            return;
        }
        let swept = flows.sweep(now);
        if !gone.is_empty() {
            // A program may insert a flow of a removed TAP after this sweep has passed. The next one must find it before the
            // TAP's number is used again.
            flows.last_full_sweep = 0;
        }
        self.with(|owner| owner.finish_sweep(&gone, &swept));
    }

    #[cfg(test)]
    pub(crate) fn last_full_sweep(&self) -> u64 {
        let flows = self.flows.lock().unwrap_or_else(PoisonError::into_inner);
        flows.last_full_sweep
    }
}
