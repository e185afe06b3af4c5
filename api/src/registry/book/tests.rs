//! The book against random lives.

use proptest::prelude::*;

use super::*;
use crate::registry::note::tests::note;
use model::Bytes;
use pool::PauseMode;

fn id(n: u8) -> SandboxId {
    SandboxId::from_random([n; 19])
}

fn view(n: u8, at: UnixMs, timeout_s: u32, habits: lifecycle::Habits) -> View {
    let template = TemplateInfo {
        id: "t".into(),
        names: Vec::new(),
        memory: Bytes::mib(256),
        vcpus: 1,
        disk: Bytes::mib(512),
        created_unix_s: 0,
        is_snapshot: false,
        source: None,
        spawned: 0,
        warm: 0,
    };
    let mut note = note(at, timeout_s);
    note.at_deadline = habits.at_deadline;
    note.auto_resume = habits.auto_resume;
    View {
        id: id(n),
        note: Arc::new(note),
        template: Arc::new(template),
        rest: Rest::Running,
    }
}

fn vm() -> Vm {
    Vm {
        vsock: PathBuf::new(),
        console: PathBuf::new(),
        generation: 1,
        since: 0,
    }
}

const ENDS: lifecycle::Habits = lifecycle::Habits {
    at_deadline: None,
    auto_resume: false,
};
const PAUSES: lifecycle::Habits = lifecycle::Habits {
    at_deadline: Some(PauseMode::Memory),
    auto_resume: false,
};

#[test]
fn extending_never_shortens_and_setting_may() {
    let mut book = Book::default();
    book.insert(view(1, 0, 60, ENDS), vm());
    assert!(!book.extend(&id(1), 10, 0));
    assert_eq!(book.next_due(), Some(60_000));
    assert!(book.extend(&id(1), 60, 5_000));
    assert_eq!(book.next_due(), Some(65_000));
    book.set_end(&id(1), end_of(5_000, 5), 5);
    assert_eq!(book.next_due(), Some(10_000));
    assert_eq!(book.due(9_999), []);
    assert_eq!(book.due(10_000), [id(1)]);
}

#[test]
fn a_failed_automatic_pause_is_put_off_and_keeps_traffic_out() {
    let mut book = Book::default();
    book.insert(view(1, 0, 1, PAUSES), vm());
    assert_eq!(book.ask(&id(1), Ask::Reach, 999), Verdict::Granted);
    let pause = Verdict::Start(Change::Pause(PauseMode::Memory));
    assert_eq!(book.ask(&id(1), Ask::Expire, 1_000), pause);
    assert!(book.done(&id(1), Outcome::Failed, 1_500));
    assert_eq!(book.next_due(), Some(1_500 + RETRY_MS));
    assert_eq!(book.ask(&id(1), Ask::Reach, 1_501), Verdict::NotThere);
    book.check_invariants();
}

#[test]
fn what_is_copied_past_its_end_is_not_reached_and_is_due_afterwards() {
    let mut book = Book::default();
    book.insert(view(1, 0, 1, ENDS), vm());
    book.ask(&id(1), Ask::Snapshot, 500);
    assert_eq!(book.ask(&id(1), Ask::Reach, 900), Verdict::Granted);
    assert_eq!(book.ask(&id(1), Ask::Reach, 1_000), Verdict::NotThere);
    assert_eq!(book.due(2_000), []);
    book.done(&id(1), Outcome::Done, 2_000);
    assert_eq!(book.due(2_000), [id(1)]);
}

/// What can happen.
#[derive(Clone, Debug)]
enum Step {
    Create(u8, u32, bool, bool),
    Ask(u8, Ask),
    /// The change under way ends.
    Done(u8, Outcome),
    /// The VM ended by itself.
    Die(u8),
    Extend(u8, u32),
    Set(u8, u32),
    Pass(u64),
}

fn asks() -> impl Strategy<Value = Ask> {
    prop::sample::select(vec![
        Ask::Connect,
        Ask::Adjust,
        Ask::Pause(PauseMode::Memory),
        Ask::Pause(PauseMode::FilesystemOnly),
        Ask::Snapshot,
        Ask::Fork,
        Ask::Kill,
        Ask::Reach,
    ])
}

fn steps() -> impl Strategy<Value = Step> {
    let who = 0..4_u8;
    let outcome = prop::sample::select(vec![Outcome::Done, Outcome::Failed, Outcome::Gone]);
    prop_oneof![
        2 => (who.clone(), 0..20_u32, any::<bool>(), any::<bool>())
            .prop_map(|(w, t, p, r)| Step::Create(w, t, p, r)),
        6 => (who.clone(), asks()).prop_map(|(w, a)| Step::Ask(w, a)),
        6 => (who.clone(), outcome).prop_map(|(w, o)| Step::Done(w, o)),
        1 => who.clone().prop_map(Step::Die),
        2 => (who.clone(), 0..20_u32).prop_map(|(w, t)| Step::Extend(w, t)),
        2 => (who, 0..20_u32).prop_map(|(w, t)| Step::Set(w, t)),
        3 => (0..9_000_u64).prop_map(Step::Pass),
    ]
}

proptest! {
    /// Whatever happens in whatever order: the invariants hold, every started change can be finished, nothing
    /// lives past its deadline unseen, and at the end everything can be ended.
    #[test]
    fn random_lives(steps in prop::collection::vec(steps(), 1..120)) {
        let mut book = Book::default();
        let mut now = 0;
        for step in steps {
            match step {
                Step::Create(n, timeout_s, pauses, auto_resume) => {
                    let at_deadline = pauses.then_some(PauseMode::Memory);
                    if book.get(&id(n)).is_none() {
                        let habits = lifecycle::Habits { at_deadline, auto_resume };
                        book.insert(view(n, now, timeout_s, habits), vm());
                    }
                }
                Step::Ask(n, ask) => {
                    let before = book.get(&id(n)).map(Entry::phase);
                    let verdict = book.ask(&id(n), ask, now);
                    let after = book.get(&id(n)).map(Entry::phase);
                    match (verdict, before) {
                        (Verdict::Start(change), Some(Phase::At(from))) => {
                            prop_assert_eq!(after, Some(Phase::Changing { change, from }));
                        }
                        (Verdict::Start(_), _) => prop_assert!(false, "two changes at once"),
                        _ => prop_assert_eq!(after, before),
                    }
                    prop_assert!(before.is_some() || verdict == Verdict::NotThere);
                }
                Step::Done(n, outcome) => {
                    let before = book.get(&id(n)).map(|e| (e.phase(), e.rest()));
                    let stays = book.done(&id(n), outcome, now);
                    if let (true, Some((Phase::Changing { change: Change::Resume, .. }, _)), Outcome::Done) =
                        (stays, before, outcome)
                    {
                        book.set_end(&id(n), end_of(now, 5), 5);
                    }
                    if let (Some((Phase::Changing { .. }, from)), Outcome::Failed, true) = (before, outcome, stays) {
                        prop_assert_eq!(book.get(&id(n)).map(Entry::phase), Some(Phase::At(from)));
                    }
                }
                Step::Die(n) => drop(book.remove(&id(n))),
                Step::Extend(n, timeout_s) => {
                    let before = book.get(&id(n)).map(|e| e.note.end_at);
                    if book.ask(&id(n), Ask::Adjust, now) == Verdict::Granted {
                        book.extend(&id(n), timeout_s, now);
                        prop_assert!(book.get(&id(n)).map(|e| e.note.end_at) >= before);
                    }
                }
                Step::Set(n, timeout_s) => {
                    if book.ask(&id(n), Ask::Adjust, now) == Verdict::Granted {
                        book.set_end(&id(n), end_of(now, timeout_s), timeout_s);
                    }
                }
                Step::Pass(ms) => {
                    now += ms;
                    for due in book.due(now) {
                        let verdict = book.ask(&due, Ask::Expire, now);
                        prop_assert!(matches!(verdict, Verdict::Start(_)), "{:?}", verdict);
                    }
                    prop_assert!(book.due(now).is_empty());
                }
            }
            book.check_invariants();
        }
        for n in 0..4 {
            book.done(&id(n), Outcome::Failed, now);
            book.ask(&id(n), Ask::Kill, now);
            book.done(&id(n), Outcome::Done, now);
        }
        prop_assert_eq!(book.len(), 0);
    }
}
