//! Comparisons of simulated blocks.

use model::{StartPhase, Timeline};
use stats::random::SplitMix64;

use super::{
    compare::{self, Comparison, Finding, LEVEL, Rule, not_within, without_power},
    metrics::Metric,
    order,
    record::Block,
    *,
};
use crate::{
    event::{Attempt, Failure, FailureCause},
    plan::{Row, Subject},
    scenario::{self, Scenario},
    summary::fold::{self, Summary},
};
use std::collections::BTreeMap;

const MS: f64 = 1e6;

/// A simulated host. Starts vary by 10 %, blocks by another 5 %, and the host becomes slower over the run.
struct Simulation {
    pairs: u32,
    starts: u32,
    /// Added to every start of B, in nanoseconds.
    delay_ns: f64,
    /// Every n-th start of B fails; 0 for none.
    fail_every: u32,
}

impl Simulation {
    fn equal(pairs: u32) -> Self {
        Self {
            pairs,
            starts: 20,
            delay_ns: 0.0,
            fail_every: 0,
        }
    }

    fn blocks(&self, seed: u64) -> Vec<Block> {
        let mut random = SplitMix64::new(seed);
        let order = order(self.pairs);
        let count = order.len() as f64;
        order
            .into_iter()
            .enumerate()
            .map(|(index, side)| {
                let drift = 1.0 + 0.5 * index as f64 / count;
                let speed = drift * (1.0 + 0.05 * (random.unit() - 0.5));
                let clones = (0..self.starts)
                    .map(|number| self.start(side, number, speed, &mut random))
                    .collect();
                Block {
                    side,
                    pair: index / 2,
                    summary: Summary {
                        clones,
                        ..Summary::default()
                    },
                }
            })
            .collect()
    }

    fn start(&self, side: Side, number: u32, speed: f64, random: &mut SplitMix64) -> Attempt {
        let is_b = side == Side::B;
        let failed = is_b && self.fail_every > 0 && number.is_multiple_of(self.fail_every);
        let mut timeline = Timeline::default();
        let delay = if is_b { self.delay_ns } else { 0.0 };
        for (phase, at) in [
            (StartPhase::Resumed, 5.0 * MS),
            (StartPhase::Replied, 15.0 * MS),
            (StartPhase::FirstExec, 25.0 * MS),
        ] {
            let noise = 1.0 + 0.1 * (random.unit() - 0.5);
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a simulated time of some milliseconds"
            )]
            let ns = (at * speed * noise + delay) as u64;
            if !failed {
                timeline.stamp(phase, ns);
            }
        }
        Attempt {
            round: 0,
            subject: Subject::Clone,
            row: Row::Measured,
            arrival: number,
            intended_ns: 0,
            actual_ns: 0,
            work: None,
            template: None,
            timeline,
            start: None,
            faults: None,
            turns: Vec::new(),
            failure: failed.then(|| Failure {
                cause: FailureCause::Restore,
                message: "simulated".into(),
            }),
            ended_ns: 0,
        }
    }

    fn compare(&self, seed: u64) -> Comparison {
        compare(&scenario(), &self.blocks(seed), 0.02, seed)
    }
}

fn scenario() -> Scenario {
    scenario::parse("simulated", "").unwrap()
}

/// Compares with every metric as a primary one.
fn compare(scenario: &Scenario, blocks: &[Block], tolerance: f64, seed: u64) -> Comparison {
    let all = Metric::all(scenario).into_iter().map(|metric| metric.name);
    let rule = Rule {
        primary: all.collect(),
        alpha: LEVEL,
        tolerance,
    };
    compare::compare(scenario, blocks, &rule, seed)
}

fn verdicts(comparison: &Comparison) -> Vec<(&str, Finding)> {
    let metrics = comparison.metrics.iter();
    metrics.map(|m| (m.metric.as_str(), m.verdict)).collect()
}

#[test]
fn blocks_alternate_a_b_b_a() {
    let letters: String = order(4).into_iter().map(Side::letter).collect();
    assert_eq!(letters, "ABBAABBA");
}

#[test]
fn a_delay_of_20_ms_is_worse_in_every_phase() {
    let simulation = Simulation {
        delay_ns: 20.0 * MS,
        ..Simulation::equal(8)
    };
    for seed in 0..5 {
        let comparison = simulation.compare(seed);
        for (metric, verdict) in verdicts(&comparison) {
            assert_eq!(verdict, Finding::Worse, "{metric}, seed {seed}");
        }
        let first_exec = &comparison.metrics[4];
        assert_eq!(first_exec.metric, "first_exec.p50");
        let [low, high] = first_exec.ratio_ci95.unwrap();
        assert!(low > 1.5 && high < 1.9, "25 to 37 ms become 45 to 57");
    }
}

#[test]
fn a_faster_build_is_better() {
    let simulation = Simulation {
        delay_ns: -4.0 * MS,
        ..Simulation::equal(8)
    };
    let comparison = simulation.compare(1);
    assert!(
        verdicts(&comparison)
            .iter()
            .all(|(_, v)| *v == Finding::Better)
    );
}

#[test]
fn equal_builds_show_nothing_in_about_95_of_100_runs() {
    // The tolerance is zero, so that only the p value decides. Each run has six metrics.
    let quiet = (0..60).filter(|seed| {
        let blocks = Simulation::equal(12).blocks(*seed);
        let comparison = compare(&scenario(), &blocks, 0.0, *seed);
        let found = verdicts(&comparison);
        assert_eq!(found.len(), 6);
        found.iter().all(|(_, v)| *v == Finding::NotShown)
    });
    let quiet = quiet.count();
    assert!((52..=60).contains(&quiet), "{quiet} of 60");
}

#[test]
fn no_worse_than_a_margin_must_be_shown_for_every_metric() {
    let comparison = Simulation::equal(20).compare(5);
    let open = |margin| not_within(&comparison.metrics, margin);
    assert_eq!(open(0.2), Vec::<String>::new());
    assert_eq!(open(0.0001).len(), comparison.metrics.len());
    // Too few pairs for an interval do not show anything.
    let few = Simulation::equal(4).compare(5);
    assert_eq!(not_within(&few.metrics, 10.0).len(), few.metrics.len());
    let slower = Simulation {
        delay_ns: 20.0 * MS,
        ..Simulation::equal(20)
    };
    assert_eq!(not_within(&slower.compare(5).metrics, 0.1).len(), 6);
}

fn primary(blocks: &[Block], names: &[&str]) -> Comparison {
    let rule = Rule {
        primary: names.iter().map(|name| (*name).to_owned()).collect(),
        alpha: LEVEL,
        tolerance: 0.02,
    };
    compare::compare(&scenario(), blocks, &rule, 1)
}

#[test]
fn a_primary_metric_without_power_is_named() {
    let equal = primary(&Simulation::equal(20).blocks(5), &["first_exec.p50"]);
    assert_eq!(without_power(&equal, 0.1), [""; 0]);
    // The starts vary by 10 %, which hides a change of 0.1 %.
    assert_eq!(without_power(&equal, 0.001), ["first_exec.p50"]);
    let missing = primary(&Simulation::equal(20).blocks(5), &["memory.slope"]);
    assert_eq!(without_power(&missing, 0.1), ["memory.slope"]);
    let slower = Simulation {
        delay_ns: 20.0 * MS,
        ..Simulation::equal(20)
    };
    let slower = primary(&slower.blocks(5), &["first_exec.p50"]);
    assert_eq!(without_power(&slower, 0.1), [""; 0], "shown to be worse");
}

#[test]
fn only_primary_metrics_are_judged_and_corrected() {
    let slower = Simulation {
        delay_ns: 20.0 * MS,
        ..Simulation::equal(6)
    };
    let blocks = slower.blocks(1);
    let found = primary(&blocks, &["first_exec.p50"]);
    let judged: Vec<_> = found.metrics.iter().filter(|m| m.primary).collect();
    assert_eq!(judged.len(), 1);
    assert_eq!(
        judged[0].verdict,
        Finding::Worse,
        "6 pairs are enough for one metric"
    );
    for metric in found.metrics.iter().filter(|m| !m.primary) {
        assert_eq!(metric.verdict, Finding::Described, "{}", metric.metric);
        assert_eq!(metric.p_adjusted, metric.p);
    }
}

#[test]
fn a_look_decides_a_loss_and_a_proof_of_no_loss_and_nothing_else() {
    let decides = |simulation: &Simulation| {
        let found = primary(&simulation.blocks(3), &["first_exec.p50"]);
        sequential::decides(&found, 0.1)
    };
    assert!(decides(&Simulation::equal(8)), "shown to be within 10 %");
    let slower = Simulation {
        delay_ns: 20.0 * MS,
        ..Simulation::equal(8)
    };
    assert!(decides(&slower));
    let a_little = Simulation {
        delay_ns: 2.8 * MS,
        ..Simulation::equal(5)
    };
    assert!(!decides(&a_little), "five pairs decide nothing");
    assert!(!sequential::decides(
        &primary(&Simulation::equal(8).blocks(3), &["memory.slope"]),
        0.1
    ));
}

/// Comparisons of blocks sampled with replacement from the rounds of a published run, so their spread and shape are
/// those of a real host.
struct Resampled(Vec<Vec<Attempt>>);

impl Resampled {
    fn of(run: &str) -> Self {
        let dir = format!("{}/../results/{run}", env!("CARGO_MANIFEST_DIR"));
        let recorded = fold::fold(&crate::record::read(std::path::Path::new(&dir)).unwrap());
        let mut rounds: BTreeMap<u32, Vec<Attempt>> = BTreeMap::new();
        for clone in recorded.clones {
            rounds.entry(clone.round).or_default().push(clone);
        }
        assert!(rounds.len() >= 5);
        Self(rounds.into_values().collect())
    }

    /// Number of comparisons out of `trials` with a finding. `change` is applied to the starts of B.
    fn found(
        &self,
        trials: u64,
        tolerance: f64,
        change: impl Fn(&mut Attempt, &mut SplitMix64),
        is_found: impl Fn(&Comparison) -> bool,
    ) -> usize {
        let compared = (0..trials).map(|seed| {
            let mut random = SplitMix64::new(seed);
            let blocks: Vec<Block> = order(12)
                .into_iter()
                .enumerate()
                .map(|(index, side)| {
                    let mut clones = self.0[random.below(self.0.len())].clone();
                    if side == Side::B {
                        clones
                            .iter_mut()
                            .for_each(|clone| change(clone, &mut random));
                    }
                    Block {
                        side,
                        pair: index / 2,
                        summary: Summary {
                            clones,
                            ..Summary::default()
                        },
                    }
                })
                .collect();
            compare(&scenario(), &blocks, tolerance, seed)
        });
        compared.filter(is_found).count()
    }
}

fn changed(comparison: &Comparison) -> bool {
    let counts = comparison.counts.iter().map(|count| count.verdict);
    let metrics = comparison.metrics.iter().map(|metric| metric.verdict);
    counts
        .chain(metrics)
        .any(|verdict| matches!(verdict, Finding::Worse | Finding::Better))
}

#[test]
fn resampled_blocks_of_one_build_give_at_most_5_false_alarms_in_100() {
    let mut alarms = 0;
    for run in [
        "single-api-ring3-2core-20261122",
        "code-interpreter-ring3-2core-20261122",
        "50-concurrent-api-ring3-2core-20261122",
    ] {
        let of_run = Resampled::of(run).found(40, 0.0, |_, _| {}, changed);
        println!("{run}: {of_run} of 40");
        alarms += of_run;
    }
    assert!(alarms <= 6, "{alarms} of 120");
}

#[test]
fn a_slowdown_of_15_percent_is_found_in_resampled_blocks() {
    let slower = |clone: &mut Attempt, _: &mut SplitMix64| {
        let mut timeline = Timeline::default();
        for (phase, at) in clone.timeline.iter() {
            let ns = at.saturating_sub(clone.intended_ns);
            timeline.stamp(phase, clone.intended_ns + ns * 115 / 100);
        }
        clone.timeline = timeline;
    };
    let is_worse = |comparison: &Comparison| {
        let metric = |name| comparison.metrics.iter().find(|m| m.metric == name);
        metric("first_exec.p50").is_some_and(|m| m.verdict == Finding::Worse)
    };
    let found = Resampled::of("single-api-ring3-2core-20261122").found(40, 0.02, slower, is_worse);
    println!("{found} of 40");
    assert!(found >= 36, "{found} of 40");
}

#[test]
fn failures_of_2_percent_are_found_in_resampled_blocks() {
    let failing = |clone: &mut Attempt, random: &mut SplitMix64| {
        if random.unit() < 0.02 {
            clone.failure = Some(Failure {
                cause: FailureCause::Restore,
                message: "simulated".into(),
            });
        }
    };
    let is_worse = |comparison: &Comparison| comparison.counts[0].verdict == Finding::Worse;
    let found = Resampled::of("single-api-ring3-2core-20261122").found(40, 0.02, failing, is_worse);
    println!("{found} of 40");
    assert!(found >= 36, "{found} of 40");
}

#[test]
fn a_lower_rate_is_worse_and_a_higher_one_better() {
    let mut simulated = Simulation::equal(12).blocks(4);
    for (index, block) in simulated.iter_mut().enumerate() {
        // B takes 1.2 times as long, and every block varies slightly.
        let longer = if block.side == Side::B { 120 } else { 100 };
        let end_ns = 1_000_000 * longer + index as u64 * 1000;
        let times = fold::RoundTimes {
            base_ns: 0,
            end_ns: Some(end_ns),
        };
        block.summary.rounds.insert(0, times);
    }
    let rate = |blocks: &[Block]| {
        let comparison = compare(&scenario(), blocks, 0.02, 1);
        let mut metrics = comparison.metrics.into_iter();
        metrics.find(|m| m.metric == "starts_per_s.p50").unwrap()
    };
    let slower = rate(&simulated);
    assert_eq!(slower.verdict, Finding::Worse);
    assert!(slower.ratio < 0.9 && slower.more_is_better);
    assert_eq!(not_within(&[slower], 0.1).len(), 1);
    for block in &mut simulated {
        block.side = if block.side == Side::A {
            Side::B
        } else {
            Side::A
        };
    }
    let faster = rate(&simulated);
    assert_eq!(faster.verdict, Finding::Better);
    assert!(not_within(&[faster], 0.0).is_empty());
}

#[test]
fn a_change_within_the_tolerance_is_not_reported() {
    let simulation = Simulation {
        delay_ns: 1.0 * MS,
        ..Simulation::equal(20)
    };
    let blocks = simulation.blocks(3);
    let strict = compare(&scenario(), &blocks, 0.0, 3);
    let tolerant = compare(&scenario(), &blocks, 0.5, 3);
    assert_eq!(strict.metrics[4].verdict, Finding::Worse);
    assert_eq!(tolerant.metrics[4].verdict, Finding::NotShown);
    let reason = tolerant.metrics[4].reason.as_deref();
    assert_eq!(reason, Some("the change is within the tolerance of 50 %"));
}

#[test]
fn four_blocks_are_too_few_to_show_a_change() {
    let simulation = Simulation {
        delay_ns: 20.0 * MS,
        ..Simulation::equal(4)
    };
    let comparison = simulation.compare(1);
    for (metric, verdict) in verdicts(&comparison) {
        assert_eq!(verdict, Finding::TooFewBlocks, "{metric}");
    }
    // The smallest p value is 2 × 2^-n. There are three metrics, the medians: P95 needs 100 starts, and 4 blocks of 20
    // have 80.
    assert_eq!((comparison.metrics.len(), comparison.blocks_needed), (3, 7));
}

#[test]
fn a_build_that_fails_more_often_is_worse_and_never_better() {
    let simulation = Simulation {
        delay_ns: -4.0 * MS,
        fail_every: 5,
        ..Simulation::equal(8)
    };
    let comparison = simulation.compare(1);
    let failures = &comparison.counts[0];
    assert_eq!(
        (failures.a, failures.b, failures.b_n, failures.verdict),
        (0, 32, 160, Finding::Worse)
    );
    // A fifth of B's starts failed and counts as infinitely slow, so only the medians are finite.
    assert_eq!(comparison.metrics.len(), 3);
    for metric in &comparison.metrics {
        assert!(metric.ratio < 1.0 && metric.withheld, "{metric:?}");
        assert_eq!(metric.verdict, Finding::NotShown);
    }
}
