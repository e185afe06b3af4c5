use std::collections::BTreeSet;

use super::state::{Finished, Index, MAX_BYTES, MAX_INDEX, MAX_STEPS, StartUp, State, StepEntry};
use crate::{key::Key, settings::Settings};

fn key(text: &str) -> Key {
    Key::of(&[text])
}

fn entry(disk: &str, bytes: u64, used_unix_ms: u64) -> StepEntry {
    StepEntry {
        disk: disk.to_owned(),
        is_ours: true,
        has_disk: true,
        bytes,
        settings: Settings::default(),
        used_unix_ms,
    }
}

fn set(disks: &[&str]) -> BTreeSet<String> {
    disks.iter().map(ToString::to_string).collect()
}

fn finished(template: &str, start: &str) -> Finished {
    Finished {
        template: template.to_owned(),
        settings: Settings::default(),
        start_up: StartUp::Author {
            start: Some(start.to_owned()),
            ready: None,
        },
        keys: Vec::new(),
    }
}

#[test]
fn builds_with_one_key_have_an_entry_for_each_of_their_templates() {
    let mut state = State::new(Index::default(), 100);
    let (first, second) = (finished("t1", "x"), finished("t2", "x"));
    state.keep_built(&[key("b")], first.clone(), &set(&[]));
    state.keep_built(&[key("b")], second.clone(), &set(&[]));
    assert_eq!(state.finished("t1"), Some(first));
    assert_eq!(state.finished("t2"), Some(second));
    assert_eq!(state.hold_built(key("b"), &set(&[])).as_deref(), Some("t2"));
    state.keep_built(&[key("c")], finished("t3", "y"), &set(&["t2"]));
    assert_eq!(state.all_finished(), set(&["t1", "t3"]));
    assert_eq!(
        state.hold_built(key("b"), &set(&[])),
        None,
        "its template is gone"
    );
}

#[test]
fn a_template_that_a_build_has_found_is_not_removed_and_one_that_is_removed_is_not_found() {
    let mut state = State::new(Index::default(), 100);
    let keys = [key("own"), key("shared")];
    state.keep_built(&keys, finished("t", "x"), &set(&[]));
    for key in keys {
        assert_eq!(state.hold_built(key, &set(&[])).as_deref(), Some("t"));
    }
    state.release("t");
    assert!(!state.begin_removal("t"), "one build still holds it");
    state.release("t");
    assert!(state.begin_removal("t"));
    assert_eq!(state.hold_built(keys[0], &set(&[])), None);
    // The pool refused the removal, because a sandbox needs the template.
    state.end_removal("t");
    assert_eq!(state.hold_built(keys[0], &set(&[])).as_deref(), Some("t"));
}

#[test]
fn a_key_that_a_template_and_its_copies_share_is_lost_with_the_last_of_them() {
    let [first, second, third] = ["t1", "t2", "t3"].map(|id| Finished {
        keys: vec![key(id), key("shared")],
        ..finished(id, "x")
    });
    let mut state = State::new(Index::default(), 100);
    let none = set(&[]);
    state.keep_built(&[key("t1"), key("shared")], first, &none);
    state.keep_built(&[key("t2")], second, &none);
    state.keep_built(&[key("t3")], third, &none);
    let bytes = state.index.render(MAX_INDEX).unwrap();
    let mut state = State::new(Index::parse(&bytes).unwrap(), 100);
    // The pool has these templates and no others.
    let found = |state: &mut State, present: &[&str]| {
        let lost = state.all_finished();
        let lost = lost.difference(&set(present)).cloned().collect();
        let id = state.hold_built(key("shared"), &lost)?;
        state.release(&id);
        Some(id)
    };
    let gone = |state: &mut State, id: &str| {
        state.keep_built(&[], finished("other", "y"), &set(&[id]));
    };
    // A copy does not take over the key.
    assert_eq!(found(&mut state, &["t1", "t3"]).as_deref(), Some("t1"));
    gone(&mut state, "t2");
    assert_eq!(found(&mut state, &["t1", "t3"]).as_deref(), Some("t1"));
    assert_eq!(state.hold_built(key("t2"), &none), None);
    // While the first is being removed, and afterwards, the key belongs to the other copy.
    assert!(state.begin_removal("t1"));
    assert_eq!(found(&mut state, &["t1", "t3"]).as_deref(), Some("t3"));
    state.end_removal("t1");
    assert_eq!(found(&mut state, &["t3"]).as_deref(), Some("t3"));
    gone(&mut state, "t1");
    assert_eq!(found(&mut state, &["t3"]).as_deref(), Some("t3"));
    gone(&mut state, "t3");
    assert_eq!(state.hold_built(key("shared"), &none), None);
}

#[test]
fn an_index_of_a_former_release_has_no_keys_of_templates() {
    let mut state = State::new(Index::default(), 100);
    state.keep_built(&[key("b")], finished("t", "x"), &set(&[]));
    let text = String::from_utf8(state.index.render(MAX_INDEX).unwrap()).unwrap();
    let former = text.replacen(",\"keys\":[]", "", 1);
    assert_ne!(former, text);
    assert_eq!(Index::parse(former.as_bytes()).unwrap(), state.index);
}

#[test]
fn entries_of_steps_make_room_for_those_of_finished_builds() {
    let mut state = State::new(Index::default(), 100);
    state.keep(key("1"), entry("a", 10, 1));
    let large = finished("t1", &"x".repeat(MAX_BYTES));
    state.keep_built(&[key("b")], large, &set(&[]));
    assert_eq!(state.keep(key("2"), entry("b", 10, 2)), set(&["a", "b"]));
    assert!(state.use_step(key("1"), 3).is_none());
    assert!(state.finished("t1").is_some());
}

#[test]
fn an_index_that_is_too_long_to_be_read_is_not_written() {
    let mut state = State::new(Index::default(), 100);
    state.keep_built(&[key("b")], finished("t", "x"), &set(&[]));
    let length = state.index.render(MAX_INDEX).unwrap().len();
    assert!(state.index.render(length).is_ok());
    assert!(state.index.render(length - 1).is_err());
}

#[test]
fn a_disk_stays_until_its_last_entry_and_its_last_holder_are_gone() {
    let mut state = State::new(Index::default(), 100);
    state.hold("a");
    assert_eq!(state.keep(key("1"), entry("a", 10, 1)), set(&[]));
    assert_eq!(state.keep(key("2"), entry("a", 10, 2)), set(&[]));
    assert_eq!(state.release("a"), None, "two entries need it");
    assert_eq!(state.keep(key("1"), entry("b", 10, 3)), set(&[]));
    assert_eq!(state.keep(key("2"), entry("b", 10, 4)), set(&["a"]));
    state.hold("c");
    state.hold("c");
    assert_eq!(state.release("c"), None, "another holder");
    assert_eq!(state.release("c"), Some("c".to_owned()));
}

#[test]
fn a_disk_that_could_not_be_removed_is_tried_again_with_the_next_step() {
    let mut state = State::new(Index::default(), 100);
    state.remove_later("a".to_owned());
    assert_eq!(state.keep(key("1"), entry("b", 10, 1)), set(&["a"]));
    assert_eq!(state.keep(key("2"), entry("c", 10, 2)), set(&[]));
}

#[test]
fn disks_that_the_pool_has_lost_are_forgotten() {
    let mut state = State::new(Index::default(), 100);
    state.keep(key("1"), entry("a", 10, 1));
    state.keep(key("2"), entry("b", 10, 2));
    assert!(state.forget_lost(&set(&["b", "c"])));
    assert!(!state.needs("a") && state.needs("b"));
    assert!(!state.forget_lost(&set(&["b"])));
}

#[test]
fn the_least_recently_used_disks_go_for_new_ones_unless_a_build_holds_them() {
    let mut state = State::new(Index::default(), 100);
    for (disk, used) in [("a", 1), ("b", 2), ("c", 3)] {
        assert!(state.keep(key(disk), entry(disk, 30, used)).is_empty());
    }
    state.use_step(key("a"), 9).unwrap();
    state.hold("b");
    assert_eq!(state.keep(key("d"), entry("d", 30, 10)), set(&["c"]));
    assert_eq!(state.release("b"), None);
    let mut foreign = entry("image", 1000, 11);
    foreign.is_ours = false;
    assert_eq!(state.keep(key("i"), foreign), set(&[]), "not in the quota");
    // A disk that exceeds the quota on its own is not kept.
    let large = state.keep(key("e"), entry("e", 101, 12));
    assert_eq!(large, set(&["a", "b", "d", "e"]));
    assert!(!state.needs("e"));
    // Entries without disks still lead to later steps.
    assert!(!state.use_step(key("a"), 13).unwrap().has_disk);
}

#[test]
fn the_number_of_entries_and_their_variables_are_limited() {
    let mut state = State::new(Index::default(), u64::MAX);
    for number in 0..MAX_STEPS as u64 {
        let key = key(&number.to_string());
        state.index.steps.insert(key, entry("a", 1, number));
    }
    state.keep(key("new"), entry("a", 1, MAX_STEPS as u64));
    assert!(state.use_step(key("0"), 0).is_none());
    assert!(state.use_step(key("1"), u64::MAX).is_some());
    let mut large = entry("b", 1, u64::MAX);
    let value = "x".repeat(17 << 20);
    large.settings.env.insert("A".to_owned(), value);
    state.keep(key("large"), large);
    assert!(state.use_step(key("large"), 0).is_none());
}

#[test]
fn an_index_is_read_as_it_was_written_and_another_format_is_refused() {
    let mut state = State::new(Index::default(), 100);
    state.keep(key("1"), entry("a", 10, 1));
    let built = finished("t", "x");
    state.keep_built(&[key("b")], built.clone(), &set(&[]));
    let bytes = state.index.render(MAX_INDEX).unwrap();
    let read = Index::parse(&bytes).unwrap();
    assert_eq!(read, state.index);
    let next = State::new(read, 100);
    assert_eq!(next.finished("t"), Some(built.clone()));
    let text = String::from_utf8(bytes).unwrap();
    let newer = text.replacen("\"format\":2", "\"format\":3", 1);
    assert!(Index::parse(newer.as_bytes()).is_err());
    assert!(Index::parse(b"").is_err());
}

#[test]
fn a_step_that_is_done_again_has_another_result() {
    let first = entry("a", 1, 1);
    assert_eq!(first.result(), entry("a", 2, 2).result());
    assert_ne!(first.result(), entry("b", 1, 1).result());
    let mut other = entry("a", 1, 1);
    other.settings.env.insert("A".to_owned(), "1".to_owned());
    assert_ne!(first.result(), other.result());
}
