//! The maintenance thread: turns the programs' records into events, sweeps TAPs and flows, and follows the host's
//! addresses.

use std::{
    io::PipeReader,
    os::fd::{AsFd, OwnedFd},
    thread,
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::{enforcement::Enforcement, isolation::shared::Shared};

/// Longest wait for records.
const POLL_TIMEOUT_MS: u16 = 250;
/// Pause after a wake-up, because records come in bursts.
const BATCH_PAUSE: Duration = Duration::from_millis(10);
const SUM_INTERVAL: Duration = Duration::from_secs(1);
const SWEEP_INTERVAL: Duration = Duration::from_millis(500);
const ADDRESS_INTERVAL: Duration = Duration::from_secs(2);
/// The next sweep starts at the earliest this multiple of a sweep's duration after the sweep started.
const SWEEP_PAUSE_FACTOR: u32 = 20;
/// Upper limit of this pause: on a busy host, a sweep is slow because other programs run.
const SWEEP_PAUSE_MAX: Duration = Duration::from_secs(5);

/// Runs until the other end of `stop` is closed. `records`: the programs' ring buffer.
pub(crate) fn run(shared: &Shared, records: &OwnedFd, stop: &PipeReader) {
    let start = Instant::now();
    let (mut next_sum, mut next_sweep, mut next_read) = (start, start, start);
    loop {
        let mut waiting = [
            PollFd::new(stop.as_fd(), PollFlags::empty()),
            PollFd::new(records.as_fd(), PollFlags::POLLIN),
        ];
        let woken = poll(&mut waiting, PollTimeout::from(POLL_TIMEOUT_MS));
        if waiting[0].any().unwrap_or(false) {
            return;
        }
        with(shared, Enforcement::drain_refusals);
        let now = Instant::now();
        if now >= next_sweep {
            let began = Instant::now();
            shared.sweep();
            let pause = began.elapsed() * SWEEP_PAUSE_FACTOR;
            next_sweep = now + pause.clamp(SWEEP_INTERVAL, SWEEP_PAUSE_MAX);
        }
        if now >= next_sum {
            next_sum = now + SUM_INTERVAL;
            with(shared, Enforcement::sum_refusals);
        }
        if now >= next_read {
            next_read = now + ADDRESS_INTERVAL;
            // A failure is retried at the next interval. Until then the maps keep the last addresses.
            let _retried = with(shared, Enforcement::refresh_addresses);
        }
        if woken.is_ok_and(|ready| ready > 0) {
            thread::sleep(BATCH_PAUSE);
        }
    }
}

fn with<T>(shared: &Shared, work: impl FnOnce(&mut Enforcement) -> T) -> T {
    shared.with(|owner| work(&mut owner.enforcement))
}
