//! Tests the judge and the shrinking with a stand-in for a server that can have one of several faults.

mod every_order;
mod standin;

use std::time::{Duration, Instant};

use super::{
    judge::{Finding, Kind, judge},
    plan::{Action, AtDeadline, Handle, Kills, Op, Place, Selection, Step, episode, numbers},
    play::{Birth, Call, History, Origin, play},
    shrink::shrink,
    site::{Miss, Reply, Seen},
};
use standin::{Fault, StandIn};

/// Number of episodes in which a fault must be found.
const EPISODES: u64 = 30;

/// An episode without the steps that wait for a deadline.
fn quick(number: u64) -> Vec<Step> {
    let mut steps = episode(7, number, Kills::ServerAndVmms);
    steps.retain(|step| !matches!(step.op, Op::On(_, Action::Expire)));
    steps
}

fn findings(fault: Option<Fault>, steps: &[Step]) -> Vec<Finding> {
    let verdict = judge(&play(&StandIn::new(fault), steps));
    assert_eq!(verdict.not_judged, 0);
    verdict.findings
}

/// An episode whose steps one client performs in order, so that each play has the same responses. With several
/// clients, it depends on chance whether a shorter list of steps shows a fault.
fn in_order(number: u64) -> Vec<Step> {
    let mut steps = quick(number);
    steps.iter_mut().for_each(|step| step.client = 0);
    steps
}

/// Plays episodes until one has a finding of this kind, and shrinks it.
fn found(fault: Fault, kind: Kind) -> (Vec<Step>, String) {
    let fails = |steps: &[Step]| {
        let findings = findings(Some(fault), steps);
        findings.into_iter().find(|finding| finding.kind == kind)
    };
    let steps = (0..EPISODES)
        .map(in_order)
        .find(|steps| fails(steps).is_some());
    let steps = steps.unwrap_or_else(|| panic!("{fault:?} was not found"));
    let deadline = Instant::now() + Duration::from_secs(60);
    let shortest = shrink(steps, deadline, |steps| fails(steps).is_some());
    let finding = fails(&shortest).expect("the shortened plan has no finding");
    (shortest, finding.text)
}

fn actions(steps: &[Step]) -> String {
    let lines = steps.iter().map(|step| {
        let line = step.to_string();
        line.split_once(": ")
            .map_or(String::new(), |(_, what)| what.to_owned())
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn a_server_without_a_fault_has_no_findings() {
    for number in 0..EPISODES {
        assert_eq!(findings(None, &quick(number)), []);
    }
}

#[test]
fn a_deadline_that_is_kept_is_no_finding_and_one_that_comes_early_or_never_is() {
    let steps = [
        create(0, 0),
        step(1, Op::On(Handle(0), Action::Expire)),
        step(2, Op::List),
    ];
    assert_eq!(findings(None, &steps), []);
    let early = findings(Some(Fault::EarlyDeadline), &steps);
    assert_eq!(
        early.first().map(|finding| finding.kind),
        Some(Kind::Contradiction)
    );
}

#[test]
fn a_lost_value_is_found_and_shrunk() {
    let (steps, text) = found(Fault::LostValue, Kind::Contradiction);
    assert!(text.contains("read the value"), "{text}");
    // The values are read at the end of every episode, so no read is needed.
    let actions = actions(&steps);
    assert!(actions.contains("write"), "{actions}");
    assert!(steps.len() <= 3, "{actions}");
}

#[test]
fn a_resurrected_sandbox_is_found_and_shrunk() {
    let (steps, text) = found(Fault::ResurrectedSandbox, Kind::Contradiction);
    assert!(text.contains("State(Running)"), "{text}");
    let actions = actions(&steps);
    assert!(actions.contains("SIGKILL of the server"), "{actions}");
    assert!(steps.len() <= 4, "{actions}");
}

#[test]
fn a_stale_fork_is_found_and_shrunk() {
    let (steps, text) = found(Fault::StaleFork, Kind::Contradiction);
    assert!(text.contains("made from sandbox"), "{text}");
    let actions = actions(&steps);
    assert!(
        actions.contains("write") && actions.contains("fork"),
        "{actions}"
    );
    assert!(steps.len() <= 4, "{actions}");
}

#[test]
fn a_leaked_directory_is_found_and_shrunk() {
    let (steps, text) = found(Fault::LeakedDirectory, Kind::Leak);
    assert!(text.contains("is left"), "{text}");
    assert!(steps.len() <= 4, "{}", actions(&steps));
}

#[test]
fn a_request_that_fails_without_a_cause_is_found_and_shrunk() {
    let (steps, text) = found(Fault::FailedRequest, Kind::Failure);
    assert!(text.contains("seeded"), "{text}");
    assert!(steps.len() <= 3, "{}", actions(&steps));
}

#[test]
fn a_template_that_a_client_can_delete_is_found() {
    let (_, text) = found(Fault::DeletedTemplate, Kind::Leak);
    assert!(text.contains("was deleted"), "{text}");
}

#[test]
fn a_sandbox_that_no_answer_has_named_is_found() {
    let (_, text) = found(Fault::ExtraSandbox, Kind::Unknown);
    assert!(text.contains("no answer has named"), "{text}");
}

fn step(number: usize, op: Op) -> Step {
    let client = 0;
    Step { number, client, op }
}

fn create(number: usize, to: usize) -> Step {
    let (to, at_deadline) = (Handle(to), AtDeadline::End);
    let op = Op::Create {
        to,
        from: None,
        at_deadline,
    };
    step(number, op)
}

/// A history of one sandbox: each call with the times of its request and its response.
fn history(calls: &[(Action, u64, u64, Result<Reply, Miss>)]) -> History {
    let call = |(action, invoked_ns, returned_ns, outcome): &(_, _, _, Result<Reply, Miss>)| Call {
        step: None,
        client: 0,
        on: Handle(0),
        action: *action,
        invoked_ns: *invoked_ns,
        returned_ns: *returned_ns,
        outcome: outcome.clone(),
    };
    History {
        calls: calls.iter().map(call).collect(),
        births: vec![Birth {
            step: 0,
            to: Handle(0),
            from: Origin::Template,
            at_deadline: AtDeadline::End,
            invoked_ns: 0,
            returned_ns: 1,
            outcome: Ok("id".to_owned()),
        }],
        ..History::default()
    }
}

fn kinds(history: &History) -> Vec<Kind> {
    let findings = judge(history).findings.into_iter();
    findings.map(|finding| finding.kind).collect()
}

const WRITE: Action = Action::Write(Place::Disk, 5);
const READ: Action = Action::Read(Place::Disk);

fn lost() -> Result<Reply, Miss> {
    Err(Miss::Failed("reset".to_owned()))
}

#[test]
fn overlapping_actions_have_any_order_and_others_have_theirs() {
    for (value, begun, expected) in [
        (0, 15, vec![]),
        (5, 15, vec![]),
        (0, 25, vec![Kind::Contradiction]),
        (5, 25, vec![]),
    ] {
        let read = Ok(Reply::Value(value));
        let history = history(&[(WRITE, 10, 20, Ok(Reply::Done)), (READ, begun, 30, read)]);
        assert_eq!(kinds(&history), expected, "{value} {begun}");
    }
}

#[test]
fn a_failed_write_may_have_happened_at_any_time_or_never_but_not_twice() {
    let read = |value, at| (READ, at, at + 1, Ok(Reply::Value(value)));
    for (values, expected) in [
        ([0, 0], vec![]),
        ([0, 5], vec![]),
        ([5, 5], vec![]),
        ([5, 0], vec![Kind::Contradiction]),
    ] {
        let mut history = history(&[
            (WRITE, 10, 20, lost()),
            read(values[0], 30),
            read(values[1], 40),
        ]);
        history.outages.push((15, 25));
        assert_eq!(kinds(&history), expected, "{values:?}");
    }
}

#[test]
fn many_failed_actions_do_not_hide_a_wrong_value() {
    let writes = (1..=30).map(|value| (Action::Write(Place::Disk, value), 10, 20, lost()));
    let pauses = (0..10).map(|_| (Action::Pause(super::plan::Keep::All), 10, 20, lost()));
    for (value, expected) in [(7, vec![]), (31, vec![Kind::Contradiction])] {
        let read = (READ, 30, 31, Ok(Reply::Value(value)));
        let calls: Vec<_> = writes.clone().chain(pauses.clone()).chain([read]).collect();
        let mut history = history(&calls);
        history.outages.push((15, 25));
        assert_eq!(judge(&history).not_judged, 0);
        assert_eq!(kinds(&history), expected, "{value}");
    }
}

#[test]
fn a_write_that_is_not_found_during_a_pause_may_happen_after_the_resume() {
    let pause = Action::Pause(super::plan::Keep::All);
    for (value, begun, expected) in [
        (5, 15, vec![]),
        (0, 15, vec![]),
        (5, 31, vec![Kind::Contradiction]),
    ] {
        let history = history(&[
            (pause, 20, 30, Ok(Reply::Done)),
            (WRITE, begun, 35, Ok(Reply::NotFound)),
            (Action::Connect, 40, 50, Ok(Reply::Resumed)),
            (READ, 60, 61, Ok(Reply::Value(value))),
        ]);
        assert_eq!(kinds(&history), expected, "{value} {begun}");
    }
}

#[test]
fn a_write_that_is_not_found_during_a_kill_may_be_in_a_fork() {
    let fork = (Action::Fork(Handle(1)), 16, 40, Ok(Reply::Done));
    for (value, written, killed, expected) in [
        (5, 10, 15, false),
        (0, 10, 15, false),
        (6, 10, 15, true),
        // The write was refused before the kill began.
        (5, 10, 25, true),
        // A request after the kill finds nothing and leaves nothing behind.
        (5, 31, 15, true),
    ] {
        let mut history = history(&[
            (WRITE, written, written + 10, Ok(Reply::NotFound)),
            (Action::Kill, killed, 30, Ok(Reply::Done)),
            fork.clone(),
            (READ, 50, 51, Ok(Reply::Value(value))),
        ]);
        history.calls[3].on = Handle(1);
        history.births.push(Birth {
            to: Handle(1),
            from: Origin::Fork(Handle(0)),
            invoked_ns: 16,
            returned_ns: 40,
            ..history.births[0].clone()
        });
        let found = kinds(&history);
        let is_found = found.contains(&Kind::Contradiction);
        assert_eq!(is_found, expected, "{value} {written} {killed}: {found:?}");
    }
}

#[test]
fn a_kill_that_the_end_of_the_server_undoes_may_have_been_seen() {
    let pause = Action::Pause(super::plan::Keep::All);
    for (asked, killed, expected) in [
        (
            (Action::Look, Ok(Reply::State(Seen::Absent))),
            lost(),
            vec![],
        ),
        ((pause, Ok(Reply::NotFound)), lost(), vec![]),
        (
            (pause, Ok(Reply::NotFound)),
            Ok(Reply::Done),
            vec![Kind::Contradiction],
        ),
    ] {
        let (action, answer) = asked;
        let mut history = history(&[
            (Action::Kill, 20, 30, killed),
            (action, 15, 25, answer),
            (Action::Resume, 40, 50, Ok(Reply::Conflict)),
        ]);
        history.outages.push((26, 39));
        assert_eq!(kinds(&history), expected, "{action}");
    }
    // The kill does not explain this if the next server refused it, or if no server ended.
    for (outage, end, looked) in [(Some((26, 30)), 45, 32), (None, 30, 22)] {
        let mut history = history(&[
            (Action::Kill, 20, end, lost()),
            (Action::KillVmm, 19, 21, lost()),
            (Action::Look, looked, 35, Ok(Reply::State(Seen::Absent))),
            (Action::Resume, 40, 50, Ok(Reply::Conflict)),
        ]);
        history.outages.extend(outage);
        assert!(kinds(&history).contains(&Kind::Contradiction), "{outage:?}");
    }
    // The kill explains nothing that was observed before it.
    let mut history = history(&[
        (Action::Look, 10, 15, Ok(Reply::State(Seen::Absent))),
        (Action::Kill, 20, 30, lost()),
        (Action::Resume, 40, 50, Ok(Reply::Conflict)),
    ]);
    history.outages.push((26, 39));
    assert_eq!(kinds(&history), [Kind::Contradiction]);
}

#[test]
fn only_a_kill_or_a_change_explains_a_failure() {
    let failed = (READ, 10, 20, lost());
    assert_eq!(
        kinds(&history(std::slice::from_ref(&failed))),
        [Kind::Failure]
    );
    let mut killed = history(std::slice::from_ref(&failed));
    killed.outages.push((15, 25));
    assert_eq!(kinds(&killed), []);
    for change in [
        Action::Pause(super::plan::Keep::All),
        Action::Kill,
        Action::KillVmm,
    ] {
        let changed = history(&[failed.clone(), (change, 15, 30, Ok(Reply::Done))]);
        assert_eq!(kinds(&changed), [], "{change}");
        let before = history(&[(READ, 10, 14, lost()), (change, 15, 30, Ok(Reply::Done))]);
        assert_eq!(kinds(&before), [Kind::Failure], "{change}");
    }
    // A request to the control plane waits for a pause instead of failing.
    let pause = Action::Pause(super::plan::Keep::All);
    let waits = history(&[
        (Action::Look, 10, 20, lost()),
        (pause, 15, 30, Ok(Reply::Done)),
    ]);
    assert_eq!(kinds(&waits), [Kind::Failure]);
}

#[test]
fn a_killed_sandbox_stays_ended() {
    let looked = |seen| (Action::Look, 30, 31, Ok(Reply::State(seen)));
    let killed = (Action::Kill, 10, 20, Ok(Reply::Done));
    assert_eq!(kinds(&history(&[killed.clone(), looked(Seen::Absent)])), []);
    let back = history(&[killed, looked(Seen::Paused)]);
    assert_eq!(kinds(&back), [Kind::Contradiction]);
}

#[test]
fn a_plan_depends_on_its_seed_only_and_can_be_named_in_parts() {
    let steps = episode(3, 5, Kills::ServerAndVmms);
    assert_eq!(steps, episode(3, 5, Kills::ServerAndVmms));
    assert_ne!(steps, episode(3, 6, Kills::ServerAndVmms));
    let part: Vec<Step> = steps
        .iter()
        .copied()
        .filter(|step| step.number % 3 != 0)
        .collect();
    let selection: Selection = numbers(&part).parse().unwrap();
    assert_eq!(selection.of(steps), part);
    assert!("1-x".parse::<Selection>().is_err());
    let kills = |op: Op| matches!(op, Op::KillServer { .. } | Op::On(_, Action::KillVmm));
    let harmless = (0..50).flat_map(|number| episode(3, number, Kills::Nothing));
    assert!(harmless.into_iter().all(|step| !kills(step.op)));
}

#[test]
fn shrinking_keeps_what_is_needed_and_what_that_needs() {
    let is_cause = |step: &Step| matches!(step.op, Op::On(_, Action::Fork(_)));
    let plans = (0..).map(|number| episode(3, number, Kills::ServerAndVmms));
    let mut with_forks = plans.filter(|steps| steps.iter().any(is_cause));
    let steps = with_forks.next().unwrap();
    let last = steps.iter().rfind(|step| is_cause(step)).unwrap().number;
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut tries = 0;
    let shortest = shrink(steps, deadline, |steps| {
        tries += 1;
        steps.iter().any(|step| step.number == last)
    });
    let Op::On(of, _) = shortest.last().unwrap().op else {
        panic!("{shortest:?}");
    };
    let makes_it = |step: &Step| match step.op {
        Op::Create { to, .. } | Op::On(_, Action::Fork(to)) => to == of,
        _ => false,
    };
    assert!(shortest.iter().any(makes_it), "{}", actions(&shortest));
    assert!(
        shortest.len() <= 4 && tries < 300,
        "{} {tries}",
        actions(&shortest)
    );
}
