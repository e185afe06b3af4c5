//! The thread that maintains the stock of TAPs: makes new TAPs, resets released ones for reuse, and removes discarded
//! ones and ones that cannot be reset.
//!
//! To create or remove a TAP, the kernel waits 10 ms or more for all CPUs while it holds the RTNL lock. A reset also
//! needs such a wait, but without the lock, and one wait serves all TAPs that were released together.

use std::{io, os::fd::AsFd, sync::PoisonError, time::Duration};

use crate::{
    error::{IsolationError, system},
    isolation::{owner::Owner, shared::Shared},
    taps::{
        device,
        reset::{self, OwnedTap},
        stock::{ReleasedTap, ReleasedTaps},
    },
};

/// Time after a failure until the thread tries again, unless a caller takes the failure earlier.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);

/// Runs until [`crate::taps::stock::TapStock::stop`] is called.
pub(crate) fn run(shared: &Shared) {
    while wait_for_work(shared) {
        let ReleasedTaps {
            to_reset,
            to_remove,
            taken,
        } = shared.with(|owner| owner.stock.take_released());
        drop(to_remove);
        // Must precede the reset, which finds a persistent TAP changed.
        for tap in taken {
            // If this fails, the TAP is removed when it is released.
            let _changed = device::set_persistent(tap.as_fd(), false);
        }
        reset_all(shared, to_reset);
        if shared.with(|owner| owner.is_short_of_taps())
            && let Err(error) = make(shared)
        {
            shared.with(|owner| owner.stock.fail(error));
        }
        shared.stock_changed.notify_all();
    }
}

/// Returns `false` when the thread must end. Otherwise there may be nothing to do: the wait also ends after
/// [`RETRY_INTERVAL`].
fn wait_for_work(shared: &Shared) -> bool {
    let is_idle = |owner: &mut Owner| !owner.stock.is_stopping() && !owner.has_stock_work();
    let waited = shared
        .stock_changed
        .wait_timeout_while(shared.lock(), RETRY_INTERVAL, is_idle);
    let (mut owner, _) = waited.unwrap_or_else(PoisonError::into_inner);
    drop(owner.stock.take_failure());
    !owner.stock.is_stopping()
}

/// Resets TAPs and adds them to the stock. A TAP whose reset fails is removed.
fn reset_all(shared: &Shared, released: Vec<ReleasedTap>) {
    if released.is_empty() {
        return;
    }
    let is_quiet = reset::wait_for_running_programs().is_ok();
    for ReleasedTap { number, tap } in released {
        ensure_free_index(shared);
        let rejected = if is_quiet && tap.reset().is_ok() && tap.persist().is_ok() {
            shared.with(|owner| owner.restock(number, tap)).err()
        } else {
            Some(tap)
        };
        shared.stock_changed.notify_all();
        // Removing the device is slow, so the owner's lock must not be held.
        drop(rejected);
    }
}

/// Makes a TAP for the stock. The program is attached before the device is up. If a step fails, closing the descriptor
/// removes the device, and the next sweep removes the TAP's entries.
fn make(shared: &Shared) -> Result<(), IsolationError> {
    ensure_free_index(shared);
    let device = device::tap("cube%d").map_err(|e| system("create a TAP", e))?;
    let name = device.name.clone();
    let failed = |source: io::Error| system(format!("set up {name}"), source);
    if device::has_ipv6() {
        device::configure("ipv6", &name, "disable_ipv6", "1").map_err(failed)?;
    }
    device::bypass_queueing(device.index).map_err(failed)?;
    let index = shared.with(|owner| owner.enforcement.register(&device))?;
    shared.programs.attach_tap(index, &device)?;
    device::set_up(&name, 0).map_err(failed)?;
    let tap = OwnedTap::new(device).map_err(failed)?;
    tap.persist().map_err(failed)?;
    shared.with(|owner| owner.add_to_stock(index, tap))
}

/// Sweeps if all numbers are in use: this frees the numbers of TAPs whose devices are gone.
fn ensure_free_index(shared: &Shared) {
    if !shared.with(|owner| owner.enforcement.taps.has_free_index()) {
        shared.sweep();
    }
}
