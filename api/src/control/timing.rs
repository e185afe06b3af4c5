//! The response header `Server-Timing` (W3C, "Server Timing"): when a sandbox reached each phase of its start.

use std::fmt::Write;

use model::{StartPhase, Timeline, clock};

pub(super) const HEADER: &str = "server-timing";
/// Entry for the time from accepting the request to its response.
const TOTAL: &str = "total";

/// The header value for a response that is created now.
pub(super) fn of(timeline: &Timeline) -> String {
    value(timeline, clock::monotonic_ns())
}

/// The header value for a start whose response was sent earlier.
pub(super) fn of_start(timeline: &Timeline) -> String {
    entries(timeline, None)
}

/// Milliseconds from the acceptance of the request to each later phase and to `now_ns`. Phases that a warm sandbox had
/// passed before the request are omitted. Empty if the timeline has no [`StartPhase::Accepted`].
fn value(timeline: &Timeline, now_ns: u64) -> String {
    entries(timeline, Some(now_ns))
}

fn entries(timeline: &Timeline, now_ns: Option<u64>) -> String {
    let Some(accepted) = timeline.at(StartPhase::Accepted) else {
        return String::new();
    };
    let later = timeline.iter().filter_map(|(phase, at)| {
        let since = at.checked_sub(accepted)?;
        (phase != StartPhase::Accepted).then_some((phase.name(), since))
    });
    let total = now_ns.map(|now_ns| (TOTAL, now_ns.saturating_sub(accepted)));
    let mut text = String::new();
    for (name, ns) in later.chain(total) {
        let comma = if text.is_empty() { "" } else { ", " };
        // Writing to a string cannot fail.
        let _ = write!(text, "{comma}{name};dur={:.3}", ns as f64 / 1e6);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_are_relative_to_the_request_and_earlier_ones_are_omitted() {
        let mut timeline = Timeline::default();
        timeline.stamp(StartPhase::ProcessStarted, 1);
        timeline.stamp(StartPhase::Accepted, 1_000);
        timeline.stamp(StartPhase::Confined, 251_000);
        timeline.stamp(StartPhase::AgentReady, 3_001_000);
        let value = value(&timeline, 3_501_000);
        assert_eq!(
            value,
            "confined;dur=0.250, agent_ready;dur=3.000, total;dur=3.500"
        );
    }

    #[test]
    fn a_start_that_was_answered_has_no_total() {
        let mut timeline = Timeline::default();
        timeline.stamp(StartPhase::Accepted, 1_000);
        timeline.stamp(StartPhase::Resumed, 2_001_000);
        assert_eq!(of_start(&timeline), "resumed;dur=2.000");
        assert_eq!(of_start(&Timeline::default()), "");
    }

    #[test]
    fn without_an_accepted_request_the_header_is_empty() {
        assert_eq!(value(&Timeline::default(), 5), "");
    }
}
