//! The porter: the thread that makes TAPs for the stock, has those that were released ready for the next, and removes
//! those that cannot be. To make or remove one the kernel waits for all CPUs, ten milliseconds and more, and has one
//! lock for both; for any number that were released together it waits once, and without that lock.

use std::{
    io,
    sync::PoisonError,
    time::{Duration, Instant},
};

use crate::{
    IsolationError, Tap,
    clock::monotonic_ns,
    device,
    error::system,
    isolation::Shared,
    owner::{Owner, Released},
    renew::{self, Held},
};

/// After a failure nobody waited for, the porter tries again.
const TRY_AGAIN: Duration = Duration::from_millis(250);
/// Longest wait for a TAP.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Works until the end.
pub(crate) fn run(shared: &Shared) {
    while shared.await_work() {
        shared.turn();
    }
}

impl Shared {
    /// See [`crate::Isolation::take`].
    pub(crate) fn take(&self) -> Result<Tap, IsolationError> {
        let deadline = Instant::now() + LONGEST_WAIT;
        let mut owner = self.lock();
        owner.waiting.begin();
        let outcome = loop {
            match owner.take() {
                Ok(None) => {}
                Ok(Some(tap)) => break Ok(tap),
                Err(error) => break Err(error),
            }
            if let Some(error) = owner.waiting.failure.take() {
                break Err(error);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break Err(system(
                    "wait for a TAP",
                    io::Error::from(io::ErrorKind::TimedOut),
                ));
            }
            self.called.notify_all();
            let waited = self.called.wait_timeout(owner, left);
            owner = waited.unwrap_or_else(PoisonError::into_inner).0;
        };
        owner.waiting.callers -= 1;
        drop(owner);
        self.called.notify_all();
        outcome
    }

    /// Returns when there is something to do; false: never again.
    fn await_work(&self) -> bool {
        let idle = |owner: &mut Owner| !owner.ended && !owner.has_work(self.stock);
        let waited = self.called.wait_timeout_while(self.lock(), TRY_AGAIN, idle);
        let (mut owner, _) = waited.unwrap_or_else(PoisonError::into_inner);
        owner.waiting.failure = None;
        !owner.ended
    }

    fn turn(&self) {
        let (released, discarded) = self.with(Owner::outgoing);
        drop(discarded);
        self.renew(released);
        if self.with(|owner| owner.is_short(self.stock))
            && let Err(error) = self.make()
        {
            self.with(|owner| owner.waiting.failure = Some(error));
        }
        self.called.notify_all();
    }

    /// Puts into the stock what can be used again, and removes the rest.
    fn renew(&self, released: Vec<Released>) {
        if released.is_empty() {
            return;
        }
        let settled = renew::await_programs().is_ok();
        for Released { number, held } in released {
            self.ensure_number();
            let left = if settled && held.renew().is_ok() {
                self.with(|owner| owner.renumber(number, held)).err()
            } else {
                Some(held)
            };
            self.called.notify_all();
            // Without the lock: its device goes with it.
            drop(left);
        }
    }

    /// Makes a TAP for the stock: the program is on it before it is up. What fails on the way is cleared away when
    /// its device is found gone.
    fn make(&self) -> Result<(), IsolationError> {
        self.ensure_number();
        let device = device::tap("cube%d").map_err(|e| system("make a TAP", e))?;
        let name = device.name.clone();
        let failed = |source: io::Error| system(format!("set {name} up"), source);
        if device::has_ipv6() {
            device::configure("ipv6", &name, "disable_ipv6", "1").map_err(failed)?;
        }
        device::bypass_queueing(device.index).map_err(failed)?;
        let index = self.with(|owner| owner.enter(&device))?;
        self.tap_program.attach(index, &device)?;
        device::set_up(&name, 0).map_err(failed)?;
        let held = Held::new(device).map_err(failed)?;
        self.with(|owner| owner.store(index, held))
    }

    /// Numbers of TAPs that are gone are free after a sweep.
    fn ensure_number(&self) {
        if !self.with(|owner| owner.has_number()) {
            self.sweep();
        }
    }

    /// Clears away TAPs whose devices are gone, flows that are over, and pins. One at a time: what one finds gone must
    /// not be cleared by another when its number has a new TAP.
    pub(crate) fn sweep(&self) {
        let mut flows = self.flows.lock().unwrap_or_else(PoisonError::into_inner);
        let gone = self.with(Owner::find_gone);
        let reaped = flows.reap(monotonic_ns());
        self.with(|owner| {
            owner.credit(&reaped.removed);
            owner.expire_pins(&reaped.open);
            owner.clear(&gone);
        });
    }
}
