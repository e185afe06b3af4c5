//! The wall clock of a guest. A request carries the time of its making, and the guest sets its clock once it has a
//! CPU to read it with: on a busy host that is a while later, and its clock is late by as much. How late nobody
//! knows, but no later than the answer took. After a slow answer the time is told again, now to a guest that runs.

use api_types::envd::{InitRequest, Timestamp};

use crate::host;

/// A clock that may be late by more than this is set again: less than half of what clones are promised.
const SLACK_NS: u64 = 20_000_000;
/// How often at most. On a host that is that busy each further try is as likely to be late as the one before.
const AGAIN: u32 = 2;

/// A request with the time that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Telling {
    sent_ns: u64,
    left: u32,
}

impl Telling {
    /// The request is made now, by CLOCK_MONOTONIC.
    pub(crate) fn first(now_ns: u64) -> Self {
        Self {
            sent_ns: now_ns,
            left: AGAIN,
        }
    }

    /// What to do when it is answered: `None` when the guest's clock is right, or as right as it gets; otherwise
    /// the time is told again.
    pub(crate) fn again(self, now_ns: u64) -> Option<Self> {
        let late = now_ns.saturating_sub(self.sent_ns) > SLACK_NS;
        let left = self.left.checked_sub(1).filter(|_| late)?;
        Some(Self {
            sent_ns: now_ns,
            left,
        })
    }
}

/// The time of now and nothing else: what the guest has been told besides stays as it is.
pub(crate) fn time_alone() -> InitRequest {
    InitRequest {
        timestamp: Some(Timestamp::from_unix_ns(host::unix_ns())),
        ..InitRequest::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_quick_answer_is_the_last() {
        assert_eq!(Telling::first(5).again(5 + 20 * MS), None);
        // A clock that went back says nothing about the guest's.
        assert_eq!(Telling::first(5).again(0), None);
    }

    #[test]
    fn the_time_is_told_again_until_the_answer_is_quick() {
        let second = Telling::first(0).again(21 * MS).unwrap();
        assert_eq!(second.again(41 * MS), None);
    }

    #[test]
    fn a_host_without_time_is_not_asked_for_ever() {
        let mut telling = Some(Telling::first(0));
        let mut told = 0;
        for now_ns in (100 * MS..).step_by(usize::try_from(100 * MS).unwrap()) {
            let Some(on) = telling else { break };
            told += 1;
            telling = on.again(now_ns);
        }
        assert_eq!(told, 3);
    }

    #[test]
    fn time_alone_leaves_the_rest() {
        let mut request = time_alone();
        assert!(request.timestamp.take().is_some());
        assert_eq!(request, InitRequest::default());
    }
}
