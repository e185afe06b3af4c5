//! Latencies of the systems of a comparison, and their ratios to the first one that was measured.

use model::StartPhase;

use super::{
    fold::{Summary, clusters},
    ratio::{self, Ratio},
};
use crate::{
    event::{Attempt, System},
    plan::Subject,
    scenario::Quantile,
};
use stats::quantile::{INFINITE, Samples};

/// Measured step of a start; latency counts from its intended start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The create has returned.
    Created,
    /// The first command's output is complete and correct.
    FirstExec,
    /// The sandbox is removed.
    Gone,
}

impl Step {
    fn latency_ns(self, attempt: &Attempt) -> u64 {
        let ns = match self {
            Self::Created => attempt.latency_ns(StartPhase::Replied),
            Self::FirstExec => attempt.latency_ns(StartPhase::FirstExec),
            Self::Gone if attempt.failure.is_some() => None,
            Self::Gone => Some(attempt.ended_ns.saturating_sub(attempt.intended_ns)),
        };
        ns.unwrap_or(INFINITE)
    }

    /// Latencies of this step over the given starts.
    #[must_use]
    pub fn samples(self, attempts: &[Attempt]) -> Samples {
        Samples::clustered(&self.clusters(attempts))
    }

    fn clusters(self, attempts: &[Attempt]) -> Vec<Vec<u64>> {
        clusters(attempts.iter(), |attempt| vec![self.latency_ns(attempt)])
    }
}

/// Measured starts of a system.
#[must_use]
pub fn attempts<'a>(summary: &'a Summary, system: &System) -> &'a [Attempt] {
    match system.subject {
        Subject::Clone => &summary.clones,
        Subject::Beside => &summary.beside,
        Subject::HostProcess => &summary.baseline,
        Subject::Null => &summary.null,
        Subject::Peer(n) => summary.peers.get(&n).map_or(&[], Vec::as_slice),
    }
}

/// The system that the others are compared with: the first that was measured.
#[must_use]
pub fn reference(summary: &Summary) -> Option<&System> {
    let mut systems = summary.systems.iter();
    systems.find(|system| system.missing.is_none())
}

/// A quantile of `ours` divided by the same quantile of `theirs`. The interval is a bootstrap over pairs of
/// neighbouring clusters, which ran next to each other.
#[must_use]
pub fn over(ours: &[Attempt], theirs: &[Attempt], step: Step, quantile: Quantile) -> Ratio {
    ratio::of_clusters(&step.clusters(ours), &step.clusters(theirs), quantile)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        event::{Failure, FailureCause},
        summary::turns::tests::attempt_with,
    };

    /// 20 rounds of 5 starts: created after a third of `ms`, first command after two thirds, gone after `ms`.
    fn starts(ms: impl Fn(u32) -> u64) -> Vec<Attempt> {
        let start = |round: u32, arrival: u32| {
            let ended_ns = ms(round) * 3_000_000;
            let mut attempt = Attempt {
                round,
                arrival,
                ended_ns,
                ..attempt_with(Vec::new())
            };
            attempt.timeline.stamp(StartPhase::Replied, ended_ns / 3);
            attempt
                .timeline
                .stamp(StartPhase::FirstExec, ended_ns / 3 * 2);
            attempt
        };
        (0..100).map(|n| start(n / 5, n % 5)).collect()
    }

    #[test]
    fn steps_count_from_the_intended_start_and_failures_are_infinite() {
        let mut attempts = starts(|_| 2);
        let p50 = |attempts: &[Attempt], step: Step| step.samples(attempts).all()[50];
        assert_eq!(p50(&attempts, Step::Created), 2_000_000);
        assert_eq!(p50(&attempts, Step::FirstExec), 4_000_000);
        assert_eq!(p50(&attempts, Step::Gone), 6_000_000);
        attempts[3].failure = Some(Failure {
            cause: FailureCause::Kill,
            message: String::new(),
        });
        assert_eq!(Step::Gone.samples(&attempts).failed(), 1);
        assert_eq!(
            Step::FirstExec.samples(&attempts).failed(),
            0,
            "the command had answered before the removal failed"
        );
    }

    #[test]
    fn a_drift_of_the_host_changes_no_ratio() {
        let (ours, theirs) = (
            starts(|round| 30 + 3 * u64::from(round)),
            starts(|round| 10 + u64::from(round)),
        );
        let ratio = over(&ours, &theirs, Step::FirstExec, Quantile::P95);
        assert_eq!(ratio.value, Some(3.0));
        let (low, high) = ratio.interval95.unwrap();
        assert!(low > 2.99 && high < 3.01, "{low} {high}");
        let few = over(&ours[..50], &theirs, Step::FirstExec, Quantile::P95);
        assert_eq!(few.value, None, "50 starts have no P95");
    }
}
