use proptest::prelude::*;

use super::*;

pub(crate) fn uuid(number: u32) -> String {
    format!("00000000-0000-4000-8000-{number:012}")
}

pub(crate) fn build(number: u32, tags: &[&str]) -> BuildRecord {
    BuildRecord {
        id: uuid(number),
        wanted: tags.iter().map(|tag| (*tag).to_owned()).collect(),
        vcpus: 1,
        memory: Bytes::mib(512),
        min_free_disk: Bytes(0),
        created_unix_ms: u64::from(number),
        changed_unix_ms: u64::from(number),
        state: BuildState::Waiting,
    }
}

pub(crate) fn template() -> TemplateRecord {
    TemplateRecord::new("a".repeat(20), "n".to_owned(), 0)
}

fn tags(tags: &[&str]) -> BTreeSet<String> {
    tags.iter().map(|tag| (*tag).to_owned()).collect()
}

fn message(template: &TemplateRecord, number: u32) -> &str {
    match &template.build(&uuid(number)).unwrap().state {
        BuildState::Failed(reason) => &reason.message,
        _ => "",
    }
}

#[test]
fn a_ready_build_gets_its_tags_and_the_former_one_loses_its_template() {
    let mut t = template();
    for number in [1, 2] {
        t.request(build(number, &["default", "v1"]));
        assert_eq!(t.start(&uuid(number), 5), Some(vec![]));
        t.finish(&uuid(number), Ok(format!("p{number}")), 6);
    }
    assert_eq!(t.pool_ids(), tags(&["p2"]));
    let names = t.pool_names();
    assert_eq!(names.get("n").map(String::as_str), Some("p2"));
    assert_eq!(names.get("n:v1").map(String::as_str), Some("p2"));
    assert_eq!(t.assign("v1", tags(&["stable"]), 7), Some(uuid(2)));
    t.unassign(&tags(&["default", "v1"]));
    assert_eq!(t.pool_ids(), tags(&["p2"]));
    t.unassign(&tags(&["stable"]));
    assert_eq!(t.pool_ids(), tags(&[]));
    assert_eq!(t.assign("stable", tags(&["x"]), 8), None);
    assert_eq!(t.check(), None);
}

#[test]
fn a_newer_build_supersedes_those_with_one_of_its_tags() {
    let mut t = template();
    t.request(build(1, &["default", "a"]));
    t.request(build(2, &["b"]));
    t.request(build(3, &["a"]));
    assert_eq!(message(&t, 1), SUPERSEDED);
    assert_eq!(message(&t, 2), "");
    assert_eq!(t.start(&uuid(1), 4), None);
    assert_eq!(t.start(&uuid(3), 4), Some(vec![]));
    t.request(build(4, &["a"]));
    assert_eq!(
        message(&t, 3),
        "",
        "a started build ends with the next start"
    );
    assert_eq!(t.start(&uuid(4), 5), Some(vec![uuid(3)]));
}

#[test]
fn a_restart_ends_started_builds_and_keeps_waiting_ones() {
    let mut t = template();
    t.request(build(1, &["a"]));
    t.request(build(2, &["b"]));
    t.start(&uuid(1), 3);
    t.recover(4);
    assert_eq!((message(&t, 1), message(&t, 2)), (RESTARTED, ""));
    t.finish(&uuid(1), Ok("late".to_owned()), 5);
    assert!(t.tags.is_empty(), "a final state changed");
    t.expire(2, 9);
    assert_eq!(message(&t, 2), "");
    t.expire(3, 9);
    assert_eq!(message(&t, 2), TOO_LATE);
}

#[test]
fn a_repeated_build_takes_the_tags_that_still_name_the_former_one() {
    let mut t = template();
    for (number, of) in [(1, ["default", "a"]), (2, ["b", "c"])] {
        t.request(build(number, &of));
        t.start(&uuid(number), 1);
        t.finish(&uuid(number), Ok(format!("p{number}")), 1);
    }
    t.request(build(3, &["a"]));
    let again = BuildRecord {
        wanted: t.tags_of(&uuid(1)),
        state: BuildState::Started,
        ..build(4, &[])
    };
    t.redo(again);
    assert_eq!(message(&t, 3), "", "a waiting build is a newer order");
    assert!(t.needs_order(&uuid(1)) && t.needs_order(&uuid(4)));
    // While the build runs, the tag `a` moves to another build, and `d` is added.
    t.assign("b", tags(&["a"]), 5);
    t.assign("default", tags(&["d"]), 5);
    t.finish_redo(&uuid(4), &uuid(1), "p4".to_owned(), 6);
    let named = |tag: &str| t.tagged(tag).map(|(_, pool_id)| pool_id.to_owned());
    let of = ["default", "a", "b", "d"].map(|tag| named(tag).unwrap());
    assert_eq!(of, ["p4", "p2", "p2", "p1"]);
    assert_eq!(t.check(), None);
    // Once no tag is left, its template is not needed.
    t.redo(BuildRecord {
        wanted: tags(&["default"]),
        state: BuildState::Started,
        ..build(5, &[])
    });
    t.unassign(&tags(&["default"]));
    t.finish_redo(&uuid(5), &uuid(4), "p5".to_owned(), 7);
    assert_eq!(t.pool_ids(), tags(&["p1", "p2"]));
    assert!(!t.needs_order(&uuid(4)) && !t.needs_order(&uuid(5)));
    assert_eq!(t.check(), None);
}

#[test]
fn only_a_bounded_number_of_builds_is_kept() {
    let mut t = template();
    t.request(build(0, &["keep"]));
    t.start(&uuid(0), 1);
    t.finish(&uuid(0), Ok("p".to_owned()), 1);
    for number in 1..200 {
        t.request(build(number, &["default"]));
    }
    assert!(t.builds.len() <= KEPT_BUILDS + 2, "{}", t.builds.len());
    assert_eq!(t.tagged("keep").unwrap().1, "p");
    assert!(t.build(&uuid(199)).is_some());
}

#[derive(Clone, Debug)]
enum Op {
    Request(Vec<&'static str>),
    Start(u32),
    Finish(u32, bool),
    /// Repeats the build of a tag.
    Redo(&'static str),
    FinishRedo(u32, u32),
    Assign(&'static str, &'static str),
    Unassign(&'static str),
    Recover,
    Expire(u32),
}

fn op() -> impl Strategy<Value = Op> {
    let tag = prop::sample::select(vec!["default", "a", "b"]);
    prop_oneof![
        prop::collection::vec(tag.clone(), 1..3).prop_map(Op::Request),
        (0_u32..40).prop_map(Op::Start),
        (0_u32..40, any::<bool>()).prop_map(|(n, ok)| Op::Finish(n, ok)),
        tag.clone().prop_map(Op::Redo),
        (0_u32..40, 0_u32..40).prop_map(|(n, former)| Op::FinishRedo(n, former)),
        (tag.clone(), tag.clone()).prop_map(|(from, to)| Op::Assign(from, to)),
        tag.prop_map(Op::Unassign),
        Just(Op::Recover),
        (0_u32..40).prop_map(Op::Expire),
    ]
}

proptest! {
    #[test]
    fn any_order_of_requests_leaves_a_valid_record(ops in prop::collection::vec(op(), 0..60)) {
        let mut t = template();
        let mut number = 0;
        for op in ops {
            let ended: Vec<_> = t.builds.iter().filter(|b| b.state.is_final()).cloned().collect();
            match op {
                Op::Request(tags) => {
                    t.request(build(number, &tags));
                    number += 1;
                }
                Op::Start(n) => drop(t.start(&uuid(n), 1)),
                Op::Finish(n, true) => t.finish(&uuid(n), Ok(format!("p{n}")), 1),
                Op::Finish(n, false) => t.finish(&uuid(n), Err(Reason::new("no")), 1),
                Op::Redo(tag) => {
                    if let Some((former, _)) = t.tagged(tag) {
                        let wanted = t.tags_of(&former.id);
                        let state = BuildState::Started;
                        t.redo(BuildRecord { wanted, state, ..build(number, &[]) });
                        number += 1;
                    }
                }
                Op::FinishRedo(n, former) => t.finish_redo(&uuid(n), &uuid(former), format!("p{n}"), 1),
                Op::Assign(from, to) => drop(t.assign(from, tags(&[to]), 1)),
                Op::Unassign(tag) => t.unassign(&tags(&[tag])),
                Op::Recover => t.recover(1),
                Op::Expire(n) => t.expire(n.into(), 1),
            }
            prop_assert_eq!(t.check(), None);
            for before in ended {
                let same = t.build(&before.id).is_none_or(|b| {
                    std::mem::discriminant(&b.state) == std::mem::discriminant(&before.state)
                });
                prop_assert!(same, "{:?} was final", before);
            }
        }
    }
}
