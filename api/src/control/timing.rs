//! How long the phases of a start took, for the client: the header `Server-Timing` (W3C, "Server Timing").

use std::fmt::Write;

use model::{StartPhase, Timeline, clock};

/// The header's name.
pub(super) const HEADER: &str = "server-timing";
/// From the request until its answer was made.
const TOTAL: &str = "total";

/// The value for a start whose answer is made now.
pub(super) fn of(timeline: &Timeline) -> String {
    value(timeline, clock::monotonic_ns())
}

/// Milliseconds from the accepted request to each later phase, and to `now_ns`. What a warm sandbox went through before
/// it was asked for is left out; without a stamp of the request there is nothing to say.
fn value(timeline: &Timeline, now_ns: u64) -> String {
    let Some(accepted) = timeline.at(StartPhase::Accepted) else {
        return String::new();
    };
    let later = timeline.iter().filter_map(|(phase, at)| {
        let since = at.checked_sub(accepted)?;
        (phase != StartPhase::Accepted).then_some((phase.name(), since))
    });
    let total = (TOTAL, now_ns.saturating_sub(accepted));
    let mut text = String::new();
    for (name, ns) in later.chain([total]) {
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
    fn phases_count_from_the_request_and_those_before_it_are_left_out() {
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
    fn without_a_request_there_is_nothing_to_say() {
        assert_eq!(value(&Timeline::default(), 5), "");
    }
}
