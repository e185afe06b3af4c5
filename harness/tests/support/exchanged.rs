//! Events of a synthetic run with exchanges. Compared with the comparison rounds, `request` takes 1.05 times as
//! long, `send` 1.5 times, and the ratios of `receive` scatter around 1.

use harness::{
    event::{
        Attempt, EVENTS_FORMAT, EndReason, Exchanged, Failure, FailureCause, RunEvent, RunStarted,
        Turn,
    },
    plan::{Row, Subject},
    scenario,
};
use model::{StartPhase, Timeline};

const SCENARIO: &str = r#"
name = "exchanged"
rounds = 12
[target]
kind = "e2b"
warm = 1
[mode]
kind = "beside"
with = "vmm-direct"
[network]
kind = "isolated"
[[turns]]
name = "request"
exchange = "echo"
count = 3
[[turns]]
name = "send"
exchange = "send"
amount = "10MB"
[[turns]]
name = "receive"
exchange = "receive"
amount = "10MB"
[baseline]
kind = "none"
[[gates]]
name = "request"
metric = "turn.1.ratio"
limit = "1.10"
[[gates]]
name = "send"
metric = "turn.2.ratio"
limit = "1.11"
[[gates]]
name = "receive"
metric = "turn.3.ratio"
limit = "1.11"
"#;

/// Alternating rounds of one clone and of one comparison clone. Each pair is slower than the pair before.
pub(crate) fn events(pairs: u32) -> Vec<RunEvent> {
    let mut events = vec![RunEvent::RunStarted(Box::new(RunStarted {
        format: EVENTS_FORMAT,
        scenario: scenario::parse("exchanged", SCENARIO).expect("the text above is a scenario"),
        reproduce: "cube-bench run exchanged.toml".into(),
        started_unix_ms: 1_700_000_000_000,
        at_ns: 0,
    }))];
    for pair in 0..pairs {
        let slow = u64::from(pair + 1) * 1000;
        // A third of the pairs has a ratio below 1, a third above 1, and a third exactly 1.
        let scattered = [8, 10, 13][usize::try_from(pair % 3).unwrap_or(0)];
        let ours = [105 * slow, 15_000 * slow, scattered * 1000 * slow];
        let beside = [100 * slow, 10_000 * slow, 10_000 * slow];
        events.push(attempt(pair * 2, Subject::Clone, ours));
        events.push(attempt(pair * 2 + 1, Subject::Beside, beside));
    }
    events.push(ended());
    events
}

/// A run with one start that failed with a breach.
pub(crate) fn breached() -> Vec<RunEvent> {
    let mut events = events(1);
    if let Some(RunEvent::Attempt(attempt)) = events.get_mut(1) {
        attempt.turns.clear();
        attempt.failure = Some(Failure {
            cause: FailureCause::Breach,
            message: "exchange: 203.0.113.20 was reached".into(),
        });
    }
    events
}

fn ended() -> RunEvent {
    RunEvent::RunEnded {
        why: EndReason::Complete,
        at_ns: 60_000_000_000,
    }
}

fn attempt(round: u32, subject: Subject, [request, send, receive]: [u64; 3]) -> RunEvent {
    let base_ns = u64::from(round) * 1_000_000_000;
    let mut timeline = Timeline::default();
    timeline.stamp(StartPhase::Confined, base_ns + 900_000);
    timeline.stamp(StartPhase::Replied, base_ns + 4_000_000);
    timeline.stamp(StartPhase::FirstNetworkByte, base_ns + 9_000_000);
    timeline.stamp(StartPhase::FirstExec, base_ns + 11_000_000);
    let turn = |times_ns: Vec<u64>, bytes| Turn {
        took_ns: 50_000_000,
        faults: None,
        exchange: Some(Exchanged {
            times_ns,
            bytes,
            ..Exchanged::default()
        }),
    };
    let moved = |ns| turn(vec![ns], 10_000_000);
    RunEvent::Attempt(Attempt {
        round,
        subject,
        row: Row::Measured,
        arrival: 0,
        intended_ns: base_ns,
        actual_ns: base_ns,
        work: None,
        template: None,
        timeline,
        start: None,
        faults: None,
        turns: vec![
            turn(vec![request / 2, request, request * 3], 0),
            moved(send),
            moved(receive),
        ],
        failure: None,
        ended_ns: base_ns + 500_000_000,
    })
}
