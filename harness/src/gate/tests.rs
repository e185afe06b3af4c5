use super::*;
use crate::{
    event::{Attempt, EVENTS_FORMAT, Failure, FailureCause, Happened, MemoryPoint, RunStarted},
    plan::{Row, Subject},
    scenario::{self, EventCount, EventTime},
    summary::{fold::RoundTimes, turns::tests::attempt_with},
};
use model::{StartPhase, Timeline};

/// 20 rounds of `per_round` starts at one instant. Start `i` of a round takes `ms(round, i)`; `None` is a failure.
fn attempts(
    subject: Subject,
    per_round: u32,
    ms: impl Fn(u32, u32) -> Option<u64>,
) -> Vec<Attempt> {
    let one = |round: u32, arrival: u32| {
        let took = ms(round, arrival);
        let mut timeline = Timeline::default();
        if let Some(ms) = took {
            timeline.stamp(StartPhase::FirstExec, ms * 1_000_000);
        }
        Attempt {
            round,
            arrival,
            subject,
            intended_ns: 0,
            timeline,
            failure: took.is_none().then(|| Failure {
                cause: FailureCause::Exec,
                message: "x".into(),
            }),
            ..attempt_with(Vec::new())
        }
    };
    (0..20)
        .flat_map(|round| (0..per_round).map(move |arrival| (round, arrival)))
        .map(|(round, arrival)| one(round, arrival))
        .collect()
}

fn clones(ms: impl Fn(u32, u32) -> Option<u64>) -> Summary {
    Summary {
        clones: attempts(Subject::Clone, 10, ms),
        ..Summary::default()
    }
}

fn judged(metric: &str, limit: &str, summary: &Summary, grade: Grade) -> GateResult {
    let text = format!(
        "[target]\nkind='e2b'\n[mode]\nkind='beside'\nwith='vmm-direct'\n[[turns]]\nname='t'\nargv=['a']\n\
         [[gates]]\nname='g'\nmetric='{metric}'\nlimit='{limit}'"
    );
    let gates = scenario::parse("t", &text).unwrap().gates;
    judge(&gates, summary, grade, None).remove(0)
}

const GRADES: [Grade; 3] = [Grade::Publishable, Grade::Indicative, Grade::Unfit];

#[test]
fn the_whole_interval_of_a_time_decides_on_every_host() {
    // From 10 to 29 ms in each round, with a spread between rounds.
    let summary = clones(|round, i| Some(10 + u64::from(i) + u64::from(round) % 10));
    for grade in GRADES {
        let verdict = |limit| judged("first_exec.p50", limit, &summary, grade).verdict;
        assert_eq!(verdict("30ms"), Verdict::Met);
        assert_eq!(
            verdict("5ms"),
            Verdict::Missed,
            "MISSED on a host graded {grade}"
        );
        let result = judged("first_exec.p50", "19ms", &summary, grade);
        let [low, high] = result.interval95.unwrap();
        assert!(low < 19.0 && 19.0 < high, "{low} {high}");
        assert_eq!(result.verdict, Verdict::Inconclusive);
        assert_eq!(result.decisive, grade == Grade::Publishable);
    }
}

#[test]
fn a_quantile_among_failures_is_missed_and_no_host_excuses_it() {
    let summary = clones(|_, i| (i > 0).then_some(10));
    let result = judged("first_exec.p95", "1s", &summary, Grade::Unfit);
    assert_eq!((result.verdict, result.decisive), (Verdict::Missed, true));
    assert_eq!(result.measured, None);
    // The median itself and its interval are finite.
    let median = judged("first_exec.p50", "1s", &summary, Grade::Unfit);
    assert_eq!(median.verdict, Verdict::Met);
    // Half of the rounds fail completely: the upper bound is infinite, so the verdict is inconclusive.
    let summary = clones(|round, _| (round % 5 < 3).then_some(10));
    let result = judged("first_exec.p50", "1s", &summary, Grade::Publishable);
    assert_eq!(result.verdict, Verdict::Inconclusive);
    assert_eq!(result.interval95, None);
}

#[test]
fn too_little_data_is_inconclusive_and_a_maximum_needs_no_interval() {
    let summary = clones(|_, _| Some(10));
    let result = judged("first_exec.p99", "1s", &summary, Grade::Publishable);
    assert_eq!(result.verdict, Verdict::Inconclusive);
    assert!(result.reason.contains("needs 500 samples"));
    let few = Summary {
        clones: attempts(Subject::Clone, 50, |_, _| Some(10))
            .into_iter()
            .filter(|attempt| attempt.round < 5)
            .collect(),
        ..Summary::default()
    };
    let result = judged("first_exec.p95", "1s", &few, Grade::Publishable);
    assert_eq!(result.verdict, Verdict::Inconclusive, "five bursts");
    assert!(
        result.reason.contains("5 rounds are too few"),
        "{}",
        result.reason
    );
    let max = |limit| judged("first_exec.max", limit, &few, Grade::Publishable).verdict;
    assert_eq!((max("10ms"), max("9ms")), (Verdict::Met, Verdict::Missed));
}

#[test]
fn a_ratio_to_host_processes_is_a_gate_of_its_own() {
    // The host's speed changes from round to round and affects both equally.
    let speed = |round: u32| 1 + u64::from(round) % 7;
    let summary = Summary {
        baseline: attempts(Subject::HostProcess, 10, |round, _| Some(10 * speed(round))),
        ..clones(|round, _| Some(40 * speed(round)))
    };
    let verdict = |limit, grade| judged("first_exec.p95.ratio", limit, &summary, grade).verdict;
    for grade in [Grade::Publishable, Grade::Indicative] {
        assert_eq!(verdict("4.01", grade), Verdict::Met);
        assert_eq!(verdict("3.9", grade), Verdict::Missed);
    }
    assert_eq!(verdict("4.01", Grade::Unfit), Verdict::Inconclusive);
    let result = judged("first_exec.p95.ratio", "3.9", &summary, Grade::Indicative);
    assert!(
        result.decisive,
        "a missed ratio fails the run on any host fit for ratios"
    );
    assert_eq!(result.measured, Some(4.0));
    let none = clones(|_, _| Some(1));
    let result = judged("first_exec.p95.ratio", "9", &none, Grade::Publishable);
    assert_eq!(
        result.verdict,
        Verdict::Inconclusive,
        "no host processes ran"
    );
}

#[test]
fn counts_are_absolute() {
    let summary = clones(|round, i| (round + i > 0).then_some(10));
    for grade in GRADES {
        let verdict = |limit| judged("failures", limit, &summary, grade).verdict;
        assert_eq!(
            (verdict("1"), verdict("0")),
            (Verdict::Met, Verdict::Missed)
        );
    }
    let failures = judged("failures", "0", &summary, Grade::Unfit);
    assert!(failures.decisive);
    let none = judged("failures", "0", &Summary::default(), Grade::Publishable);
    assert_eq!(none.verdict, Verdict::Inconclusive);
    let unknown = judged("not_warm", "0", &summary, Grade::Publishable);
    assert_eq!(
        unknown.verdict,
        Verdict::Inconclusive,
        "no start names its origin"
    );
    let repeated = judged("after_hold.failures", "0", &summary, Grade::Publishable);
    assert_eq!(
        repeated.verdict,
        Verdict::Inconclusive,
        "nothing was repeated"
    );
}

#[test]
fn a_sandbox_that_cannot_be_removed_at_the_end_of_its_lifetime_is_a_failure_after_hold() {
    let text = "[arrival]\nkind='closed'\nstarts=300\n[hold]\nuntil='lifetime'\nlifetime='1s'";
    let mut summary = of_scenario(clones(|_, _| Some(10)), text);
    let of = |summary: &Summary| judged("after_hold.failures", "0", summary, Grade::Unfit);
    assert_eq!(
        (of(&summary).verdict, of(&summary).n),
        (Verdict::Met, summary.clones.len())
    );
    summary.after_hold_ns.push(INFINITE);
    assert_eq!(of(&summary).verdict, Verdict::Missed);
}

fn of_scenario(mut summary: Summary, text: &str) -> Summary {
    summary.started = Some(RunStarted {
        format: EVENTS_FORMAT,
        scenario: scenario::parse("t", text).unwrap(),
        reproduce: String::new(),
        started_unix_ms: 0,
        at_ns: 0,
    });
    summary
}

#[test]
fn a_rate_is_judged_by_its_interval_over_rounds() {
    let mut summary = of_scenario(clones(|_, _| Some(10)), "[target]\nkind='e2b'");
    // 10 starts a round, in 100 ms or in 125 ms: 89 starts per second on average.
    for round in 0..20 {
        let took = 100_000_000 + u64::from(round % 2) * 25_000_000;
        let times = RoundTimes {
            base_ns: 0,
            end_ns: Some(took),
        };
        summary.rounds.insert(round, times);
    }
    for grade in GRADES {
        let result = |limit| judged("drain_per_s", limit, &summary, grade);
        assert_eq!(result("80/s").verdict, Verdict::Met);
        assert_eq!(result("89/s").verdict, Verdict::Inconclusive);
        assert_eq!(result("99/s").verdict, Verdict::Missed);
        assert_eq!(result("99/s").decisive, grade == Grade::Publishable);
    }
    summary.rounds.retain(|round, _| *round < 5);
    let few = judged("drain_per_s", "1/s", &summary, Grade::Publishable);
    assert_eq!(few.verdict, Verdict::Inconclusive);
    // Clones without a server do not drain a pool, and a server whose pool is not visible has no sustainable rate.
    let direct = of_scenario(summary.clone(), "[hold]\nuntil='exec'");
    let rate =
        |metric, summary: &Summary| judged(metric, "1/s", summary, Grade::Publishable).measured;
    assert_eq!(rate("drain_per_s", &direct), None);
    assert!(rate("sustainable_per_s", &direct) > Some(80.0));
    assert_eq!(rate("sustainable_per_s", &summary), None);
}

#[test]
fn a_slope_is_judged_by_its_interval() {
    let point = |group: u32, alive: u32, bytes: u64| MemoryPoint {
        group,
        alive,
        at_ns: 0,
        meminfo: [("MemAvailable".to_owned(), 1_000_000_000 - bytes)].into(),
        reclaim: std::collections::BTreeMap::new(),
    };
    let noise = |group: u32| u64::from(group % 3) * 1_000_000;
    let memory = (0..6)
        .flat_map(|group| {
            [
                point(group, 0, 0),
                point(group, 10, 40_000_000 + noise(group)),
            ]
        })
        .collect();
    let summary = Summary {
        memory,
        ..Summary::default()
    };
    for grade in GRADES {
        let verdict = |limit| judged("memory.slope", limit, &summary, grade).verdict;
        assert_eq!(verdict("5MB"), Verdict::Met);
        assert_eq!(verdict("4100KB"), Verdict::Inconclusive);
        assert_eq!(verdict("3MB"), Verdict::Missed);
    }
    let none = judged(
        "memory.slope",
        "5MB",
        &Summary::default(),
        Grade::Publishable,
    );
    assert_eq!(none.verdict, Verdict::Inconclusive);
}

/// 10 events, each with one time or none.
fn with_events(seconds: impl Fn(u32) -> Option<u64>, lost: impl Fn(u32) -> u64) -> Summary {
    let event = |round: u32| Happened {
        round,
        row: Row::Measured,
        at_ns: 0,
        times: [(
            EventTime::Empty,
            vec![seconds(round).map(|s| s * 1_000_000_000)],
        )]
        .into(),
        counts: [(EventCount::Lost, lost(round))].into(),
        failure: None,
    };
    Summary {
        happened: (0..10).map(event).collect(),
        ..Summary::default()
    }
}

#[test]
fn durations_and_counts_of_events_are_judged_as_others() {
    let judged = |metric: &str, limit: &str, summary: &Summary| {
        let text = format!(
            "[target]\nkind='e2b'\n[mode]\nkind='cluster'\nnodes=2\n[mode.event]\nkind='drain-node'\n[[gates]]\nname='g'\nmetric='{metric}'\nlimit='{limit}'"
        );
        let gates = scenario::parse("t", &text).unwrap().gates;
        judge(&gates, summary, Grade::Publishable, None).remove(0)
    };
    let good = with_events(|round| Some(2 + u64::from(round % 2)), |_| 0);
    let result = judged("event.empty.p50", "10s", &good);
    assert_eq!((result.verdict, result.n), (Verdict::Met, 10));
    assert_eq!(result.measured, Some(2000.0));
    let max = |limit| judged("event.empty.max", limit, &good).verdict;
    assert_eq!((max("3s"), max("2s")), (Verdict::Met, Verdict::Missed));
    let few = judged("event.empty.p95", "10s", &good);
    assert_eq!(few.verdict, Verdict::Inconclusive, "{}", few.reason);
    assert_eq!(judged("event.lost", "0", &good).verdict, Verdict::Met);

    let bad = with_events(
        |round| (round > 5).then_some(1),
        |round| u64::from(round == 3),
    );
    let late = judged("event.empty.p50", "10s", &bad);
    assert_eq!((late.verdict, late.measured), (Verdict::Missed, None));
    let lost = judged("event.lost", "0", &bad);
    assert_eq!((lost.verdict, lost.measured), (Verdict::Missed, Some(1.0)));
    let none = judged("event.lost", "0", &Summary::default());
    assert_eq!(none.verdict, Verdict::Inconclusive);
}

fn with_ledgers(rss_mb: impl Fn(u32) -> u64) -> Summary {
    let ledger = |round: u32| crate::event::CloneLedger {
        round,
        arrival: 0,
        guest_private_bytes: None,
        vmm_private_bytes: None,
        page_tables_bytes: None,
        guest_shared_bytes: None,
        rss_bytes: Some(rss_mb(round) * 1_000_000),
        pss_bytes: Some(2_000_000),
    };
    Summary {
        ledgers: (0..20)
            .flat_map(|round| [ledger(round), ledger(round)])
            .collect(),
        ..Summary::default()
    }
}

#[test]
fn sizes_of_a_vmm_are_judged_by_the_interval_of_their_mean() {
    let summary = with_ledgers(|round| 10 + u64::from(round % 2));
    let of = |metric: &str, limit: &str| judged(metric, limit, &summary, Grade::Indicative);
    assert_eq!(of("memory.rss", "11MB").verdict, Verdict::Met);
    assert_eq!(of("memory.rss", "10500KB").verdict, Verdict::Inconclusive);
    let missed = of("memory.rss", "10MB");
    assert_eq!(
        (missed.verdict, missed.decisive, missed.n),
        (Verdict::Missed, true, 40)
    );
    assert_eq!(missed.measured, Some(10_500_000.0));
    assert_eq!(of("memory.pss", "2MB").verdict, Verdict::Met);
    let none = judged("memory.rss", "9MB", &Summary::default(), Grade::Publishable);
    assert_eq!(none.verdict, Verdict::Inconclusive);
}

#[test]
fn cold_starts_and_comparison_rounds_are_gated_apart_from_the_clones() {
    let summary = Summary {
        cold: attempts(Subject::Clone, 10, |_, _| Some(100)),
        beside: attempts(Subject::Beside, 10, |_, _| Some(20)),
        ..clones(|_, _| Some(3))
    };
    let measured = |metric| judged(metric, "60ms", &summary, Grade::Publishable);
    assert_eq!(measured("cold.first_exec.p95").verdict, Verdict::Missed);
    assert_eq!(measured("beside.first_exec.p95").measured, Some(20.0));
    assert_eq!(measured("first_exec.p95").measured, Some(3.0));
    let none = judged(
        "cold.first_exec.p95",
        "60ms",
        &clones(|_, _| Some(3)),
        Grade::Publishable,
    );
    assert_eq!(none.verdict, Verdict::Inconclusive);
}

#[test]
fn cpu_time_per_start_is_judged_by_its_interval_over_rounds() {
    let mut summary = of_scenario(clones(|_, _| Some(10)), "[target]\nkind='e2b'");
    // 10 starts a round that take 17 or 18 ms of CPU time each.
    let spent = |round: u32| crate::event::Spent {
        round,
        subject: Subject::Clone,
        from_ns: 0,
        until_ns: 1,
        cpu_ns: Some(u64::from(170 + 10 * (round % 2)) * 1_000_000),
        server_cpu_ns: None,
        warm: None,
        stock_after: None,
        memory: None,
    };
    summary.spent = (0..20).map(spent).collect();
    let of = |limit, grade| judged("cpu_per_start", limit, &summary, grade);
    assert_eq!(of("18ms", Grade::Indicative).verdict, Verdict::Met);
    assert_eq!(
        of("17500us", Grade::Indicative).verdict,
        Verdict::Inconclusive
    );
    let missed = of("17ms", Grade::Indicative);
    assert_eq!((missed.verdict, missed.decisive), (Verdict::Missed, false));
    assert!(of("17ms", Grade::Publishable).decisive);
}

#[test]
fn a_hit_rate_has_a_lower_limit() {
    let mut summary = clones(|_, _| Some(10));
    for (number, clone) in summary.clones.iter_mut().enumerate() {
        clone.start = Some(if number % 50 == 0 {
            StartKind::Restored
        } else {
            StartKind::Warm
        });
    }
    let of = |limit| judged("hit_rate", limit, &summary, Grade::Unfit);
    assert_eq!(
        (of("98%").verdict, of("98.5%").verdict),
        (Verdict::Met, Verdict::Missed)
    );
    assert_eq!(
        (of("99%").measured, of("99%").unit.as_str()),
        (Some(98.0), "%")
    );
    let unknown = judged(
        "hit_rate",
        "1%",
        &clones(|_, _| Some(1)),
        Grade::Publishable,
    );
    assert_eq!(unknown.verdict, Verdict::Inconclusive);
}

#[test]
fn the_largest_level_and_the_largest_sustained_rate_have_lower_limits() {
    let mut summary = of_scenario(clones(|_, _| Some(10)), "[hold]\nuntil='end'");
    for round in 0..20 {
        summary.rounds.insert(
            round,
            RoundTimes {
                base_ns: 0,
                end_ns: Some(1),
            },
        );
        summary.alive_before.insert(round, round * 10);
    }
    let alive = |limit, summary: &Summary| judged("density.alive", limit, summary, Grade::Unfit);
    assert_eq!(alive("200", &summary).verdict, Verdict::Met);
    assert_eq!(alive("201", &summary).verdict, Verdict::Missed);
    let failed = clones(|round, _| (round < 3).then_some(10));
    summary.clones = failed.clones;
    assert_eq!(alive("30", &summary).verdict, Verdict::Met);
    assert_eq!(alive("31", &summary).measured, Some(30.0));
    let none = judged(
        "density.alive",
        "1",
        &Summary::default(),
        Grade::Publishable,
    );
    assert_eq!(none.verdict, Verdict::Inconclusive);
    let one_rate = judged("sustained_per_s", "1/s", &summary, Grade::Publishable);
    assert_eq!(one_rate.verdict, Verdict::Inconclusive);
    // One rate, none of whose starts came from a warm slot.
    summary.rates = (0..20).map(|round| (round, 5.0)).collect();
    let missed = judged("sustained_per_s", "1/s", &summary, Grade::Publishable);
    assert_eq!((missed.verdict, missed.measured), (Verdict::Missed, None));
    assert!(
        missed.reason.contains("5 per second was not sustained"),
        "{}",
        missed.reason
    );
}

#[test]
fn a_limit_of_one_host_class_counts_only_there_and_is_derived_with_the_spread_between_runs() {
    const CLASS: &str = "Some CPU, 2 cores, Linux 6.1";
    let text = format!(
        "[[gates]]\nname='g'\nmetric='first_exec.p50'\nlimit='20ms'\naccepted='run'\nhost='{CLASS}'"
    );
    let gates = scenario::parse("t", &text).unwrap().gates;
    let of = |summary: &Summary, class| judge(&gates, summary, Grade::Publishable, class).remove(0);
    let slow = clones(|_, _| Some(30));
    assert_eq!(of(&slow, Some(CLASS)).verdict, Verdict::Missed);
    for other in [None, Some("Some CPU, 4 cores, Linux 6.1")] {
        let found = of(&slow, other);
        assert_eq!(
            (found.verdict, found.measured),
            (Verdict::OtherHost, Some(30.0))
        );
        assert!(found.reason.contains(CLASS), "{}", found.reason);
    }
    // Without any spread within the run, 1.96 times the root of two times 5 % remain.
    let limit = derived::limit(&gates[0], &slow);
    assert_eq!(limit, Some(Limit::Nanoseconds(34_460_000)));
}
