//! Waiting for conditions with a deadline.

use std::{
    thread,
    time::{Duration, Instant},
};

/// Calls `ask` until it returns a value. Panics with `what` after `within`.
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
