//! The stock of ready TAPs, and the released TAPs that become ready again or are removed.

use std::{collections::VecDeque, os::fd::OwnedFd};

use crate::{error::IsolationError, taps::reset::OwnedTap};

/// The state that callers of [`crate::Isolation::take`] share with the thread that makes TAPs
/// ([`crate::isolation::replenish`]).
#[derive(Debug)]
pub(crate) struct TapStock {
    /// Number of TAPs to keep ready.
    target: usize,
    /// Numbers of TAPs that were made ready; the last one is taken first. A TAP whose device was removed stays in the
    /// queue and is skipped.
    ready: VecDeque<u32>,
    released: ReleasedTaps,
    /// Number of callers of `take` that wait for a TAP.
    waiting: usize,
    /// The error of the last failed attempt to make a TAP, until a waiting caller takes it or the thread retries.
    failure: Option<IsolationError>,
    /// Set when the last handle is dropped. The thread that makes TAPs then ends.
    stopping: bool,
}

/// TAPs that are no longer in use.
#[derive(Debug, Default)]
pub(crate) struct ReleasedTaps {
    /// TAPs to reset for another sandbox.
    pub(crate) to_reset: Vec<ReleasedTap>,
    /// TAPs to remove. Dropping one removes its device, which is slow: drop them without the owner's lock.
    pub(crate) to_remove: Vec<OwnedTap>,
    /// Descriptors of TAPs that were taken from the stock and must not stay persistent. The ioctl waits for the kernel's
    /// RTNL lock, so callers of `take` do not wait for it.
    pub(crate) taken: Vec<OwnedFd>,
}

/// A TAP whose sandbox is gone, with the number that the TAP had.
#[derive(Debug)]
pub(crate) struct ReleasedTap {
    pub(crate) number: u32,
    pub(crate) tap: OwnedTap,
}

/// Action for the device of a released TAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Disposal {
    Reuse,
    Remove,
}

impl TapStock {
    pub(crate) fn new(target: usize) -> Self {
        Self {
            target,
            ready: VecDeque::new(),
            released: ReleasedTaps::default(),
            waiting: 0,
            failure: None,
            stopping: false,
        }
    }

    /// Adds a new TAP. It is taken after reset TAPs, which are more likely to be in the CPU's caches.
    pub(crate) fn add_new(&mut self, number: u32) {
        self.ready.push_front(number);
    }

    pub(crate) fn add_reset(&mut self, number: u32) {
        self.ready.push_back(number);
    }

    /// The next number in the queue. Its device may have been removed.
    pub(crate) fn next(&mut self) -> Option<u32> {
        self.ready.pop_back()
    }

    pub(crate) fn release(&mut self, number: u32, tap: OwnedTap, disposal: Disposal) {
        match disposal {
            Disposal::Reuse => self.released.to_reset.push(ReleasedTap { number, tap }),
            Disposal::Remove => self.released.to_remove.push(tap),
        }
    }

    /// Records that a TAP was taken from the stock.
    pub(crate) fn taken(&mut self, tap: OwnedFd) {
        self.released.taken.push(tap);
    }

    pub(crate) fn take_released(&mut self) -> ReleasedTaps {
        std::mem::take(&mut self.released)
    }

    /// Registers a waiting caller. If no other caller waits, drops the last failure, which is older than this wait.
    pub(crate) fn begin_wait(&mut self) {
        if self.waiting == 0 {
            self.failure = None;
        }
        self.waiting += 1;
    }

    pub(crate) fn end_wait(&mut self) {
        self.waiting -= 1;
    }

    pub(crate) fn fail(&mut self, error: IsolationError) {
        self.failure = Some(error);
    }

    pub(crate) fn take_failure(&mut self) -> Option<IsolationError> {
        self.failure.take()
    }

    /// Whether a TAP must be made: more callers wait than TAPs are ready, or a number is free and fewer TAPs than the
    /// target are ready.
    pub(crate) fn is_short(&self, ready: usize, has_free_index: bool) -> bool {
        ready < self.waiting || (ready < self.target && has_free_index)
    }

    /// Whether the thread that makes TAPs has work. After a failure, the thread makes no TAP until a caller has taken
    /// the failure or the retry interval has passed.
    pub(crate) fn has_work(&self, ready: usize, has_free_index: bool) -> bool {
        let ReleasedTaps {
            to_reset,
            to_remove,
            taken,
        } = &self.released;
        let is_idle = to_reset.is_empty() && to_remove.is_empty() && taken.is_empty();
        !is_idle || (self.failure.is_none() && self.is_short(ready, has_free_index))
    }

    pub(crate) fn stop(&mut self) {
        self.stopping = true;
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping
    }
}
