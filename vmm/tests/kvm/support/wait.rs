//! Waiting for conditions, never for a time.

use std::{
    thread,
    time::{Duration, Instant},
};

/// Asks until there is an answer; panics with `what` when there is none in time.
pub(crate) fn until<T>(what: &str, within: Duration, mut ask: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + within;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < deadline, "not within {within:?}: {what}");
        thread::park_timeout(Duration::from_millis(2));
    }
}
