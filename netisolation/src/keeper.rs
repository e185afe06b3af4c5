//! Two threads. The keeper keeps things in order: records to events, TAPs that are gone, flows that ended, addresses. The
//! porter makes TAPs for the stock and removes those that were released; for either the kernel waits for all CPUs, ten
//! milliseconds and more.

use std::{
    io::PipeReader,
    os::fd::{AsFd, OwnedFd},
    sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError},
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
/// The porter looks at least as often whether there is something to do.
const PORTER_TICK: Duration = Duration::from_millis(250);
/// A burst of takes and releases is over when none has come for so long.
const QUIET: Duration = Duration::from_millis(50);
/// The porter waits for its end so long at most.
const LONGEST_BURST: Duration = Duration::from_millis(400);
/// Turns that it then takes, even if the next burst comes.
const AT_LEAST: u32 = 8;
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

/// Works when it is called, until nobody is left who could. A verification takes the kernel's lock, too, so bursts of
/// takes and releases come first, unless the stock is empty.
pub(crate) fn carry(shared: &Shared, calls: &Receiver<()>) {
    loop {
        match calls.recv_timeout(PORTER_TICK) {
            Err(RecvTimeoutError::Disconnected) => return,
            Ok(()) | Err(RecvTimeoutError::Timeout) => {}
        }
        let until = Instant::now() + LONGEST_BURST;
        while Instant::now() < until && shared.with(|owner| owner.stock()) > 0 {
            match calls.recv_timeout(QUIET) {
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => break,
                Ok(()) => {}
            }
        }
        for turn in 0_u32.. {
            // Makes and removes in turn: somebody may wait for a TAP, and what is left of the dead is to be gone soon.
            // The next time may succeed where this one failed.
            let made = shared.with(|owner| owner.stock()) < shared.stock && shared.make().is_ok();
            let left = shared.remove_one();
            match calls.try_recv() {
                Err(TryRecvError::Disconnected) => return,
                Err(TryRecvError::Empty) if made || left => {}
                Ok(()) if turn < AT_LEAST => {}
                Ok(()) | Err(TryRecvError::Empty) => break,
            }
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
