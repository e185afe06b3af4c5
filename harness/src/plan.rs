//! Plans when each clone starts: a pure function of the scenario, which contains the seed.
//!
//! Rounds of clones, comparison rounds and rounds of the host-process baseline are interleaved. Every second
//! repetition has the reverse order, for example A B B A, so that drift in the speed of the host affects all
//! subjects equally.

mod lives;

use std::time::Duration;

use serde::{Deserialize, Serialize};
use stats::random::SplitMix64;

use crate::{
    clock::nanoseconds,
    scenario::{Arrival, Scenario, Spacing, SteadySpec},
};

/// Maximum number of threads of an open loop. An arrival waits while all threads are busy, and this wait counts as
/// latency.
pub(crate) const MAX_OPEN_WORKERS: u32 = 256;

/// All rounds of a run, in order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    pub rounds: Vec<Round>,
}

/// Consecutive starts of one subject. Their arrival times are relative to a common base time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// Position in the plan, from 0.
    pub index: u32,
    pub subject: Subject,
    pub row: Row,
    /// Mean rate of the arrivals, if the scenario has several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_per_s: Option<f64>,
    /// Number of threads that start clones.
    pub workers: u32,
    /// In chronological order.
    pub arrivals: Vec<Start>,
    /// For each arrival, the position of its first command in the scenario's work; empty if the round runs `exec`
    /// or the baseline.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub work: Vec<usize>,
    /// Lifetime of the sandbox of each arrival, in milliseconds; empty if sandboxes have none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lifetimes_ms: Vec<u64>,
    /// Position in the scenario's mix of the template of each arrival; empty without a mix.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub templates: Vec<u16>,
}

impl Plan {
    /// The plan as text: a line for each round, followed by a line for each arrival.
    #[must_use]
    pub fn describe(&self) -> String {
        let mut text = String::new();
        for round in &self.rounds {
            text.push_str(&format!(
                "round {} {} {}: {} arrivals, {} workers\n",
                round.index,
                round.row.name(),
                round.subject.name(),
                round.arrivals.len(),
                round.workers
            ));
            for (index, start) in round.arrivals.iter().enumerate() {
                let when = match start {
                    Start::AtNs(ns) => format!("at {ns} ns"),
                    Start::WhenFree => "when a worker is free".to_owned(),
                };
                let work = round.work.get(index);
                let work = work.map_or(String::new(), |item| format!(", work {item}"));
                let lifetime = round.lifetimes_ms.get(index);
                let lifetime = lifetime.map_or(String::new(), |ms| format!(", lives {ms} ms"));
                let template = round.templates.get(index);
                let template = template.map_or(String::new(), |n| format!(", template {n}"));
                text.push_str(&format!("  {index} {when}{work}{lifetime}{template}\n"));
            }
        }
        text
    }
}

impl Subject {
    /// Name in JSON and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Clone => "clone",
            Self::Beside => "beside",
            Self::HostProcess => "host_process",
            Self::Null => "null",
            Self::Peer(_) => "peer",
        }
    }
}

impl Row {
    /// Name in JSON and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::WarmUp => "warm_up",
            Self::Measured => "measured",
        }
    }
}

/// The kind of sandbox or process that a round starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    /// Clones, started through the target of the scenario.
    Clone,
    /// Clones of the same template, started through the scenario's second target.
    Beside,
    /// The baseline: processes on the host.
    HostProcess,
    /// Starts that return at once: the overhead of the harness.
    Null,
    /// Sandboxes of another system, by its position in the scenario's peers.
    Peer(u16),
}

/// The row of results to which a round belongs. No result combines samples of two rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Row {
    /// Starts while the template is not in the page cache.
    Cold,
    /// Recorded, but not part of any result.
    WarmUp,
    Measured,
}

/// Planned start of one clone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Start {
    /// Nanoseconds after the base time of the round.
    AtNs(u64),
    /// As soon as a worker of a closed loop is free.
    WhenFree,
}

/// Plans all rounds of a scenario.
#[must_use]
pub fn build(scenario: &Scenario) -> Plan {
    let mut plan = without_lives(scenario);
    lives::add(scenario, &mut plan.rounds);
    plan
}

/// The rounds with their arrivals. For a scenario with a trace, these are random arrivals that the trace replaces.
fn without_lives(scenario: &Scenario) -> Plan {
    let mut random = SplitMix64::new(scenario.seed);
    let mut deck = Deck::new(scenario);
    let mut shapes: Vec<(Subject, Row, Vec<usize>)> = Vec::new();
    // The harness cannot drop the template of a server from the page cache, so cold starts use the comparison
    // target.
    let cold = if scenario.target.kind.maps_template() {
        Subject::Clone
    } else {
        Subject::Beside
    };
    for _ in 0..scenario.cold_rounds {
        shapes.push((cold, Row::Cold, deck.deal(1)));
    }
    let mut subjects = vec![Subject::Clone];
    subjects.extend(scenario.beside().map(|_| Subject::Beside));
    subjects.extend((0..).zip(scenario.peers()).map(|(n, _)| Subject::Peer(n)));
    subjects.extend(scenario.baseline.as_ref().map(|_| Subject::HostProcess));
    for (row, rounds) in [
        (Row::WarmUp, scenario.warmup_rounds),
        (Row::Measured, scenario.rounds),
    ] {
        for index in 0..rounds {
            // Warm-up rounds run `exec`, so that no unseen work is warmed up.
            let work = match row {
                Row::Measured => deck.deal(scenario.arrival.starts()),
                Row::WarmUp | Row::Cold => Vec::new(),
            };
            let null = has_null_round(scenario.arrival, index).then_some(Subject::Null);
            let subjects: Vec<Subject> = subjects.iter().copied().chain(null).collect();
            for subject in turn(index, &subjects) {
                let work = match subject {
                    Subject::Clone | Subject::Beside => work.clone(),
                    Subject::HostProcess | Subject::Null | Subject::Peer(_) => Vec::new(),
                };
                shapes.push((subject, row, work));
            }
        }
    }
    if let Some(steady) = &scenario.steady {
        return at_rates(scenario, steady, &subjects, &mut random);
    }
    let rounds = (0_u32..)
        .zip(shapes)
        .map(|(index, (subject, row, work))| Round {
            work,
            ..round(index, subject, row, scenario.arrival, &mut random)
        })
        .collect();
    Plan { rounds }
}

/// Whether a repetition has a round of the null target. Such a round lasts as long as its arrivals: no time for
/// bursts and closed loops, but the full time of an open loop, which therefore has only one. Scenarios with several
/// rates also have one, in [`at_rates`].
fn has_null_round(arrival: Arrival, repetition: u32) -> bool {
    match arrival {
        Arrival::Burst { .. } | Arrival::Closed { .. } => true,
        Arrival::Open { .. } => repetition == 0,
    }
}

/// The rounds of a scenario with several rates. Each repetition has one for each rate and subject, in ascending
/// order of rates; every second repetition has the reverse order. The null target has one round, at the largest
/// rate.
fn at_rates(
    scenario: &Scenario,
    steady: &SteadySpec,
    subjects: &[Subject],
    random: &mut SplitMix64,
) -> Plan {
    let Arrival::Open { spacing, .. } = scenario.arrival else {
        return Plan { rounds: Vec::new() };
    };
    let mut shapes = Vec::new();
    for (row, rounds, rates) in [
        (
            Row::WarmUp,
            scenario.warmup_rounds,
            &steady.rates_per_s[..1],
        ),
        (Row::Measured, scenario.rounds, &steady.rates_per_s[..]),
    ] {
        for index in 0..rounds {
            let mut rates = rates.to_vec();
            if !index.is_multiple_of(2) {
                rates.reverse();
            }
            for rate in &rates {
                let subjects = turn(index, subjects).into_iter();
                shapes.extend(subjects.map(|subject| (subject, row, *rate)));
            }
            if row == Row::Measured && index == 0 {
                shapes.extend(rates.last().map(|rate| (Subject::Null, row, *rate)));
            }
        }
    }
    let rounds = (0_u32..).zip(shapes).map(|(index, (subject, row, rate))| {
        let arrivals = during(steady.lasts, rate, spacing, random);
        Round {
            index,
            subject,
            row,
            rate_per_s: Some(rate),
            workers: u32::try_from(arrivals.len())
                .map_or(MAX_OPEN_WORKERS, |n| n.min(MAX_OPEN_WORKERS)),
            arrivals,
            work: Vec::new(),
            lifetimes_ms: Vec::new(),
            templates: Vec::new(),
        }
    });
    Plan {
        rounds: rounds.collect(),
    }
}

/// Arrivals of an open loop for a given time. The first arrival comes one gap after the base time.
fn during(
    lasts: Duration,
    rate_per_s: f64,
    spacing: Spacing,
    random: &mut SplitMix64,
) -> Vec<Start> {
    let mut at_s = 0.0_f64;
    let mut arrivals = Vec::new();
    loop {
        at_s += gap(spacing, random) / rate_per_s;
        if at_s > lasts.as_secs_f64() {
            return arrivals;
        }
        arrivals.push(Start::AtNs(nanoseconds(Duration::from_secs_f64(at_s))));
    }
}

fn gap(spacing: Spacing, random: &mut SplitMix64) -> f64 {
    match spacing {
        Spacing::Constant => 1.0,
        Spacing::Poisson => random.exponential(),
    }
}

/// Deals the items of the scenario's work: all of them in random order, then all again in another order, so that
/// each runs equally often. Uses its own sequence of random numbers, so arrivals do not depend on the number of
/// items.
struct Deck {
    random: SplitMix64,
    items: usize,
    left: Vec<usize>,
}

impl Deck {
    fn new(scenario: &Scenario) -> Self {
        Self {
            random: SplitMix64::new(!scenario.seed),
            items: scenario.work.as_ref().map_or(0, |set| set.items.len()),
            left: Vec::new(),
        }
    }

    /// The next items; empty if the scenario has no work file.
    fn deal(&mut self, starts: u32) -> Vec<usize> {
        let mut dealt = Vec::new();
        for _ in 0..starts {
            if self.left.is_empty() {
                self.left = (0..self.items).collect();
                self.random.shuffle(&mut self.left);
            }
            dealt.extend(self.left.pop());
        }
        dealt
    }
}

/// Order of the subjects in repetition `index`, which has one round for each subject. Odd repetitions have the
/// reverse order.
fn turn(index: u32, subjects: &[Subject]) -> Vec<Subject> {
    let mut turn = subjects.to_vec();
    if !index.is_multiple_of(2) {
        turn.reverse();
    }
    turn
}

fn round(
    index: u32,
    subject: Subject,
    row: Row,
    arrival: Arrival,
    random: &mut SplitMix64,
) -> Round {
    let (workers, arrivals) = match (row, arrival) {
        (Row::Cold, _) => (1, vec![Start::AtNs(0)]),
        (_, Arrival::Burst { starts }) => (starts, repeat(Start::AtNs(0), starts)),
        (_, Arrival::Closed { workers, starts }) => {
            (workers.min(starts), repeat(Start::WhenFree, starts))
        }
        (
            _,
            Arrival::Open {
                starts,
                rate_per_s,
                spacing,
            },
        ) => (
            starts.min(MAX_OPEN_WORKERS),
            open(starts, rate_per_s, spacing, random),
        ),
    };
    Round {
        index,
        subject,
        row,
        rate_per_s: None,
        workers,
        arrivals,
        work: Vec::new(),
        lifetimes_ms: Vec::new(),
        templates: Vec::new(),
    }
}

fn repeat(start: Start, n: u32) -> Vec<Start> {
    (0..n).map(|_| start).collect()
}

/// Arrivals of an open loop. The first arrival is at the base time.
fn open(starts: u32, rate_per_s: f64, spacing: Spacing, random: &mut SplitMix64) -> Vec<Start> {
    let mut at_s = 0.0_f64;
    let mut arrivals = Vec::new();
    for _ in 0..starts {
        arrivals.push(Start::AtNs(nanoseconds(Duration::from_secs_f64(at_s))));
        at_s += gap(spacing, random) / rate_per_s;
    }
    arrivals
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario;
    use proptest::prelude::*;

    fn scenario_with(arrival: Arrival, rounds: u32, warmups: u32, seed: u64) -> Scenario {
        let mut s = scenario::parse("t", "").unwrap();
        (s.arrival, s.rounds, s.warmup_rounds, s.seed) = (arrival, rounds, warmups, seed);
        s
    }

    fn arrival() -> impl Strategy<Value = Arrival> {
        prop_oneof![
            (1_u32..300).prop_map(|starts| Arrival::Burst { starts }),
            (1_u32..20, 1_u32..300)
                .prop_map(|(workers, starts)| Arrival::Closed { workers, starts }),
            (1_u32..300, 0.001_f64..1e6, any::<bool>()).prop_map(
                |(starts, rate_per_s, poisson)| {
                    let spacing = if poisson {
                        Spacing::Poisson
                    } else {
                        Spacing::Constant
                    };
                    Arrival::Open {
                        starts,
                        rate_per_s,
                        spacing,
                    }
                }
            ),
        ]
    }

    proptest! {
        #[test]
        fn a_plan_has_all_rounds_and_is_reproducible(a in arrival(), rounds in 1_u32..9, warmups in 0_u32..3, seed: u64) {
            let s = scenario_with(a, rounds, warmups, seed);
            let plan = build(&s);
            prop_assert_eq!(&plan, &build(&s), "the same seed gives the same plan");
            let count = |subject, row| plan.rounds.iter()
                .filter(|r| r.subject == subject && r.row == row).count();
            let wanted = usize::try_from(rounds).unwrap();
            prop_assert_eq!(count(Subject::Clone, Row::Measured), wanted);
            prop_assert_eq!(count(Subject::HostProcess, Row::Measured), wanted);
            for (i, round) in plan.rounds.iter().enumerate() {
                prop_assert_eq!(usize::try_from(round.index).unwrap(), i);
                prop_assert_eq!(round.arrivals.len(), usize::try_from(a.starts()).unwrap());
                prop_assert!(round.workers >= 1 && round.workers <= a.starts());
                let times: Vec<u64> = round.arrivals.iter()
                    .filter_map(|s| match s { Start::AtNs(ns) => Some(*ns), Start::WhenFree => None })
                    .collect();
                prop_assert!(times.is_sorted());
                prop_assert_eq!(times.is_empty(), matches!(a, Arrival::Closed { .. }));
            }
        }
    }

    #[test]
    fn rounds_interleave_a_b_b_a() {
        let s = scenario_with(Arrival::Burst { starts: 1 }, 4, 0, 1);
        let letters: String = build(&s)
            .rounds
            .iter()
            .map(|r| match r.subject {
                Subject::Clone => 'A',
                Subject::Beside => 'C',
                Subject::HostProcess => 'B',
                Subject::Null => 'N',
                Subject::Peer(_) => 'P',
            })
            .collect();
        assert_eq!(letters, "ABNNBAABNNBA");
    }

    #[test]
    fn a_target_beside_takes_the_middle_and_the_cold_starts() {
        let text = "cold_rounds = 1\nrounds = 2\nwarmup_rounds = 0\n\
                    [target]\nkind = \"e2b\"\n[mode]\nkind = \"beside\"\nwith = \"vmm-direct\"";
        let plan = build(&scenario::parse("t", text).unwrap());
        let subjects: Vec<_> = plan.rounds.iter().map(|r| r.subject).collect();
        let (a, b, c, n) = (
            Subject::Clone,
            Subject::Beside,
            Subject::HostProcess,
            Subject::Null,
        );
        assert_eq!(subjects, [b, a, b, c, n, n, c, b, a]);
        assert_eq!(plan.rounds[0].row, Row::Cold);
    }

    #[test]
    fn work_is_dealt_evenly_alike_to_both_targets_and_never_to_warm_ups() {
        let text = "cold_rounds = 1\nrounds = 3\nseed = 4\n[arrival]\nstarts = 4\n\
                    [target]\nkind = \"e2b\"\n[mode]\nkind = \"beside\"\nwith = \"vmm-direct\"";
        let mut s = scenario::parse("t", text).unwrap();
        let item = crate::work::WorkItem {
            id: "a".into(),
            modules: Vec::new(),
            exec: s.exec.clone(),
        };
        s.work = Some(crate::work::WorkSet {
            file: "w.toml".into(),
            sha256: String::new(),
            kind: crate::work::WorkKind::Command,
            items: vec![item; 5],
        });
        let plan = build(&s);
        let work = |subject, row| -> Vec<usize> {
            let rounds = plan.rounds.iter();
            rounds
                .filter(|round| round.subject == subject && round.row == row)
                .flat_map(|round| round.work.clone())
                .collect()
        };
        let (measured, cold) = (
            work(Subject::Clone, Row::Measured),
            work(Subject::Beside, Row::Cold),
        );
        assert_eq!(measured, work(Subject::Beside, Row::Measured));
        assert_eq!((measured.len(), cold.len()), (12, 1));
        // Two whole decks of five were dealt, and three items of a third.
        let times = |item| measured.iter().chain(&cold).filter(|i| **i == item).count();
        assert!(
            (0..5).all(|item| (2..=3).contains(&times(item))),
            "{measured:?}"
        );
        for row in [Row::WarmUp, Row::Measured] {
            assert!(work(Subject::HostProcess, row).is_empty());
        }
        assert!(work(Subject::Clone, Row::WarmUp).is_empty());
        s.seed = 5;
        assert_ne!(
            build(&s).rounds[5].work,
            plan.rounds[5].work,
            "drawn by the seed"
        );
    }

    #[test]
    fn open_loops_have_one_null_round() {
        let a = Arrival::Open {
            starts: 3,
            rate_per_s: 100.0,
            spacing: Spacing::Constant,
        };
        let rounds = build(&scenario_with(a, 4, 0, 1)).rounds;
        let nulls = rounds.iter().filter(|r| r.subject == Subject::Null);
        assert_eq!(nulls.count(), 1);
    }

    #[test]
    fn each_rate_has_rounds_of_the_same_duration() {
        let text = "seed = 7\nrounds = 2\nwarmup_rounds = 1\n[arrival]\nkind = 'steady'\nrates_per_s = [1, 20.5]\n\
                    lasts = '30s'\n[baseline]\nkind = 'none'";
        let s = scenario::parse("t", text).unwrap();
        let plan = build(&s);
        assert_eq!(plan, build(&s));
        let rates: Vec<_> = plan.rounds.iter().map(|r| r.rate_per_s).collect();
        assert_eq!(rates, [1.0, 1.0, 20.5, 20.5, 20.5, 1.0].map(Some));
        assert_eq!(plan.rounds[0].row, Row::WarmUp);
        let null = plan.rounds.iter().map(|r| r.subject == Subject::Null);
        assert_eq!(
            null.collect::<Vec<_>>(),
            [false, false, false, true, false, false]
        );
        for round in &plan.rounds[1..] {
            let mean = round.rate_per_s.unwrap() * 30.0;
            let n = round.arrivals.len() as f64;
            // Five standard deviations of a Poisson distribution.
            assert!((n - mean).abs() < 5.0 * mean.sqrt(), "{n} of {mean}");
            let inside = |start: &Start| matches!(start, Start::AtNs(ns) if *ns <= 30_000_000_000);
            assert!(round.arrivals.iter().all(inside));
            assert!(round.workers <= MAX_OPEN_WORKERS);
        }
        assert_ne!(plan.rounds[2].arrivals, plan.rounds[3].arrivals);
    }

    #[test]
    fn constant_gaps_are_the_inverse_of_the_rate() {
        let a = Arrival::Open {
            starts: 3,
            rate_per_s: 100.0,
            spacing: Spacing::Constant,
        };
        let plan = build(&scenario_with(a, 1, 0, 1));
        assert_eq!(
            plan.rounds[0].arrivals,
            [
                Start::AtNs(0),
                Start::AtNs(10_000_000),
                Start::AtNs(20_000_000)
            ]
        );
    }
}
