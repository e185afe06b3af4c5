use super::*;
use builds::record::{BuildRecord, BuildState, TagRecord};

fn node(name: &str) -> NodeId {
    name.parse().unwrap()
}

fn home(name: &str, epoch: u64) -> Home {
    Home {
        node: node(name),
        epoch,
    }
}

/// A template with one build per tag; later ones are newer.
fn record(id: &str, name: &str, created: u64, tags: &[&str]) -> TemplateRecord {
    let mut record = TemplateRecord::new(id.repeat(20), name.to_owned(), created);
    for (at, tag) in (1_u64..).zip(tags) {
        let build = format!("{at:08}-0000-4000-a000-{created:012}");
        record.builds.push(BuildRecord {
            id: build.clone(),
            wanted: BTreeSet::from([(*tag).to_owned()]),
            vcpus: 1,
            memory: model::Bytes::mib(512),
            min_free_disk: model::Bytes(0),
            created_unix_ms: created + at,
            changed_unix_ms: created + at,
            state: BuildState::Ready {
                template: Some(format!("pool{id}{at}")),
            },
        });
        let tagged = TagRecord {
            build,
            assigned_unix_ms: 1,
        };
        record.tags.insert((*tag).to_owned(), tagged);
    }
    assert_eq!(record.check(), None);
    record
}

#[derive(Default)]
struct World {
    own: BTreeMap<String, Arc<TemplateRecord>>,
    shelves: BTreeMap<NodeId, Shelf>,
    deleted: Deleted,
    members: Vec<NodeId>,
}

impl World {
    fn of(members: &[&str]) -> Self {
        Self {
            members: members.iter().map(|name| node(name)).collect(),
            ..Self::default()
        }
    }

    fn own(mut self, record: TemplateRecord, home: Option<Home>) -> Self {
        let record = TemplateRecord { home, ..record };
        self.own.insert(record.id.clone(), Arc::new(record));
        self
    }

    fn shelf(mut self, at: &str, listed: &[(TemplateRecord, Home)]) -> Self {
        let listed = listed.iter().map(|(record, home)| {
            let (record, home) = (record.clone(), home.clone());
            (record.id.clone(), Listed { record, home })
        });
        let templates = listed.collect();
        let deleted = BTreeMap::new();
        self.shelves.insert(node(at), Shelf { templates, deleted });
        self
    }

    /// The plan of node b.
    fn plan(&self) -> Plan {
        plan(&Scene {
            this: &node("b"),
            own: &self.own,
            shelves: self.shelves.iter().collect(),
            members: self.members.iter().collect(),
            deleted: &self.deleted,
        })
    }
}

fn builds(plan: &Plan) -> Vec<(&str, &str)> {
    let all = plan.missing.iter();
    all.map(|m| (&m.build[..8], m.source.as_str())).collect()
}

#[test]
fn tagged_builds_of_other_nodes_are_missing_newest_first() {
    let (x, y) = (
        record("x", "x", 100, &["default", "v1"]),
        record("y", "y", 50, &["default"]),
    );
    let world = World::of(&["a", "b", "c"])
        .shelf("a", &[(x.clone(), home("a", 0)), (y.clone(), home("c", 0))])
        .shelf("c", &[(y.clone(), home("c", 0))]);
    // From the home, not from a node that has a copy.
    let plan = world.plan();
    assert_eq!(
        builds(&plan),
        [("00000002", "a"), ("00000001", "a"), ("00000001", "c")]
    );
    // If one of them is here, the other one is missing.
    let mut half = x.clone();
    half.builds.pop();
    half.tags.remove("v1");
    let world = world.own(half, Some(home("a", 0)));
    let plan = world.plan();
    assert_eq!(builds(&plan), [("00000002", "a"), ("00000001", "c")]);
    assert!(plan.follow.is_empty(), "what is here is as its home has it");
    // The home of y is unreachable.
    let mut world = world;
    world.shelves.remove(&node("c"));
    assert_eq!(
        builds(&world.plan()),
        [("00000002", "a"), ("00000001", "a")]
    );
}

#[test]
fn tags_follow_the_home_and_deletions_are_final() {
    let x = record("x", "x", 100, &["default", "v1"]);
    let mut changed = x.clone();
    changed.tags.remove("v1");
    changed.builds.pop();
    let world = World::of(&["a", "b"])
        .own(x.clone(), Some(home("a", 0)))
        .shelf("a", &[(changed.clone(), home("a", 0))]);
    let plan = world.plan();
    assert_eq!(plan.follow, [(changed, home("a", 0))]);
    assert_eq!(plan.missing, []);
    // This node's own templates are not taken from others.
    let world = World::of(&["a", "b"])
        .own(x.clone(), None)
        .shelf("a", &[(x.clone(), home("b", 0))]);
    assert_eq!(world.plan(), Plan::default());
    // A node that has returned still lists it.
    let mut world = World::of(&["a", "b"]).shelf("a", &[(x.clone(), home("a", 0))]);
    let gone = BTreeMap::from([(x.id.clone(), 1)]);
    world.deleted = Deleted::default().merged(gone, 1).unwrap();
    assert_eq!(world.plan(), Plan::default());
    let world = world.own(x.clone(), Some(home("a", 0)));
    assert_eq!(world.plan().remove, [x.id]);
}

#[test]
fn the_first_node_with_a_copy_takes_the_templates_of_a_home_that_has_left() {
    let x = record("x", "x", 100, &["default"]);
    let of = |members: &[&str]| World::of(members).own(x.clone(), Some(home("a", 3)));
    let taken = [(x.id.clone(), home("b", 4))];
    assert_eq!(of(&["b", "c"]).plan().take_over, taken);
    assert_eq!(of(&["a", "b"]).plan().take_over, [], "a is away");
    assert_eq!(of(&[]).plan().take_over, [], "the members are unknown");
    let lost = of(&["a", "b"]).shelf("a", &[]);
    assert_eq!(lost.plan().take_over, taken, "a has lost it");
    // Another node is first.
    let other = of(&["aa", "b"]).shelf("aa", &[(x.clone(), home("a", 3))]);
    assert_eq!(other.plan().take_over, []);
    // The previous home returns and follows.
    let back = World::of(&["a", "b"])
        .own(x.clone(), None)
        .shelf("a", &[(x.clone(), home("a", 1))]);
    assert_eq!(back.plan().follow, [(x.clone(), home("a", 1))]);
    // Of two concurrent homes, the first node wins.
    let both = World::of(&["a", "b"])
        .own(x.clone(), Some(home("b", 1)))
        .shelf("a", &[(x.clone(), home("a", 1))]);
    assert_eq!(both.plan().follow, [(x, home("a", 1))]);
}

#[test]
fn of_two_templates_with_one_name_the_older_one_has_it() {
    let (old, new) = (
        record("x", "n", 1, &["default"]),
        record("y", "n", 2, &["default"]),
    );
    let others = World::of(&["a", "b", "c"])
        .shelf("a", &[(new.clone(), home("a", 0))])
        .shelf("c", &[(old.clone(), home("c", 0))]);
    assert_eq!(builds(&others.plan()), [("00000001", "c")]);
    let here = World::of(&["a", "b"])
        .own(new.clone(), None)
        .shelf("a", &[(old.clone(), home("a", 0))]);
    assert_eq!(here.plan().shadowed, BTreeSet::from([new.id.clone()]));
    assert_eq!(here.plan().missing, []);
    let here = World::of(&["a", "b"])
        .own(old, None)
        .shelf("a", &[(new, home("a", 0))]);
    assert_eq!(here.plan(), Plan::default());
}
