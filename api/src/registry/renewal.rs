//! Renewal by activity: requests through the proxy extend a sandbox's deadline. Pure.

use pool::UnixMs;

use super::View;

/// How requests extend the deadline of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Renewal {
    /// The current deadline.
    end_at: UnixMs,
    /// Time from a request to the deadline that it sets.
    pub(super) timeout_s: u32,
    /// The latest deadline that requests can set.
    pub(super) until: UnixMs,
}

impl Renewal {
    /// `None` if requests do not extend the deadline.
    pub(super) fn of(view: &View) -> Option<Self> {
        let longest_s = view.note.on_activity_s?;
        let lifetime = &view.sandbox.lifetime;
        let longest_ms = u64::from(longest_s) * 1000;
        Some(Self {
            end_at: lifetime.end_at,
            timeout_s: lifetime.resume_timeout_s(),
            until: view.note.started_at.saturating_add(longest_ms),
        })
    }

    /// Whether a request extends the deadline now. Only if it moves by an eighth of the timeout or more, since each
    /// change is written to disk.
    pub(super) fn is_due(&self, now: UnixMs) -> bool {
        let timeout_ms = u64::from(self.timeout_s) * 1000;
        let end_at = now.saturating_add(timeout_ms).min(self.until);
        let step = if end_at == self.until {
            1
        } else {
            (timeout_ms / 8).max(1000)
        };
        end_at.saturating_sub(self.end_at) >= step
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_move_a_deadline_by_an_eighth_and_never_beyond_the_maximum() {
        let renewal = Renewal {
            end_at: 80_000,
            timeout_s: 80,
            until: 200_000,
        };
        assert!(!renewal.is_due(0));
        assert!(!renewal.is_due(9_999));
        assert!(renewal.is_due(10_000));
        let last = |end_at| Renewal { end_at, ..renewal };
        // The last step to the maximum may be short.
        assert!(last(199_000).is_due(120_000));
        assert!(!last(200_000).is_due(150_000));
        // A client with a key may have set a later deadline.
        assert!(!last(900_000).is_due(150_000));
    }
}
