use std::{collections::BTreeSet, path::Path};

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::{
    node::settings::{Dir, Settings, Shared},
    secrets::{KeySource, MAX_SECRETS},
};

/// Later than everything that the tests do.
const NOW: u64 = 1_000;

/// The secrets of a node of a cluster.
struct Node {
    secrets: Secrets,
    state: TempDir,
}

impl Node {
    fn new() -> Self {
        // In memory, because thousands of files are synced.
        let state = tempfile::tempdir_in("/dev/shm").unwrap();
        join(state.path());
        let secrets = open(state.path());
        Self { secrets, state }
    }

    fn create(&self, name: &str, value: &str, at: u64) -> Result<Secret, SecretError> {
        self.secrets
            .create(name, value, BTreeMap::new(), Vec::new(), at)
    }

    fn value(&self, name: &str) -> Option<String> {
        let value = self.secrets.value(name, "a.test").ok()?;
        Some(value.expose().to_owned())
    }

    /// In the wire format.
    fn lacks(&self, of: &Self) -> Batch {
        let batch = of.secrets.newer_than(&self.secrets.stamps());
        Batch::parse(&serde_json::to_vec(&batch).unwrap()).unwrap()
    }

    fn pull(&self, from: &Self) {
        self.secrets.merge(self.lacks(from), NOW).unwrap();
    }

    /// The secrets as clients and sandboxes see them.
    fn seen(&self) -> BTreeMap<String, (Secret, Option<String>)> {
        let all = self.secrets.list().into_iter();
        let all = all.map(|secret| {
            (
                secret.id.clone(),
                (secret.clone(), self.value(&secret.name)),
            )
        });
        all.collect()
    }
}

/// Makes a host a member of the cluster of all these tests.
fn join(state: &Path) {
    let dir = Dir::of(state);
    dir.create().unwrap();
    let shared = Shared {
        cluster: "c".to_owned(),
        etcd: Vec::new(),
        home_key: "07".repeat(32),
    };
    let address = "127.0.0.1:1".parse().unwrap();
    let settings = Settings::new(shared, "a".parse().unwrap(), String::new(), address);
    dir.store(&settings).unwrap();
}

fn open(state: &Path) -> Secrets {
    Secrets::open(state, &KeySource::Generated).unwrap()
}

fn plain(id: u32, name: &str, version: u64) -> Plain {
    let secret = Secret {
        id: format!("sec_{id:020x}"),
        name: name.to_owned(),
        version,
        hosts: Vec::new(),
        metadata: BTreeMap::new(),
        created_at_ms: 1,
        updated_at_ms: 1,
    };
    let value = "v".to_owned();
    Plain { secret, value }
}

fn batch(secrets: Vec<Plain>) -> Batch {
    let deleted = BTreeMap::new();
    Batch { secrets, deleted }
}

#[test]
fn another_node_uses_the_value_the_update_and_the_deletion() {
    let (a, b) = (Node::new(), Node::new());
    let made = a.create("key", "first-canary", 1).unwrap();
    b.pull(&a);
    assert_eq!(b.value("key").unwrap(), "first-canary");
    assert_eq!(b.secrets.get("key").unwrap(), made);
    assert!(matches!(
        b.create("KEY", "x", 2),
        Err(SecretError::Taken(_))
    ));
    b.secrets
        .update("key", "second-canary", None, None, 2)
        .unwrap();
    // Older versions change nothing.
    b.pull(&a);
    assert_eq!(b.value("key").unwrap(), "second-canary");
    // As in a push of a change. Each node has its own key.
    a.secrets.merge(b.secrets.changed(&made.id), NOW).unwrap();
    assert_eq!(a.value("key").unwrap(), "second-canary");
    let key = |node: &Node| std::fs::read(node.state.path().join("secrets/key")).unwrap();
    assert_ne!(key(&a), key(&b));
    assert_eq!(a.secrets.digest(), b.secrets.digest());
    assert_eq!(
        open(b.state.path())
            .value("key", "a.test")
            .unwrap()
            .expose(),
        "second-canary"
    );
    // b is unreachable while a deletes it. b's update does not bring it back.
    a.secrets.delete("key", 3).unwrap();
    b.secrets
        .update("key", "third-canary", None, None, 4)
        .unwrap();
    a.pull(&b);
    assert_eq!(a.value("key"), None);
    assert_ne!(a.secrets.digest(), b.secrets.digest());
    b.pull(&a);
    assert!(a.seen().is_empty() && b.seen().is_empty());
}

#[test]
fn files_that_a_killed_server_has_left_of_a_deletion_are_removed() {
    let node = Node::new();
    let made = node.create("key", "v", 1).unwrap();
    let file = node.state.path().join(format!("secrets/{}.json", made.id));
    let bytes = std::fs::read(&file).unwrap();
    node.secrets.delete(&made.id, 2).unwrap();
    std::fs::write(&file, bytes).unwrap();
    assert!(open(node.state.path()).list().is_empty() && !file.exists());
}

#[test]
fn a_server_alone_keeps_no_deletions() {
    let state = tempfile::tempdir().unwrap();
    let secrets = open(state.path());
    let none = secrets.digest();
    let made = secrets
        .create("key", "v", BTreeMap::new(), Vec::new(), 1)
        .unwrap();
    secrets.delete(&made.id, 2).unwrap();
    assert_eq!(secrets.digest(), none);
    assert_eq!(std::fs::read_dir(state.path()).unwrap().count(), 1);
}

#[test]
fn of_two_secrets_with_one_name_the_first_is_used_everywhere() {
    let (a, b) = (Node::new(), Node::new());
    b.create("key", "of b", 1).unwrap();
    a.create("key", "of a", 2).unwrap();
    for (to, from) in [(&a, &b), (&b, &a)] {
        to.pull(from);
        assert_eq!(to.value("key").unwrap(), "of b");
    }
    assert_eq!((a.seen(), a.seen().len()), (b.seen(), 2));
    // A deletion by name leaves none of them.
    a.secrets.delete("key", 3).unwrap();
    b.pull(&a);
    assert!(a.seen().is_empty() && b.seen().is_empty());
}

#[test]
fn what_another_node_gives_is_checked() {
    let node = Node::new();
    let with = |change: fn(&mut Plain)| {
        let mut plain = plain(1, "key", 1);
        change(&mut plain);
        plain
    };
    let bad = [
        with(|p| p.secret.id = "sec_../../x".to_owned()),
        with(|p| p.secret.id = format!("sec_{}", "A".repeat(20))),
        with(|p| p.secret.name = "A b".to_owned()),
        with(|p| p.secret.name = "KEY".to_owned()),
        with(|p| p.secret.version = 0),
        with(|p| p.secret.version = u64::MAX),
        with(|p| p.value = String::new()),
        with(|p| p.value = "v".repeat(65_537)),
        with(|p| {
            p.secret.metadata.insert("k".repeat(129), String::new());
        }),
    ];
    let good = plain(2, "other", 1);
    let all: Vec<_> = bad.into_iter().chain([good]).collect();
    let refused = all.len() - 1;
    assert_eq!(node.secrets.merge(batch(all), NOW).unwrap(), refused);
    let names: Vec<_> = node.secrets.list().into_iter().map(|s| s.name).collect();
    assert_eq!(names, ["other"]);
    let why = Batch::parse(br#"{"secrets":[{"secret":"hunter2"}],"deleted":{}}"#);
    assert!(why.is_err_and(|why| why.contains("column") && !why.contains("hunter2")));
}

#[test]
fn batches_and_the_number_of_secrets_are_bounded() {
    let (a, b) = (Node::new(), Node::new());
    for n in 0..20 {
        let mut plain = plain(n, &format!("n{n}"), 1);
        // Each byte takes six in JSON.
        plain.value = "\u{1}".repeat(65_536);
        a.secrets.merge(batch(vec![plain]), NOW).unwrap();
    }
    let mut times = 0;
    while a.secrets.digest() != b.secrets.digest() {
        let bytes = serde_json::to_vec(&a.secrets.newer_than(&b.secrets.stamps()));
        assert!(bytes.unwrap().len() < crate::peers::MAX_ANSWER);
        b.pull(&a);
        times += 1;
    }
    assert_eq!(times, 2);
    let id = |n: u32| u32::try_from(MAX_SECRETS).unwrap() + n;
    let many = (20..id(5)).map(|n| plain(n, &format!("n{n}"), 1)).collect();
    b.secrets.merge(batch(many), NOW).unwrap();
    assert_eq!(b.secrets.list().len(), MAX_SECRETS);
    // A full node gets no further secrets, only new versions.
    let other = Node::new();
    let given = vec![plain(id(9), "late", 1), plain(3, "n3", 2)];
    other.secrets.merge(batch(given), NOW).unwrap();
    let given = b.lacks(&other);
    assert_eq!(
        (given.secrets.len(), &*given.secrets[0].secret.name),
        (1, "n3")
    );
}

/// A step of a test, with the number of a node and of a name.
#[derive(Clone, Debug)]
enum Step {
    Create(usize, usize),
    Update(usize, usize),
    Delete(usize, usize),
    /// The first pulls from the second.
    Pull(usize, usize),
}

fn step() -> impl Strategy<Value = Step> {
    let two = || (0..3_usize, 0..3_usize);
    prop_oneof![
        two().prop_map(|(node, name)| Step::Create(node, name)),
        two().prop_map(|(node, name)| Step::Update(node, name)),
        two().prop_map(|(node, name)| Step::Delete(node, name)),
        two().prop_map(|(to, from)| Step::Pull(to, from)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn nodes_agree_in_whatever_order_they_hear_of_changes(
        steps in prop::collection::vec(step(), 1..30),
        order in Just([0, 1, 2]).prop_shuffle(),
    ) {
        let nodes = [Node::new(), Node::new(), Node::new()];
        let mut deleted = BTreeSet::new();
        for (n, step) in (0_u64..).zip(&steps) {
            // Many changes have equal times.
            let (at, value) = (1 + n / 16, format!("value {n}"));
            match *step {
                Step::Create(node, name) => drop(nodes[node].create(&format!("n{name}"), &value, at)),
                Step::Update(node, name) => {
                    let secrets = &nodes[node].secrets;
                    drop(secrets.update(&format!("n{name}"), &value, None, None, at));
                }
                Step::Delete(node, name) => {
                    let (secrets, name) = (&nodes[node].secrets, format!("n{name}"));
                    let named = secrets.list().into_iter().filter(|secret| secret.name == name);
                    deleted.extend(named.map(|secret| secret.id));
                    drop(secrets.delete(&name, at));
                }
                Step::Pull(to, from) => nodes[to].pull(&nodes[from]),
            }
        }
        // One node receives all changes in order, another one in any order, and one change twice.
        let (first, second) = (Node::new(), Node::new());
        for node in &nodes {
            first.pull(node);
        }
        for at in order.into_iter().chain([order[0]]) {
            let all = nodes[at].secrets.newer_than(&Stamps::new());
            second.secrets.merge(all, NOW).unwrap();
        }
        prop_assert!(first.seen().keys().all(|id| !deleted.contains(id)));
        prop_assert_eq!(first.seen(), second.seen());
        prop_assert_eq!(first.secrets.digest(), second.secrets.digest());
        // The nodes themselves, by comparison as in the roster.
        for (to, from) in [(0, 1), (0, 2), (1, 0), (2, 0)] {
            nodes[to].pull(&nodes[from]);
        }
        for node in &nodes {
            prop_assert_eq!(node.seen(), first.seen());
            prop_assert_eq!(node.secrets.digest(), first.secrets.digest());
        }
        let kept = open(nodes[0].state.path());
        prop_assert_eq!(kept.digest(), first.secrets.digest());
    }
}

#[test]
fn a_sealed_text_can_be_opened_where_its_sandbox_moves() {
    let (a, b) = (Node::new(), Node::new());
    let sealed = a.secrets.seal_text("hunter2").unwrap();
    assert_eq!(
        b.secrets.open_text(&sealed).as_deref().map(String::as_str),
        Some("hunter2")
    );
    // From before a host joined, and from a host outside this cluster.
    let state = tempfile::tempdir().unwrap();
    let alone = open(state.path());
    let sealed = alone.seal_text("hunter2").unwrap();
    assert_eq!(
        alone.open_text(&sealed).as_deref().map(String::as_str),
        Some("hunter2")
    );
    assert_eq!(b.secrets.open_text(&sealed), None);
    join(state.path());
    assert_eq!(
        open(state.path())
            .open_text(&sealed)
            .as_deref()
            .map(String::as_str),
        Some("hunter2")
    );
}

#[test]
fn a_version_that_no_node_takes_is_not_answered() {
    let node = Node::new();
    let last = plain(1, "key", (1 << 53) - 1);
    node.secrets.merge(batch(vec![last]), NOW).unwrap();
    let updated = node.secrets.update("key", "w", None, None, NOW);
    assert!(matches!(updated, Err(SecretError::Invalid(_))));
    assert_eq!(node.value("key").as_deref(), Some("v"));
}

#[test]
fn an_update_by_name_leaves_no_former_value_of_it() {
    let node = Node::new();
    let two = vec![plain(1, "key", 1), plain(2, "key", 1)];
    node.secrets.merge(batch(two), NOW).unwrap();
    let used = node.secrets.update("key", "w", None, None, NOW).unwrap().id;
    node.secrets.delete(&used, NOW).unwrap();
    assert_eq!(node.value("key").as_deref(), Some("w"));
}

#[test]
fn hosts_belong_to_a_secret_on_all_nodes() {
    let states = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [a, b] = states.each_ref().map(|state| open(state.path()));
    let hosts = vec!["a.test".to_owned()];
    let made = a
        .create("key", "v", BTreeMap::new(), hosts.clone(), 1)
        .unwrap();
    let text = serde_json::to_vec(&a.changed(&made.id)).unwrap();
    assert_eq!(b.merge(Batch::parse(&text).unwrap(), 2).unwrap(), 0);
    assert_eq!(
        (b.get("key").unwrap().hosts, a.digest()),
        (hosts, b.digest())
    );
    assert!(b.value("key", "evil.test").is_err() && b.value("key", "a.test").is_ok());
    // Secrets from another node are checked like those from a client.
    let mut wrong = plain(9, "other", 1);
    wrong.secret.hosts = vec!["*".to_owned()];
    assert_eq!(b.merge(batch(vec![wrong]), 2).unwrap(), 1);
}
