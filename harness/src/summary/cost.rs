//! Start rates and CPU time per start.

use std::collections::BTreeMap;

use super::{fold::Summary, ratio::Ratio};
use crate::{
    event::{Attempt, Spent, StartKind},
    plan::Subject,
    scenario::{HoldUntil, Scenario, TargetKind},
};
use stats::bootstrap;

/// A quotient of sums over rounds, for example starts over seconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rate(Vec<(f64, f64)>);

impl Rate {
    /// `None` without rounds, or if the divisors add up to zero.
    #[must_use]
    pub fn value(&self) -> Option<f64> {
        self.with(&vec![1; self.0.len()])
    }

    /// 95 % interval by bootstrap over rounds; `None` with too few rounds.
    #[must_use]
    pub fn interval95(&self) -> Option<(f64, f64)> {
        bootstrap::interval95(self.0.len(), |times| self.with(times))
    }

    /// Mean over samples of a round; each round is a cluster.
    #[must_use]
    pub fn mean_by_round(samples: &[(u32, f64)]) -> Self {
        let mut rounds: BTreeMap<u32, (f64, f64)> = BTreeMap::new();
        for (round, value) in samples {
            let (sum, count) = rounds.entry(*round).or_default();
            *sum += value;
            *count += 1.0;
        }
        Self(rounds.into_values().collect())
    }

    /// The quotient of each round whose divisor is not zero.
    pub fn by_round(&self) -> impl Iterator<Item = f64> {
        let rounds = self.0.iter().filter(|(_, below)| *below > 0.0);
        rounds.map(|(above, below)| above / below)
    }

    #[must_use]
    pub fn rounds(&self) -> usize {
        self.0.len()
    }

    /// Divides this rate by another one. The interval is a bootstrap over pairs of rounds at the same position.
    #[must_use]
    pub fn over(&self, other: &Self) -> Ratio {
        let pairs = self.0.len().min(other.0.len());
        let [ours, theirs] = [self, other].map(|rate| Self(rate.0[..pairs].to_vec()));
        let quotient = |times: &[usize]| Some(ours.with(times)? / theirs.with(times)?);
        Ratio {
            value: quotient(&vec![1; pairs]),
            interval95: bootstrap::interval95(pairs, quotient),
            pairs,
        }
    }

    /// The quotient if round `i` counts `times[i]` times.
    fn with(&self, times: &[usize]) -> Option<f64> {
        let weighted = self.0.iter().zip(times);
        let (above, below) = weighted.fold((0.0, 0.0), |(a, b), ((above, below), times)| {
            (a + above * *times as f64, b + below * *times as f64)
        });
        (below > 0.0).then(|| above / below)
    }
}

/// A positive value without its fraction.
pub(crate) fn whole(value: f64) -> Option<u64> {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "positive, and far below 2^64"
    )]
    (value.is_finite() && value >= 1.0).then_some(value as u64)
}

/// Whether the sandboxes come from a server, which may have a pool.
fn is_server(scenario: &Scenario) -> bool {
    scenario.target.kind == TargetKind::E2b
}

/// Starts per second from the base of each measured round to its end. Empty for targets without a server, which
/// have no pool to drain.
#[must_use]
pub fn drain(summary: &Summary) -> Rate {
    match summary.scenario() {
        Some(scenario) if is_server(scenario) => of_rounds(summary),
        Some(_) | None => Rate::default(),
    }
}

/// Starts per second from the base of each measured round until its sandboxes are killed and the pool is full again.
/// Empty if sandboxes are held, and for servers whose pool the harness cannot see.
#[must_use]
pub fn sustainable(summary: &Summary) -> Rate {
    match summary.scenario() {
        Some(scenario) if scenario.hold.until == HoldUntil::Exec => {
            if !is_server(scenario) {
                return of_rounds(summary);
            }
            let spent = summary.spent.iter();
            let pooled = spent.filter(|s| s.subject == Subject::Clone && s.warm.is_some());
            let starts = pooled.filter_map(|s| {
                let base_ns = summary.rounds.get(&s.round)?.base_ns;
                let seconds = s.until_ns.saturating_sub(base_ns) as f64 / 1e9;
                Some((summary.started_in(s.round) as f64, seconds))
            });
            Rate(starts.collect())
        }
        Some(_) | None => Rate::default(),
    }
}

/// Successful starts per second of a subject, from the first intended start of each measured round until its sandboxes
/// are gone and its pool is full again.
#[must_use]
pub fn starts_per_s(summary: &Summary, subject: Subject) -> Rate {
    let spent = summary.spent.iter().filter(|s| s.subject == subject);
    let rounds = spent.filter_map(|s| {
        let base_ns = attempts_of(summary, s).map(|a| a.intended_ns).min()?;
        let succeeded = attempts_of(summary, s).filter(|a| a.failure.is_none());
        let seconds = s.until_ns.saturating_sub(base_ns) as f64 / 1e9;
        Some((succeeded.count() as f64, seconds))
    });
    Rate(rounds.collect())
}

fn of_rounds(summary: &Summary) -> Rate {
    let complete = summary.rounds.iter().filter_map(|(round, times)| {
        let spent_ns = times.end_ns?.saturating_sub(times.base_ns);
        Some((summary.started_in(*round) as f64, spent_ns as f64 / 1e9))
    });
    Rate(complete.collect())
}

/// CPU nanoseconds per start of a subject. Failed starts are included, because they used CPU time too. Empty for
/// clones without a server that outlive their round, because the CPU time of a process is read after it has ended.
#[must_use]
pub fn cpu_ns_per_start(summary: &Summary, subject: Subject) -> Rate {
    let outlive =
        |scenario: &Scenario| scenario.hold.until == HoldUntil::End && !is_server(scenario);
    if subject == Subject::Clone && summary.scenario().is_some_and(outlive) {
        return Rate::default();
    }
    let spent = summary.spent.iter().filter(|s| s.subject == subject);
    let rounds = spent.filter_map(|s| {
        let starts = attempts_of(summary, s).count() as f64;
        Some((s.cpu_ns? as f64, starts))
    });
    Rate(rounds.collect())
}

/// CPU nanoseconds of the server per second, during the starts of rounds that do not use it.
#[must_use]
pub fn server_ns_per_s_in_other_rounds(summary: &Summary) -> Rate {
    let others = summary.spent.iter().filter(|s| s.subject != Subject::Clone);
    let rounds = others.filter_map(|s| {
        let end_ns = attempts_of(summary, s).map(|a| a.ended_ns).max()?;
        let seconds = end_ns.checked_sub(s.from_ns)? as f64 / 1e9;
        Some((s.server_cpu_ns? as f64, seconds))
    });
    Rate(rounds.collect())
}

/// Slots that were refilled before the last start of their round had ended, over all measured rounds of the target;
/// `None` without a pool.
#[must_use]
pub fn refilled_during_rounds(summary: &Summary) -> Option<u64> {
    let spent = summary.spent.iter().filter(|s| s.subject == Subject::Clone);
    let refilled: Vec<u64> = spent
        .filter_map(|s| {
            let taken = attempts_of(summary, s).filter(|a| a.start == Some(StartKind::Warm));
            let expected = u64::from(s.warm?).saturating_sub(taken.count() as u64);
            Some(u64::from(s.stock_after?).saturating_sub(expected))
        })
        .collect();
    (!refilled.is_empty()).then(|| refilled.iter().sum())
}

/// Milliseconds from the end of the last start until the pool was full again, for each measured round of the
/// target. Empty if sandboxes have lifetimes: such a round ends after the last lifetime, long after the pool is
/// full.
#[must_use]
pub fn until_full_ms(summary: &Summary) -> Vec<f64> {
    let until = summary.scenario().map(|scenario| scenario.hold.until);
    let spent = summary.spent.iter();
    let spent = spent.filter(|_| until != Some(HoldUntil::Lifetime));
    let pooled = spent.filter(|s| s.subject == Subject::Clone && s.warm.is_some());
    pooled
        .filter_map(|s| {
            let end_ns = attempts_of(summary, s).map(|a| a.ended_ns).max()?;
            Some(s.until_ns.saturating_sub(end_ns) as f64 / 1e6)
        })
        .collect()
}

/// Share of starts that came from a warm slot, failed ones included; `None` if the target does not report it.
#[must_use]
pub fn hit_rate<'a>(attempts: impl Iterator<Item = &'a Attempt>) -> Option<f64> {
    let kinds: Vec<_> = attempts.map(|a| a.start).collect();
    let warm = kinds
        .iter()
        .filter(|kind| **kind == Some(StartKind::Warm))
        .count();
    let reported = kinds.iter().any(Option::is_some);
    reported.then(|| warm as f64 / kinds.len() as f64)
}

/// The measured attempts of a round.
fn attempts_of<'a>(summary: &'a Summary, spent: &Spent) -> impl Iterator<Item = &'a Attempt> {
    let all = match spent.subject {
        Subject::Clone => &summary.clones,
        Subject::Beside => &summary.beside,
        Subject::HostProcess => &summary.baseline,
        Subject::Null => &summary.null,
        Subject::Peer(n) => summary.peers.get(&n).map_or(&[][..], Vec::as_slice),
    };
    let round = spent.round;
    all.iter().filter(move |attempt| attempt.round == round)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        event::{EVENTS_FORMAT, RunStarted},
        scenario,
        summary::{fold::RoundTimes, turns::tests::attempt_with},
    };

    const MS: u64 = 1_000_000;

    /// Two target rounds with 4 warm slots, and one comparison round. A target round lasts 100 ms and takes 3 warm
    /// sandboxes and a restored one. The pool is full again after 400 ms; `refilled` of its slots are refilled
    /// within the round.
    fn summary(refilled: u32) -> Summary {
        let mut summary = Summary {
            started: Some(RunStarted {
                format: EVENTS_FORMAT,
                scenario: scenario::parse(
                    "t",
                    "[target]\nkind='e2b'\nwarm=4\n[hold]\nuntil='exec'",
                )
                .unwrap(),
                reproduce: String::new(),
                started_unix_ms: 0,
                at_ns: 0,
            }),
            ..Summary::default()
        };
        for (round, subject) in [
            (0, Subject::Clone),
            (1, Subject::Clone),
            (2, Subject::Beside),
        ] {
            let from_ns = u64::from(round) * 1000 * MS;
            let attempt = |arrival: u32| Attempt {
                round,
                subject,
                arrival,
                start: Some(if arrival < 3 {
                    StartKind::Warm
                } else {
                    StartKind::Restored
                }),
                ended_ns: from_ns + 100 * MS,
                ..attempt_with(Vec::new())
            };
            let attempts = (0..4).map(attempt);
            match subject {
                Subject::Clone => summary.clones.extend(attempts),
                Subject::Beside | Subject::HostProcess | Subject::Null | Subject::Peer(_) => {
                    summary.beside.extend(attempts);
                }
            }
            if subject == Subject::Clone {
                let end_ns = Some(from_ns + 100 * MS);
                let times = RoundTimes {
                    base_ns: from_ns,
                    end_ns,
                };
                summary.rounds.insert(round, times);
            }
            summary.spent.push(Spent {
                round,
                subject,
                from_ns,
                until_ns: from_ns + 400 * MS,
                cpu_ns: Some(80 * MS),
                server_cpu_ns: Some(5 * MS),
                warm: Some(4),
                stock_after: Some(1 + refilled),
                memory: None,
            });
        }
        summary
    }

    #[test]
    fn a_pool_drains_faster_than_it_can_be_refilled() {
        let summary = summary(0);
        assert_eq!(drain(&summary).value(), Some(40.0));
        assert_eq!(sustainable(&summary).value(), Some(10.0));
        assert_eq!(
            cpu_ns_per_start(&summary, Subject::Clone).value(),
            Some(20e6)
        );
        assert_eq!(
            cpu_ns_per_start(&summary, Subject::HostProcess).value(),
            None
        );
        assert_eq!(hit_rate(summary.clones.iter()), Some(0.75));
        assert_eq!(until_full_ms(&summary), [300.0, 300.0]);
        let mut lives = summary.clone();
        if let Some(started) = &mut lives.started {
            started.scenario.hold.until = HoldUntil::Lifetime;
        }
        assert_eq!(until_full_ms(&lives), [0.0; 0], "the last life ends later");
        let other = server_ns_per_s_in_other_rounds(&summary).value().unwrap();
        assert!((other - 50e6).abs() < 1.0, "5 ms in 100 ms: {other}");
    }

    #[test]
    fn rates_of_systems_are_compared_by_pairs_of_rounds() {
        let mut summary = summary(0);
        for (attempt, spent) in [(0, 0), (4, 1)] {
            // The second target round is slower, and one of its starts failed.
            let base_ns = summary.spent[spent].from_ns;
            for attempt in &mut summary.clones[attempt..attempt + 4] {
                attempt.intended_ns = base_ns;
            }
        }
        summary.clones[7].failure = Some(crate::event::Failure {
            cause: crate::event::FailureCause::Create,
            message: String::new(),
        });
        let ours = starts_per_s(&summary, Subject::Clone);
        assert_eq!(ours, Rate(vec![(4.0, 0.4), (3.0, 0.4)]));
        assert_eq!(starts_per_s(&summary, Subject::Peer(0)), Rate::default());
        let theirs = Rate(vec![(4.0, 0.2), (4.0, 0.4), (9.0, 0.1)]);
        let ratio = ours.over(&theirs);
        assert_eq!((ratio.pairs, ratio.interval95), (2, None));
        let expected = (7.0 / 0.8) / (8.0 / 0.6);
        assert!((ratio.value.unwrap() - expected).abs() < 1e-9, "{ratio:?}");
        let many = Rate(vec![(10.0, 1.0); 12]);
        let (low, high) = many.over(&Rate(vec![(5.0, 1.0); 12])).interval95.unwrap();
        assert!((low - 2.0).abs() < 1e-9 && (high - 2.0).abs() < 1e-9);
        assert_eq!(many.over(&Rate::default()).value, None);
    }

    #[test]
    fn running_clones_without_a_server_have_no_cpu_time_yet() {
        let mut summary = summary(0);
        let cpu = |summary: &Summary| cpu_ns_per_start(summary, Subject::Clone).value();
        let started = summary.started.as_mut().unwrap();
        started.scenario.hold.until = HoldUntil::End;
        assert_eq!(cpu(&summary), Some(20e6));
        let started = summary.started.as_mut().unwrap();
        started.scenario.target.kind = TargetKind::VmmDirect;
        assert_eq!(cpu(&summary), None);
    }

    #[test]
    fn refill_within_a_round_is_counted() {
        assert_eq!(refilled_during_rounds(&summary(0)), Some(0));
        assert_eq!(refilled_during_rounds(&summary(2)), Some(4));
        assert_eq!(refilled_during_rounds(&Summary::default()), None);
    }

    #[test]
    fn a_failed_start_is_no_hit_but_its_cpu_time_counts() {
        let mut summary = summary(0);
        for failed in [0, 4] {
            summary.clones[failed].start = None;
            summary.clones[failed].failure = Some(crate::event::Failure {
                cause: crate::event::FailureCause::Create,
                message: String::new(),
            });
        }
        assert_eq!(hit_rate(summary.clones.iter()), Some(0.5));
        assert_eq!(drain(&summary).value(), Some(30.0));
        assert_eq!(
            cpu_ns_per_start(&summary, Subject::Clone).value(),
            Some(20e6)
        );
    }
}
