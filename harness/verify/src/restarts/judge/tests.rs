//! Recorded events of correct and incorrect servers.

use std::{path::PathBuf, time::Duration};

use super::*;
use crate::{restarts::event::Fate, setup::Setup};
use testbed::exit::End;

const MS: u64 = 1_000_000;

fn spec() -> RestartSpec {
    RestartSpec {
        setup: Setup {
            artifacts: PathBuf::new(),
            vmm: None,
            api: None,
            run_root: PathBuf::new(),
            template: "base".to_owned(),
        },
        sandboxes: 1,
        unplanned: 1,
        planned: 1,
        bare: 0,
        builds: None,
        seed: 1,
        limits: Limits::default(),
        log: None,
    }
}

/// A restart from 1000 ms to 2000 ms, with the first response at 1300 ms.
fn restart(kind: Kind) -> Restart {
    Restart {
        kind,
        build: 0,
        begun_ns: 1000 * MS,
        exec_ns: 1010 * MS,
        connected_ns: Some(1020 * MS),
        answered_ns: Some(1300 * MS),
        settled_ns: 2000 * MS,
        starts: 1,
        reached: vec![Reached::At(1400 * MS)],
        servers: 1,
        warm: [Some(4), Some(3)],
        faults: Vec::new(),
    }
}

fn observed(restarts: Vec<Restart>) -> Observed {
    Observed {
        ended: Ended::Complete,
        seconds: 3.0,
        restarts,
        bare: None,
        existing: Some(Existing {
            running: ["a".to_owned()].into(),
            ..Existing::default()
        }),
        faults: Vec::new(),
    }
}

fn event(work: Work, from_ms: u64, until_ms: u64, seen: Seen) -> Record {
    Record::Event(Event {
        work,
        began_ns: from_ms * MS,
        ended_ns: until_ms * MS,
        seen,
    })
}

/// Every client succeeds at 500 ms, look-ups also every 10 ms except from `down.0` to `down.1`.
fn load(down: (u64, u64)) -> Vec<Record> {
    let mut records = vec![Record::Fate {
        id: "a".to_owned(),
        fate: Fate::Running,
    }];
    records.extend(Work::ALL.map(|work| event(work, 490, 500, Seen::Done)));
    let up = (51..300)
        .map(|n| n * 10)
        .filter(|at| *at <= down.0 || *at >= down.1);
    records.extend(up.map(|at| event(Work::LookUp, at - 5, at, Seen::Done)));
    records
}

fn findings(kind: Kind, extra: Vec<Record>) -> Vec<String> {
    let mut records = load((1000, 1300));
    records.extend(extra);
    found(&judge(&spec(), &observed(vec![restart(kind)]), &records))
}

/// The findings, each as `NAME (NUMBER): EXAMPLES`.
fn found(report: &Report<RestartFigures>) -> Vec<String> {
    let failed = report
        .cases
        .iter()
        .filter(|case| case.verdict == Verdict::Fail);
    let text = |case: &Case| {
        let problem = case.problems[0].strip_prefix("n = ").unwrap();
        match problem.split_once(": ") {
            Some((n, examples)) => format!("{} ({n}): {examples}", case.name),
            None => format!("{} ({problem})", case.name),
        }
    };
    failed.map(text).collect()
}

fn failed(cause: Cause) -> Seen {
    Seen::Failed(cause, "why".to_owned())
}

#[test]
fn a_server_that_loses_nothing_passes() {
    for kind in [Kind::Unplanned, Kind::Planned] {
        assert_eq!(findings(kind, Vec::new()), Vec::<String>::new());
    }
    let proof = judge(
        &spec(),
        &observed(vec![restart(Kind::Unplanned)]),
        &load((1000, 1300)),
    );
    assert_eq!(proof.end(), End::Pass);
    let numbers = &proof.figures.restarts[0];
    assert_eq!(numbers.connected_ms, Some(10.0));
    assert_eq!(numbers.answered_ms, Some(290.0));
    assert_eq!(numbers.reached_ms, [390.0]);
    assert_eq!(numbers.gap_ms, Some(300.0));
    assert_eq!(numbers.slowest_ms, Some(5.0));
}

#[test]
fn a_refused_connection_is_found_unless_the_server_was_killed() {
    let refused = |at| vec![event(Work::LookUp, at, at, failed(Cause::Refused))];
    assert_eq!(
        findings(Kind::Unplanned, refused(1200)),
        Vec::<String>::new()
    );
    assert_eq!(
        findings(Kind::Planned, refused(1200)),
        ["planned restart: look_up failed (refused) (1): restart 0: why"]
    );
    // 200 ms of refusals without a restart.
    let many = (0..20).flat_map(|n| refused(2500 + n * 10)).collect();
    let found = findings(Kind::Unplanned, many);
    assert_eq!(
        found,
        ["between restarts: look_up failed (refused) (20): why"]
    );
}

#[test]
fn a_closed_stream_is_found_unless_the_server_was_killed() {
    let cut = |at| {
        vec![event(
            Work::Pty,
            at,
            at,
            Seen::Cut(Cause::Reset, "end".to_owned()),
        )]
    };
    assert_eq!(findings(Kind::Unplanned, cut(1001)), Vec::<String>::new());
    assert_eq!(
        findings(Kind::Planned, cut(1001)),
        ["planned restart: pty was cut (reset) (1): restart 0: end"]
    );
    assert_eq!(
        findings(Kind::Unplanned, cut(2600)),
        ["between restarts: pty was cut (reset) (1): end"]
    );
    // A stream that ends as if complete hides the cut from its client.
    let silent = vec![event(
        Work::Counter,
        1001,
        1001,
        Seen::Wrong("ended at 7".to_owned()),
    )];
    assert_eq!(
        findings(Kind::Unplanned, silent),
        ["unplanned restart: counter is wrong (1): restart 0: ended at 7"]
    );
}

#[test]
fn a_dropped_sandbox_is_found_by_its_clients_by_the_driver_and_at_the_end() {
    let missing = vec![event(Work::Command, 1500, 1510, failed(Cause::NotFound))];
    assert_eq!(
        findings(Kind::Unplanned, missing),
        ["unplanned restart: command failed (not_found) (1): restart 0: why"]
    );
    let mut lost = restart(Kind::Unplanned);
    lost.reached = vec![Reached::Lost("a contains 6 instead of 7..=7".to_owned())];
    let proof = judge(&spec(), &observed(vec![lost]), &load((1000, 1300)));
    assert_eq!(
        found(&proof),
        [
            "unplanned restart: a sandbox or its memory is lost (1): restart 0: a contains 6 instead of 7..=7"
        ]
    );
    assert_eq!(proof.figures.restarts[0].lost, 1);
    let mut seen = observed(vec![restart(Kind::Unplanned)]);
    seen.existing = Some(Existing::default());
    let proof = judge(&spec(), &seen, &load((1000, 1300)));
    assert_eq!(
        found(&proof),
        ["answers and state disagree (1): sandbox a was running, and does not run"]
    );
    assert_eq!(proof.end(), End::GateFailed);
}

#[test]
fn limits_apply_to_what_was_measured_and_to_what_never_came() {
    let mut spec = spec();
    spec.limits = Limits {
        answer: Some(Duration::from_millis(300)),
        reach: Some(Duration::from_millis(390)),
        gap: Some(Duration::from_millis(299)),
    };
    let mut silent = restart(Kind::Unplanned);
    silent.answered_ns = None;
    let seen = observed(vec![restart(Kind::Unplanned)]);
    assert_eq!(
        found(&judge(&spec, &seen, &load((1000, 1300)))),
        [
            "unplanned restart: an answer to new connections took longer than 299ms (1): restart 0: 300 ms"
        ]
    );
    let found = found(&judge(&spec, &observed(vec![silent]), &load((1000, 1300))));
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(
        found.contains(&"unplanned restart: the first answer never came (1): restart 0".to_owned())
    );
}

#[test]
fn a_failed_start_and_a_client_that_never_succeeded_are_findings() {
    let mut seen = observed(vec![restart(Kind::Planned)]);
    seen.restarts[0].faults.push("exited".to_owned());
    seen.bare = Some(Bare {
        starts: 2,
        killed_early: 1,
        failed: vec!["Address already in use".to_owned()],
    });
    seen.faults
        .push("the server left process 7 behind".to_owned());
    let mut records = load((1000, 1000));
    records.retain(|record| !matches!(record, Record::Event(event) if event.work == Work::Upload));
    assert_eq!(
        found(&judge(&spec(), &seen, &records)),
        [
            "a start without load failed (1): Address already in use",
            "planned restart: the start failed (1): restart 0: exited",
            "the server left process 7 behind (1)",
            "upload never succeeded (1)",
        ]
    );
}

#[test]
fn a_run_without_restarts_proves_nothing_and_an_interrupted_one_says_so() {
    let mut seen = observed(Vec::new());
    assert_eq!(
        judge(&spec(), &seen, &load((0, 0))).end(),
        End::Inconclusive
    );
    seen.ended = Ended::Interrupted;
    assert_eq!(judge(&spec(), &seen, &[]).end(), End::Interrupted);
}

#[test]
fn reports_contain_distributions_failures_and_findings() {
    let mut records = load((1000, 1300));
    records.push(event(Work::List, 1200, 1210, failed(Cause::Reset)));
    records.push(event(
        Work::Pty,
        1700,
        1700,
        Seen::Cut(Cause::Reset, "a <stream>".to_owned()),
    ));
    let mut planned = restart(Kind::Planned);
    planned.connected_ns = None;
    planned.begun_ns = 1600 * MS;
    planned.exec_ns = 1600 * MS;
    planned.answered_ns = Some(1700 * MS);
    planned.reached = vec![Reached::At(1710 * MS)];
    let mut seen = observed(vec![restart(Kind::Unplanned), planned]);
    seen.restarts[0].settled_ns = 1500 * MS;
    let proof = judge(&spec(), &seen, &records);
    insta::assert_snapshot!("terminal", proof.terminal());
    insta::assert_snapshot!("markdown", proof.markdown());
    insta::assert_snapshot!("junit", proof.junit());
    insta::assert_snapshot!("plot", proof.figures.plot());
    let read: Report<RestartFigures> = serde_json::from_str(&proof.json()).unwrap();
    assert_eq!(read, proof);
}
