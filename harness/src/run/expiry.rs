//! Kills sandboxes when their lifetimes end.

use std::{
    collections::BTreeMap,
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender},
    },
    time::Duration,
};

use super::{INTERRUPT_CHECK, held::HeldClone};
use crate::{clock, event::RunEvent};

/// Number of threads that kill sandboxes. A kill blocks its thread, and other lifetimes may end in the meantime.
pub(super) const THREADS: usize = 8;

/// A sandbox and the time of its end on CLOCK_MONOTONIC.
pub(super) struct Expiring {
    pub(super) at_ns: u64,
    pub(super) clone: HeldClone,
}

/// Kills each sandbox at its time, or all at once if the run is interrupted, until all senders are dropped and no
/// sandbox is left. A failed kill is recorded as a failure in a held clone.
pub(super) fn kill_in_time(
    incoming: &Receiver<Expiring>,
    interrupted: &AtomicBool,
    events: &Sender<RunEvent>,
) {
    let mut waiting: BTreeMap<(u64, u32), HeldClone> = BTreeMap::new();
    let mut is_open = true;
    while is_open || !waiting.is_empty() {
        let now_ns = clock::monotonic_ns();
        let next_ns = waiting.first_key_value().map(|((at_ns, _), _)| *at_ns);
        let check_ns = now_ns + clock::nanoseconds(INTERRUPT_CHECK);
        let until_ns = next_ns.map_or(check_ns, |next_ns| next_ns.min(check_ns));
        if is_open {
            let wait = Duration::from_nanos(until_ns.saturating_sub(now_ns));
            match incoming.recv_timeout(wait) {
                Ok(Expiring { at_ns, clone }) => {
                    waiting.insert((at_ns, clone.id.arrival), clone);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => is_open = false,
            }
        } else {
            clock::sleep_until(until_ns);
        }
        let is_over = interrupted.load(Ordering::Relaxed);
        let now_ns = clock::monotonic_ns();
        while let Some(first) = waiting.first_entry() {
            if !is_over && first.key().0 > now_ns {
                break;
            }
            kill(first.remove(), events);
        }
    }
}

fn kill(clone: HeldClone, events: &Sender<RunEvent>) {
    if let Err(failure) = clone.sandbox.kill() {
        // Sending fails only if the recorder has failed.
        let _ = events.send(RunEvent::AfterHold {
            round: clone.id.round,
            arrival: clone.id.arrival,
            took_ns: None,
            failure: Some(failure),
        });
    }
}
