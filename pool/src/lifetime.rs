//! Deadlines of sandboxes, as data. No function here reads a clock: the current time is an argument.

use serde::{Deserialize, Serialize};

use crate::state::PauseMode;

/// Wall-clock time in milliseconds since 1970. Deadlines are wall-clock time because clients see them and because they
/// outlive the server.
pub type UnixMs = u64;

/// The action taken when a sandbox reaches its deadline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnTimeout {
    #[default]
    End,
    Pause(PauseMode),
}

/// How long a sandbox runs and what happens at its deadline. Stored in the sandbox's record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lifetime {
    /// The deadline of a running sandbox. For a paused sandbox, the time of the pause.
    pub end_at: UnixMs,
    /// The timeout that was requested last, in seconds. [`Lifetime::resume_timeout_s`] derives the next one from it.
    pub timeout_s: u32,
    pub on_timeout: OnTimeout,
    /// Whether traffic to the sandbox resumes it if it is paused with its memory.
    pub auto_resume: bool,
}

impl Lifetime {
    /// Sets the deadline to `timeout_s` seconds from `now`, which may be earlier than the current deadline.
    pub fn set(&mut self, now: UnixMs, timeout_s: u32) {
        self.end_at = now.saturating_add(u64::from(timeout_s) * 1000);
        self.timeout_s = timeout_s;
    }

    /// Returns the timeout, in seconds, for a resume that does not specify one: the last requested timeout. Clients use
    /// a timeout of 0 to end or pause a sandbox immediately. 0 is therefore replaced by 300, so that a resumed sandbox
    /// does not end or pause again at once.
    #[must_use]
    pub fn resume_timeout_s(&self) -> u32 {
        const AFTER_ZERO_S: u32 = 300;
        match self.timeout_s {
            0 => AFTER_ZERO_S,
            requested => requested,
        }
    }
}

/// Delay in milliseconds after the first failed resume.
const FIRST_MS: u64 = 5_000;
/// Longest delay in milliseconds, regardless of how many resumes have failed.
const LONGEST_MS: u64 = 600_000;

/// Back-off for resumes that traffic causes. It is needed because a resume with an unresponsive guest holds a start
/// place until its timeout, and anyone who can reach a port of the sandbox can cause such a resume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Backoff {
    failed: u32,
    not_before: UnixMs,
}

impl Backoff {
    /// Records a failed resume, whether a client or traffic caused it. Each delay is twice the previous one, up to the
    /// maximum.
    pub(crate) fn fail(&mut self, now: UnixMs) {
        let delay = FIRST_MS.saturating_mul(1 << self.failed.min(16));
        self.failed = self.failed.saturating_add(1);
        self.not_before = now.saturating_add(delay.min(LONGEST_MS));
    }

    /// Moves the end of the delay by the step of the wall clock.
    pub(crate) fn clock_was_set(&mut self, step_ms: i64) {
        if self.not_before > 0 {
            self.not_before = self.not_before.saturating_add_signed(step_ms);
        }
    }

    /// Returns the seconds until traffic may resume the sandbox again, rounded up. `None` if it may do so now. The
    /// result never exceeds the maximum delay, even if the clock was set back.
    pub(crate) fn delay_s(&self, now: UnixMs) -> Option<u64> {
        let left = self.not_before.saturating_sub(now).min(LONGEST_MS);
        (left > 0).then(|| left.div_ceil(1000))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_longest() {
        let mut backoff = Backoff::default();
        assert_eq!(backoff.delay_s(0), None);
        for delay in [5, 10, 20, 40, 80, 160, 320, 600, 600] {
            backoff.fail(1_000);
            assert_eq!(backoff.delay_s(1_000), Some(delay));
            assert_eq!(backoff.delay_s(1_001), Some(delay));
            assert_eq!(backoff.delay_s(1_000 + delay * 1000), None);
        }
    }

    #[test]
    fn a_resume_without_a_timeout_gets_the_last_one_and_never_zero() {
        let mut lifetime = Lifetime::default();
        lifetime.set(1_000, 7);
        assert_eq!((lifetime.end_at, lifetime.resume_timeout_s()), (8_000, 7));
        lifetime.set(1_000, 0);
        assert_eq!((lifetime.end_at, lifetime.resume_timeout_s()), (1_000, 300));
    }
}
