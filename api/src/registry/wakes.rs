//! How often traffic may wake a sandbox whose guest does not come back. Each try holds a place for starts until its time
//! is over, and anybody who can reach a port of the sandbox causes it.

use super::note::UnixMs;

/// After the first resume that failed.
const FIRST_MS: u64 = 5_000;
/// The longest rest, however many have failed.
const LONGEST_MS: u64 = 600_000;

/// Resumes of one sandbox that failed one after another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Wakes {
    failed: u32,
    not_before: UnixMs,
}

impl Wakes {
    /// Another one failed, whoever asked for it: the rest is twice as long as the last.
    pub(super) fn fail(&mut self, now: UnixMs) {
        let rest = FIRST_MS.saturating_mul(1 << self.failed.min(16));
        self.failed = self.failed.saturating_add(1);
        self.not_before = now.saturating_add(rest.min(LONGEST_MS));
    }

    /// One came back.
    pub(super) fn succeed(&mut self) {
        *self = Self::default();
    }

    /// Seconds until traffic wakes it again, rounded up; `None`: it does now. Never more than the longest rest, also
    /// when the clock was set back.
    pub(super) fn rest_s(&self, now: UnixMs) -> Option<u64> {
        let left = self.not_before.saturating_sub(now).min(LONGEST_MS);
        (left > 0).then(|| left.div_ceil(1000))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rests_grow_and_end() {
        let mut wakes = Wakes::default();
        assert_eq!(wakes.rest_s(0), None);
        let rests = [5, 10, 20, 40, 80, 160, 320, 600, 600];
        for rest in rests {
            wakes.fail(1_000);
            assert_eq!(wakes.rest_s(1_000), Some(rest));
            assert_eq!(wakes.rest_s(1_001), Some(rest));
            assert_eq!(wakes.rest_s(1_000 + rest * 1000), None);
        }
        wakes.succeed();
        assert_eq!(wakes.rest_s(0), None);
    }
}
