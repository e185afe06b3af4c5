//! Excludes measured repetitions that other programs disturbed, by the rule of the scenario, which is fixed before
//! the run.
//!
//! A *repetition* is one measured round of each subject. Its rounds are excluded together, so that pairs stay
//! pairs. A repetition with a failed start is never excluded: a disturbance does not excuse a failure.
//!
//! On a host that is only the client, the measured system may be among the other programs. There, they disturb a round
//! only if they also leave the client less idle CPU time than they may use.
//!
//! No rule judges kernel threads, because they also work for the run, for example when VMs end. A limit would
//! exclude the rounds in which the measured system cost the most.

use std::collections::{BTreeMap, BTreeSet};

use super::fold::Summary;
use crate::{
    event::RoundUsage,
    plan::Subject,
    scenario::{HoldUntil, InterferenceSpec},
};

/// Measured rounds, and the activity of the host during them.
#[derive(Clone, Debug, Default)]
pub struct Interference {
    /// Measured rounds in the order of their start.
    pub(super) rounds: Vec<(u32, Subject)>,
    pub(super) usage: BTreeMap<u32, RoundUsage>,
    /// Rounds of excluded repetitions, with the reason of the first disturbed round of the repetition.
    pub left_out: BTreeMap<u32, String>,
    /// Number of excluded repetitions.
    pub repetitions_left_out: usize,
    /// Number of disturbed repetitions that were kept because one of their starts failed.
    pub kept_with_failures: usize,
}

impl Interference {
    /// Number of repetitions that began.
    #[must_use]
    pub fn repetitions(&self) -> usize {
        self.by_repetition().len()
    }

    /// Mean share of the host's CPU time that other programs used during the judged rounds; `None` if it was not
    /// measured.
    #[must_use]
    pub fn programs_share(&self) -> Option<f64> {
        let judged = self.rounds.iter().filter(|(_, of)| is_judged(*of));
        let usage = judged.filter_map(|(round, _)| self.usage.get(round));
        mean(usage.filter_map(RoundUsage::programs_share))
    }

    /// Mean share of the host's CPU time that kernel threads used during measured rounds of a subject; `None` if it was
    /// not measured.
    #[must_use]
    pub fn kernel_share(&self, subject: Subject) -> Option<f64> {
        let rounds = self.rounds.iter().filter(|(_, of)| *of == subject);
        let usage = rounds.filter_map(|(round, _)| self.usage.get(round));
        mean(usage.filter_map(RoundUsage::kernel_share))
    }

    /// CPU time of the run during measured rounds of clones, in nanoseconds; `None` if it was not measured.
    #[must_use]
    pub fn own_cpu_ns(&self) -> Option<u64> {
        let clones = self.rounds.iter();
        let mut clones = clones.filter(|(round, subject)| {
            *subject == Subject::Clone && !self.left_out.contains_key(round)
        });
        clones.try_fold(0, |sum, (round, _)| {
            Some(sum + self.usage.get(round)?.own_cpu_ns?)
        })
    }

    /// Reason why one of these rounds is disturbed.
    fn disturbed(&self, rule: &InterferenceSpec, rounds: &[u32]) -> Option<String> {
        let judged = self
            .rounds
            .iter()
            .filter(|(round, subject)| rounds.contains(round) && is_judged(*subject));
        let mut usages = judged.filter_map(|(round, _)| self.usage.get(round));
        usages.find_map(|usage| rule.disturbs(usage))
    }

    /// The rounds of each repetition: the n-th measured round of each subject belongs to the n-th repetition.
    fn by_repetition(&self) -> Vec<Vec<u32>> {
        let mut seen: BTreeMap<Subject, usize> = BTreeMap::new();
        let mut repetitions: Vec<Vec<u32>> = Vec::new();
        for (round, subject) in &self.rounds {
            let number = seen.entry(*subject).or_default();
            if repetitions.len() <= *number {
                repetitions.push(Vec::new());
            }
            repetitions[*number].push(*round);
            *number += 1;
        }
        repetitions
    }
}

impl InterferenceSpec {
    /// Reason why a round is disturbed; `None` if it is not, or if the values could not be measured.
    #[must_use]
    pub fn disturbs(&self, usage: &RoundUsage) -> Option<String> {
        let exceeds = |share: Option<f64>, limit: f64| share.filter(|share| *share > limit);
        let has_cpu = |idle: f64| idle >= self.foreign_cpu_share;
        let is_fine = usage.client_only && usage.idle_share().is_some_and(has_cpu);
        let foreign = usage.programs_share().filter(|_| !is_fine);
        if let Some(share) = exceeds(foreign, self.foreign_cpu_share) {
            let percent = share * 100.0;
            let included = match usage.kernel_cpu_ns {
                Some(_) => "",
                None => ", kernel threads included",
            };
            return Some(format!(
                "other programs used {percent:.0} % of the CPU time{included}"
            ));
        }
        let share = exceeds(usage.memory_wait_share, self.memory_wait_share)?;
        Some(format!(
            "tasks waited for memory in {:.0} % of the time",
            share * 100.0
        ))
    }
}

/// Rounds of the null target last only milliseconds, of which a single other task can take a large share.
pub(crate) fn is_judged(subject: Subject) -> bool {
    subject != Subject::Null
}

fn mean(shares: impl Iterator<Item = f64>) -> Option<f64> {
    let (count, sum) = shares.fold((0_u32, 0.0), |(count, sum), share| (count + 1, sum + share));
    (count > 0).then(|| sum / f64::from(count))
}

/// Removes the disturbed repetitions from the results. The raw events are not changed.
pub(super) fn leave_out(summary: &mut Summary) {
    let Some(scenario) = summary.started.as_ref().map(|started| &started.scenario) else {
        return;
    };
    let Some(rule) = scenario.interference else {
        return;
    };
    // Held clones accumulate over rounds, so a sample of memory does not belong to one round.
    let has_own_memory = scenario.hold.until != HoldUntil::End;
    let failed: BTreeSet<u32> = summary
        .clones
        .iter()
        .chain(&summary.beside)
        .chain(&summary.baseline)
        .chain(summary.peers.values().flatten())
        .filter(|attempt| attempt.failure.is_some())
        .map(|attempt| attempt.round)
        .chain(
            (summary
                .happened
                .iter()
                .filter(|event| event.failure.is_some()))
            .map(|event| event.round),
        )
        .collect();
    for repetition in summary.interference.by_repetition() {
        let Some(why) = summary.interference.disturbed(&rule, &repetition) else {
            continue;
        };
        if repetition.iter().any(|round| failed.contains(round)) {
            summary.interference.kept_with_failures += 1;
            continue;
        }
        summary.interference.repetitions_left_out += 1;
        for round in repetition {
            summary.interference.left_out.insert(round, why.clone());
        }
    }
    let left_out = &summary.interference.left_out;
    let keeps = |round: &u32| !left_out.contains_key(round);
    let rows = [
        &mut summary.clones,
        &mut summary.beside,
        &mut summary.baseline,
        &mut summary.null,
    ];
    for row in rows.into_iter().chain(summary.peers.values_mut()) {
        row.retain(|attempt| keeps(&attempt.round));
    }
    summary.rounds.retain(|round, _| keeps(round));
    summary.baseline_rounds.retain(|round, _| keeps(round));
    summary.spent.retain(|spent| keeps(&spent.round));
    summary.happened.retain(|event| keeps(&event.round));
    if has_own_memory {
        summary.memory.retain(|point| keeps(&point.group));
        summary.ledgers.retain(|ledger| keeps(&ledger.round));
        summary.idle.retain(|sample| keeps(&sample.round));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(foreign: f64, memory_wait: f64) -> RoundUsage {
        RoundUsage {
            wall_ns: 1000,
            own_cpu_ns: Some(500),
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a share of 2000 ns"
            )]
            foreign_cpu_ns: Some((foreign * 2000.0) as u64),
            kernel_cpu_ns: Some(0),
            client_only: false,
            cores: 2,
            memory_wait_share: Some(memory_wait),
            cpu_wait_share: Some(1.0),
        }
    }

    #[test]
    fn cpu_time_of_others_and_waits_for_memory_disturb_and_own_work_does_not() {
        let rule = InterferenceSpec {
            foreign_cpu_share: 0.1,
            memory_wait_share: 0.2,
        };
        assert_eq!(rule.disturbs(&usage(0.1, 0.2)), None);
        let cpu = rule.disturbs(&usage(0.4, 0.0)).unwrap();
        assert!(cpu.contains("40 % of the CPU time"), "{cpu}");
        let memory = rule.disturbs(&usage(0.0, 0.5)).unwrap();
        assert!(memory.contains("waited for memory"), "{memory}");
        let mut unknown = usage(1.0, 0.0);
        unknown.foreign_cpu_ns = None;
        assert_eq!(rule.disturbs(&unknown), None);
    }

    #[test]
    fn a_client_is_disturbed_only_without_idle_cpu_time() {
        let rule = InterferenceSpec {
            foreign_cpu_share: 0.1,
            memory_wait_share: 0.2,
        };
        // The client itself uses a quarter.
        let mut round = usage(0.6, 0.0);
        assert!(rule.disturbs(&round).is_some(), "not only a client");
        round.client_only = true;
        assert_eq!(rule.disturbs(&round), None, "15 % are idle");
        round.foreign_cpu_ns = Some(1400);
        assert!(rule.disturbs(&round).is_some(), "5 % are idle");
        round.memory_wait_share = Some(0.5);
        round.foreign_cpu_ns = Some(0);
        assert!(rule.disturbs(&round).is_some(), "a client needs memory");
    }

    #[test]
    fn kernel_threads_disturb_no_round_and_hide_no_program() {
        let rule = InterferenceSpec {
            foreign_cpu_share: 0.1,
            memory_wait_share: 0.2,
        };
        // Other programs used 41 %; kernel threads none, all, or all but 15 % of the CPU time.
        let mut round = usage(0.41, 0.0);
        round.kernel_cpu_ns = round.foreign_cpu_ns;
        assert_eq!(rule.disturbs(&round), None);
        round.kernel_cpu_ns = Some(520);
        let why = rule.disturbs(&round).unwrap();
        assert!(why.contains("15 %") && !why.contains("kernel"), "{why}");
        round.kernel_cpu_ns = None;
        let why = rule.disturbs(&round).unwrap();
        assert!(
            why.contains("41 %") && why.contains("kernel threads included"),
            "{why}"
        );
    }

    #[test]
    fn the_share_of_kernel_threads_is_the_mean_over_rounds_of_one_subject() {
        let of = |kernel| RoundUsage {
            kernel_cpu_ns: kernel,
            ..usage(0.5, 0.0)
        };
        let (a, b) = (Subject::Clone, Subject::HostProcess);
        let interference = Interference {
            rounds: vec![(0, a), (1, b), (2, a), (3, a)],
            usage: [
                (0, of(Some(400))),
                (1, of(Some(20))),
                (2, of(Some(1200))),
                (3, of(None)),
            ]
            .into(),
            ..Interference::default()
        };
        assert_eq!(interference.kernel_share(a), Some(0.4));
        assert_eq!(interference.kernel_share(b), Some(0.01));
        assert_eq!(interference.kernel_share(Subject::Null), None);
    }

    #[test]
    fn rounds_that_are_not_judged_are_not_in_the_share_of_other_programs() {
        let interference = Interference {
            rounds: vec![(0, Subject::Clone), (1, Subject::Null)],
            usage: [(0, usage(0.25, 0.0)), (1, usage(1.0, 0.0))].into(),
            ..Interference::default()
        };
        assert_eq!(interference.programs_share(), Some(0.25));
    }

    #[test]
    fn the_nth_rounds_of_all_subjects_are_one_repetition() {
        let (a, b) = (Subject::Clone, Subject::HostProcess);
        let interference = Interference {
            rounds: vec![(3, a), (4, b), (5, b), (6, a), (7, a)],
            ..Interference::default()
        };
        assert_eq!(
            interference.by_repetition(),
            [vec![3, 4], vec![5, 6], vec![7]]
        );
    }

    #[test]
    fn a_disturbed_repetition_is_left_out_of_peers_and_events_unless_the_event_failed() {
        use crate::{
            event::{Happened, RunStarted},
            plan::Row,
            summary::turns::tests::attempt_with,
        };
        let event = |round, failure: Option<&str>| Happened {
            round,
            row: Row::Measured,
            at_ns: 0,
            times: BTreeMap::new(),
            counts: BTreeMap::new(),
            failure: failure.map(str::to_owned),
        };
        let attempts = |round| crate::event::Attempt {
            round,
            ..attempt_with(Vec::new())
        };
        let mut summary = Summary {
            started: Some(RunStarted {
                format: crate::event::EVENTS_FORMAT,
                scenario: crate::scenario::parse("t", "").unwrap(),
                reproduce: String::new(),
                started_unix_ms: 0,
                at_ns: 0,
            }),
            happened: vec![event(0, None), event(2, None), event(4, Some("late"))],
            peers: [(0, [1, 3, 5].map(attempts).into())].into(),
            ..Summary::default()
        };
        let (a, b) = (Subject::Clone, Subject::Peer(0));
        summary.interference.rounds = vec![(0, a), (1, b), (2, a), (3, b), (4, a), (5, b)];
        summary.interference.usage = [(3, usage(0.5, 0.0)), (4, usage(0.5, 0.0))].into();
        leave_out(&mut summary);
        let rounds: Vec<_> = summary.happened.iter().map(|event| event.round).collect();
        assert_eq!(rounds, [0, 4]);
        let peers: Vec<_> = summary.peers[&0].iter().map(|a| a.round).collect();
        assert_eq!(peers, [1, 5]);
        let found = &summary.interference;
        assert_eq!(
            (found.repetitions_left_out, found.kept_with_failures),
            (1, 1)
        );
    }
}
