//! Measures when each sandbox responds again after a restart, with its previous number.

use std::{
    thread,
    time::{Duration, Instant},
};

use model::clock::monotonic_ns;
use testbed::api::Api;

use super::guests::{Guest, Guests};

/// Time after which a sandbox that does not respond counts as lost.
const PATIENCE: Duration = Duration::from_secs(30);
/// Pause before the next attempt.
const PAUSE: Duration = Duration::from_millis(5);
/// Stack size of each thread. There is one for each sandbox.
const STACK: usize = 256 << 10;

/// Outcome for a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reached {
    /// It responded with its number at this time (CLOCK_MONOTONIC, nanoseconds).
    At(u64),
    /// It did not respond, or had a different number.
    Lost(String),
}

/// Reads the numbers of all sandboxes concurrently until each has responded, and then writes their next numbers.
pub(super) fn reach(api: &Api, guests: &Guests) -> Vec<Reached> {
    thread::scope(|scope| {
        let start = |guest| {
            let builder = thread::Builder::new().stack_size(STACK);
            builder.spawn_scoped(scope, move || reach_one(api, guest))
        };
        let threads: Vec<_> = guests.all().iter().map(start).collect();
        let done =
            |thread: Result<thread::ScopedJoinHandle<'_, Reached>, std::io::Error>| match thread {
                Ok(thread) => thread
                    .join()
                    .unwrap_or_else(|p| std::panic::resume_unwind(p)),
                Err(error) => Reached::Lost(format!("cannot start a thread: {error}")),
            };
        threads.into_iter().map(done).collect()
    })
}

fn reach_one(api: &Api, guest: &Guest) -> Reached {
    let deadline = Instant::now() + PATIENCE;
    let id = guest.id();
    let (number, at) = loop {
        match guest.read(api) {
            Ok(number) => break (number, monotonic_ns()),
            Err(trouble) if guest.is_lost() || Instant::now() > deadline => {
                guest.mark_lost();
                let what = trouble.text;
                return Reached::Lost(format!("{id} did not answer within {PATIENCE:?}: {what}"));
            }
            Err(_) => thread::sleep(PAUSE),
        }
    };
    let expected = guest.expected();
    if !expected.contains(&number) {
        return Reached::Lost(format!("{id} contains {number} instead of {expected:?}"));
    }
    match guest.write_next(api) {
        Ok(()) => Reached::At(at),
        Err(trouble) => Reached::Lost(format!(
            "{id} answered, but then a write failed: {}",
            trouble.text
        )),
    }
}
