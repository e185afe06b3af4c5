//! Phases of a create, from the `Server-Timing` header of its response.

use std::time::Duration;

use model::{StartPhase, Timeline};

use crate::clock;

/// Name of the entry with the time until the response was complete.
const TOTAL: &str = "total";

/// Stamps the phases that a server reports, converted to the clock of this host. The server's total is assumed to
/// lie midway between request and response. A header without a total, or with a total longer than the request, is
/// ignored; so is a single phase longer than the request.
pub(super) fn stamp(timeline: &mut Timeline, header: &str, asked_ns: u64, replied_ns: u64) {
    let entries: Vec<(&str, u64)> = header.split(',').filter_map(entry).collect();
    let total = entries.iter().find(|(name, _)| *name == TOTAL);
    let on_the_way =
        total.and_then(|(_, total)| replied_ns.checked_sub(asked_ns)?.checked_sub(*total));
    let Some(on_the_way) = on_the_way else {
        return;
    };
    let accepted_ns = asked_ns + on_the_way / 2;
    timeline.stamp(StartPhase::Accepted, accepted_ns);
    for phase in StartPhase::ALL.iter().filter(|p| **p < StartPhase::Replied) {
        let entry = entries.iter().find(|(name, _)| *name == phase.name());
        if let Some((_, ns)) = entry.filter(|(_, ns)| *ns <= replied_ns - asked_ns) {
            timeline.stamp(*phase, accepted_ns + ns);
        }
    }
}

/// Name and nanoseconds of an entry such as `resumed;dur=1.25`.
fn entry(text: &str) -> Option<(&str, u64)> {
    let (name, ms) = text.trim().split_once(";dur=")?;
    let ms: f64 = ms.parse().ok()?;
    let time = Duration::try_from_secs_f64(ms / 1e3).ok()?;
    Some((name, clock::nanoseconds(time)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_of_the_server_lie_between_request_and_answer() {
        let stamped = |header: &str| {
            let mut timeline = Timeline::default();
            stamp(&mut timeline, header, 1_000_000, 6_000_000);
            timeline.iter().collect::<Vec<_>>()
        };
        let header = "confined;dur=0.250, first_exec;dur=1, agent_ready;dur=3.000, total;dur=4.000";
        assert_eq!(
            stamped(header),
            [
                (StartPhase::Accepted, 1_500_000),
                (StartPhase::Confined, 1_750_000),
                (StartPhase::AgentReady, 4_500_000),
            ]
        );
        for invalid in [
            "confined;dur=0.250",
            "total;dur=5.001",
            "total;dur=-1",
            "total;dur=nan",
            "",
        ] {
            assert_eq!(stamped(invalid), [], "{invalid}");
        }
    }
}
