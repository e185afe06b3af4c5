//! The keeper: the thread that keeps things in order: records to events, TAPs that are gone, flows that ended, addresses.

use std::{
    io::PipeReader,
    os::fd::{AsFd, OwnedFd},
    thread,
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::{isolation::Shared, owner::Owner};

/// Wakes at least as often.
const TICK_MS: u16 = 250;
/// Records come in bursts: so long they gather before the thread looks again.
const GATHER: Duration = Duration::from_millis(10);
const SUM_EVERY: Duration = Duration::from_secs(1);
const REAP_EVERY: Duration = Duration::from_millis(500);
const READ_ADDRESSES_EVERY: Duration = Duration::from_secs(2);
/// Share of the time that scans of the flows may take: one part in so many.
const REAP_SHARE: u32 = 20;

/// Works until the other end of `ended` is closed.
pub(crate) fn run(shared: &Shared, records: &OwnedFd, ended: &PipeReader) {
    let (mut sum, mut reap, mut read) = (Instant::now(), Instant::now(), Instant::now());
    loop {
        let mut waiting = [
            PollFd::new(ended.as_fd(), PollFlags::empty()),
            PollFd::new(records.as_fd(), PollFlags::POLLIN),
        ];
        let woken = poll(&mut waiting, PollTimeout::from(TICK_MS));
        if waiting[0].any().unwrap_or(false) {
            return;
        }
        shared.with(|owner| owner.drain());
        let now = Instant::now();
        if now >= reap {
            let began = Instant::now();
            shared.sweep();
            reap = now + REAP_EVERY.max(began.elapsed() * REAP_SHARE);
        }
        if now >= sum {
            sum = now + SUM_EVERY;
            shared.with(Owner::sum);
        }
        if now >= read {
            read = now + READ_ADDRESSES_EVERY;
            // A moment without an address is told by the packets that find no way.
            let _next_time = shared.with(Owner::read_addresses);
        }
        if woken.is_ok_and(|ready| ready > 0) {
            thread::sleep(GATHER);
        }
    }
}

impl Owner {
    fn drain(&mut self) {
        self.records.drain(&mut self.datapath, &self.seats);
    }

    fn sum(&mut self) {
        self.records.sum_all(&mut self.datapath, &self.seats);
    }
}
