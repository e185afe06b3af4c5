//! Compares the judge with an exhaustive search of all orders.

use proptest::prelude::*;

use super::{
    super::{
        oracle::{State, perform},
        plan::Keep,
    },
    *,
};

type Entry = (Action, u64, u64, Result<Reply, Miss>);

/// Whether some order of these calls fits their responses. Failed calls may be omitted.
fn has_an_order(state: State, left: &[Entry]) -> bool {
    let answered = |entry: &&Entry| entry.3.is_ok();
    // A call cannot take effect after the response of a later one.
    let Some(first_answer) = left.iter().filter(answered).map(|entry| entry.2).min() else {
        return true;
    };
    left.iter()
        .enumerate()
        .any(|(at, (action, invoked, _, outcome))| {
            let (reply, after) = perform(state, *action, AtDeadline::End);
            let fits = outcome.as_ref().map_or(true, |answer| *answer == reply);
            let mut rest = left.to_vec();
            drop(rest.remove(at));
            *invoked <= first_answer && fits && has_an_order(after, &rest)
        })
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        (1..4_u32).prop_map(|value| Action::Write(Place::Disk, value)),
        Just(READ),
        Just(Action::Pause(Keep::All)),
        Just(Action::Connect),
        Just(Action::Kill),
        Just(Action::Look),
    ]
}

fn answer() -> impl Strategy<Value = Result<Reply, Miss>> {
    prop_oneof![
        Just(lost()),
        Just(Ok(Reply::Done)),
        (0..4_u32).prop_map(|value| Ok(Reply::Value(value))),
        Just(Ok(Reply::WasRunning)),
        Just(Ok(Reply::State(Seen::Running))),
        Just(Ok(Reply::State(Seen::Absent))),
    ]
}

/// Whether some state allows this response. Other responses would make most histories contradictions.
fn is_possible(action: Action, outcome: &Result<Reply, Miss>) -> bool {
    match (action, outcome) {
        (_, Err(_)) => !matches!(action, Action::Look) && action != READ,
        (Action::Write(..) | Action::Pause(_) | Action::Kill, Ok(reply)) => *reply == Reply::Done,
        (Action::Read(_), Ok(reply)) => matches!(reply, Reply::Value(_)),
        (Action::Connect, Ok(reply)) => matches!(reply, Reply::WasRunning),
        (Action::Look, Ok(reply)) => matches!(reply, Reply::State(_)),
        _ => false,
    }
}

fn entry() -> impl Strategy<Value = Entry> {
    (action(), answer(), 10..40_u64, 1..20_u64)
        .prop_filter("no state answers so", |(action, outcome, ..)| {
            is_possible(*action, outcome)
        })
        .prop_map(|(action, outcome, begun, took)| (action, begun, begun + took, outcome))
}

/// Removes calls that prove nothing: "absent" during a kill without a response.
fn that_prove(calls: &[Entry]) -> Vec<Entry> {
    let is_vain = |call: &&Entry| {
        call.3 == Ok(Reply::State(Seen::Absent))
            && calls.iter().any(|kill| {
                kill.0 == Action::Kill && kill.3.is_err() && kill.1 <= call.2 && call.1 <= kill.2
            })
    };
    calls
        .iter()
        .filter(|call| !is_vain(call))
        .cloned()
        .collect()
}

proptest! {
    #[test]
    fn the_judge_agrees_with_a_search_of_every_order(calls in prop::collection::vec(entry(), 1..7)) {
        let mut history = history(&calls);
        // Let everything be able to fail, so that contradictions are the only findings.
        history.outages.push((0, 100));
        let contradicts = kinds(&history).contains(&Kind::Contradiction);
        prop_assert_eq!(contradicts, !has_an_order(State::NEW, &that_prove(&calls)));
    }
}
