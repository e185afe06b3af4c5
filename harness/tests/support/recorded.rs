//! Events of a synthetic run for snapshot tests and benchmarks. The events are always the same.

use std::collections::BTreeMap;

use harness::{
    event::{
        Attempt, CloneLedger, EVENTS_FORMAT, EndReason, Failure, FailureCause, MemoryPoint,
        NoiseSample, RunEvent, RunStarted,
    },
    plan::{Row, Subject},
    scenario,
};
use model::{StartPhase, Timeline};
use stats::random::SplitMix64;

const SCENARIO: &str = r#"
name = "recorded"
description = "A synthetic run."
[arrival]
kind = "burst"
starts = 20
[memory]
measure = true
[[gates]]
name = "every clone answers"
metric = "failures"
limit = "0"
[[gates]]
name = "first exec P95"
metric = "first_exec.p95"
limit = "40ms"
[[gates]]
name = "first exec P95, over host processes"
metric = "first_exec.p95.ratio"
limit = "20"
[[gates]]
name = "first exec P99"
metric = "first_exec.p99"
limit = "40ms"
[[gates]]
name = "memory of one more clone"
metric = "memory.slope"
limit = "5MB"
"#;

/// `rounds` rounds of 20 clones, and as many of the baseline. The third clone in the second round of clones fails.
pub(crate) fn events(rounds: u32) -> Vec<RunEvent> {
    let mut random = SplitMix64::new(42);
    let mut events = vec![RunEvent::RunStarted(Box::new(RunStarted {
        format: EVENTS_FORMAT,
        scenario: scenario::parse("recorded", SCENARIO).expect("the text above is a scenario"),
        reproduce: "cube-bench run recorded.toml".into(),
        started_unix_ms: 1_700_000_000_000,
        at_ns: 0,
    }))];
    for index in 0..rounds {
        let base_ns = 1_000_000_000 * u64::from(index + 1);
        events.push(memory(index, 0));
        round(&mut events, index * 2, Subject::Clone, base_ns, &mut random);
        events.push(memory(index, 20));
        events.extend((0..20).map(|arrival| ledger(index * 2, arrival)));
        let later_ns = base_ns + 500_000_000;
        round(
            &mut events,
            index * 2 + 1,
            Subject::HostProcess,
            later_ns,
            &mut random,
        );
        events.push(RunEvent::Noise(NoiseSample {
            at_ns: later_ns,
            steal_share: Some(0.002),
            busy_share: Some(0.7),
            load_1min: Some(0.3),
            available_bytes: Some(20 << 30),
        }));
    }
    events.push(RunEvent::RunEnded {
        why: EndReason::Complete,
        at_ns: 1_000_000_000 * u64::from(rounds + 1),
    });
    events
}

fn round(
    events: &mut Vec<RunEvent>,
    round: u32,
    subject: Subject,
    base_ns: u64,
    random: &mut SplitMix64,
) {
    let row = Row::Measured;
    events.push(RunEvent::RoundStarted {
        round,
        subject,
        row,
        base_ns,
        rate_per_s: None,
    });
    for arrival in 0..20 {
        let jitter_ns = random.next_u64() % 5_000_000;
        let fails = (round, arrival) == (2, 2);
        let mut timeline = Timeline::default();
        let ladder: &[(StartPhase, u64)] = match subject {
            Subject::Clone | Subject::Beside | Subject::Peer(_) => &[
                (StartPhase::ProcessStarted, 1_000_000),
                (StartPhase::MemoryMapped, 2_000_000),
                (StartPhase::DevicesReady, 2_500_000),
                (StartPhase::Resumed, 3_000_000),
                (StartPhase::AgentReady, 9_000_000),
                (StartPhase::Replied, 10_000_000),
                (StartPhase::FirstExec, 25_000_000),
            ],
            Subject::HostProcess | Subject::Null => &[(StartPhase::FirstExec, 2_000_000)],
        };
        for (phase, ns) in ladder
            .iter()
            .filter(|(p, _)| !fails || *p < StartPhase::FirstExec)
        {
            let spread = u64::from(arrival) * ns / 20;
            timeline.stamp(*phase, base_ns + ns + spread + jitter_ns * ns / 25_000_000);
        }
        events.push(RunEvent::Attempt(Attempt {
            round,
            subject,
            row,
            arrival,
            intended_ns: base_ns,
            actual_ns: base_ns + 50_000,
            work: None,
            template: None,
            timeline,
            start: None,
            faults: None,
            turns: Vec::new(),
            failure: fails.then(|| Failure {
                cause: FailureCause::Connect,
                message: "connect: the agent cannot be reached <here>".into(),
            }),
            ended_ns: base_ns + 60_000_000,
        }));
    }
    let at_ns = base_ns + 60_000_000;
    events.push(RunEvent::RoundEnded { round, at_ns });
}

fn memory(group: u32, alive: u32) -> RunEvent {
    let n = u64::from(alive);
    let wobble = u64::from(group % 3) * 100_000;
    let meminfo = BTreeMap::from([
        (
            "MemAvailable".to_owned(),
            20_000_000_000 - n * 2_600_000 - wobble * n / 20,
        ),
        ("PageTables".to_owned(), 3_000_000 + n * 140_000),
        ("SecPageTables".to_owned(), n * 270_000),
        ("SUnreclaim".to_owned(), 100_000_000 + n * 90_000),
        ("Percpu".to_owned(), 700_000),
        ("KernelStack".to_owned(), 1_400_000 + n * 48_000),
        ("VmallocUsed".to_owned(), 14_000_000 + n * 110_000),
        ("Shmem".to_owned(), 9_000_000 + n * 4096),
    ]);
    RunEvent::Memory(MemoryPoint {
        group,
        alive,
        at_ns: 0,
        meminfo,
        reclaim: BTreeMap::new(),
    })
}

fn ledger(round: u32, arrival: u32) -> RunEvent {
    RunEvent::Ledger(CloneLedger {
        round,
        arrival,
        guest_private_bytes: Some(1_500_000),
        vmm_private_bytes: Some(400_000),
        page_tables_bytes: Some(120_000),
        guest_shared_bytes: Some(18_000_000),
        rss_bytes: Some(21_000_000),
        pss_bytes: Some(2_600_000),
    })
}
