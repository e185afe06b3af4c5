use super::*;
use proptest::prelude::*;

fn read(tree: &mut Tree) -> Vec<(String, EventType)> {
    let mut changes = Vec::new();
    while tree.read(&mut changes).unwrap() {}
    let changes = changes.into_iter();
    changes
        .map(|c| (c.path.to_str().unwrap().to_owned(), c.kind))
        .collect()
}

fn listed(changes: &[(&str, EventType)]) -> Vec<(String, EventType)> {
    let changes = changes.iter();
    changes.map(|(p, k)| ((*p).to_owned(), *k)).collect()
}

use EventType::{Chmod, Create, Remove, Rename, Write};

#[test]
fn one_directory_is_watched_and_not_what_is_below() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::create_dir(path("sub")).unwrap();
    let mut tree = Tree::open(dir.path(), Reach::Directory).unwrap();
    fs::write(path("sub/f"), "x").unwrap();
    fs::write(path("f"), "x").unwrap();
    fs::rename(path("f"), path("g")).unwrap();
    fs::remove_file(path("g")).unwrap();
    let wanted = listed(&[
        ("f", Create),
        ("f", Write),
        ("f", Rename),
        ("g", Create),
        ("g", Remove),
    ]);
    assert_eq!(read(&mut tree), wanted);
    let moved = tempfile::tempdir().unwrap();
    fs::rename(dir.path(), moved.path().join("here")).unwrap();
    assert_eq!(read(&mut tree), listed(&[("", Rename)]));
    fs::write(moved.path().join("here/f"), "").unwrap();
    assert_eq!(read(&mut tree), []);
}

#[test]
fn trees_that_appear_at_once_are_reported_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let mut tree = Tree::open(dir.path(), Reach::Everything).unwrap();
    fs::create_dir_all(path("a/b/c")).unwrap();
    fs::write(path("a/b/c/f"), "x").unwrap();
    let mut changes = read(&mut tree);
    changes.sort_by(|a, b| a.0.cmp(&b.0));
    let wanted = listed(&[
        ("a", Create),
        ("a/b", Create),
        ("a/b/c", Create),
        ("a/b/c/f", Create),
    ]);
    assert_eq!(changes, wanted);
    // From now on they are watched like all others, and a name that is created again is reported again.
    fs::remove_file(path("a/b/c/f")).unwrap();
    fs::write(path("a/b/c/f"), "x").unwrap();
    let wanted = listed(&[("a/b/c/f", Remove), ("a/b/c/f", Create), ("a/b/c/f", Write)]);
    assert_eq!(read(&mut tree), wanted);
    // Only the watch of the parent reports it.
    fs::set_permissions(
        path("a/b"),
        std::os::unix::fs::PermissionsExt::from_mode(0o700),
    )
    .unwrap();
    assert_eq!(read(&mut tree), listed(&[("a/b", Chmod)]));
    fs::remove_dir_all(path("a")).unwrap();
    let wanted = listed(&[
        ("a/b/c/f", Remove),
        ("a/b/c", Remove),
        ("a/b", Remove),
        ("a", Remove),
    ]);
    assert_eq!(read(&mut tree), wanted);
    assert_eq!(tree.dirs.len(), 1);
}

#[test]
fn moved_directories_take_their_watches_along() {
    let dir = tempfile::tempdir().unwrap();
    let outside = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::create_dir_all(path("a/b")).unwrap();
    let mut tree = Tree::open(dir.path(), Reach::Everything).unwrap();
    fs::rename(path("a"), path("z")).unwrap();
    fs::write(path("z/b/f"), "").unwrap();
    let wanted = listed(&[("a", Rename), ("z", Create), ("z/b/f", Create)]);
    assert_eq!(read(&mut tree), wanted);
    // Outside the tree, it causes no more events, even if another directory takes its name.
    fs::rename(path("z"), outside.path().join("z")).unwrap();
    fs::create_dir(path("z")).unwrap();
    assert_eq!(read(&mut tree), listed(&[("z", Rename), ("z", Create)]));
    fs::write(outside.path().join("z/b/g"), "").unwrap();
    fs::write(path("z/h"), "").unwrap();
    assert_eq!(read(&mut tree), listed(&[("z/h", Create)]));
    assert_eq!(tree.dirs.len(), 2);
    // Into the tree, with its entries.
    fs::rename(outside.path().join("z/b"), path("b")).unwrap();
    let mut changes = read(&mut tree);
    changes.sort_by(|a, b| a.0.cmp(&b.0));
    let wanted = listed(&[("b", Create), ("b/f", Create), ("b/g", Create)]);
    assert_eq!(changes, wanted);
}

#[test]
fn links_are_not_entered_below_the_root() {
    let dir = tempfile::tempdir().unwrap();
    let outside = tempfile::tempdir().unwrap();
    let link = dir.path().join("root");
    std::os::unix::fs::symlink(outside.path(), &link).unwrap();
    let mut tree = Tree::open(&link, Reach::Everything).unwrap();
    std::os::unix::fs::symlink(dir.path(), outside.path().join("link")).unwrap();
    assert_eq!(read(&mut tree), listed(&[("link", Create)]));
    fs::write(dir.path().join("f"), "").unwrap();
    assert_eq!(read(&mut tree), []);
}

#[test]
fn lost_events_are_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let mut tree = Tree::open(dir.path(), Reach::Directory).unwrap();
    let limit = fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap();
    let limit: usize = limit.trim().parse().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    fs::write(&a, "").unwrap();
    for _ in 0..=limit / 4 {
        fs::rename(&a, &b).unwrap();
        fs::rename(&b, &a).unwrap();
    }
    let mut changes = Vec::new();
    let error = loop {
        match tree.read(&mut changes) {
            Ok(more) => assert!(more),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, WatchError::Overflow));
}

/// Applies changes to a client's set of known entries.
fn follow(known: &mut BTreeSet<String>, changes: &[(String, EventType)]) {
    for (path, kind) in changes {
        match kind {
            Create => {
                known.insert(path.clone());
            }
            Remove => {
                known.remove(path);
            }
            Rename => known.retain(|p| p != path && !p.starts_with(&format!("{path}/"))),
            _ => {}
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Make(String),
    File(String),
    Remove(String),
    Read,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let path = || {
        prop::collection::vec(prop::sample::select(vec!["a", "b", "c"]), 1..4)
            .prop_map(|parts| parts.join("/"))
    };
    let step = prop_oneof![
        3 => path().prop_map(Step::Make),
        3 => path().prop_map(Step::File),
        2 => path().prop_map(Step::Remove),
        1 => Just(Step::Read),
    ];
    prop::collection::vec(step, 1..25)
}

fn everything(dir: &Path, below: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let path = below.join(entry.file_name());
        found.insert(path.to_str().unwrap().to_owned());
        if entry.file_type().unwrap().is_dir() {
            everything(&entry.path(), &path, found);
        }
    }
}

#[test]
fn changes_during_a_read_are_reported_in_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let mut tree = Tree::open(dir.path(), Reach::Everything).unwrap();
    let mut known = BTreeSet::new();
    std::thread::scope(|scope| {
        let busy = scope.spawn(|| {
            for round in 0..400 {
                let top = dir.path().join((round % 7).to_string());
                fs::create_dir_all(top.join("a/b")).unwrap();
                for file in ["f", "a/f", "a/b/f"] {
                    fs::write(top.join(file), "x").unwrap();
                }
                if round % 3 == 0 {
                    fs::remove_dir_all(top).unwrap();
                }
            }
        });
        while !busy.is_finished() {
            follow(&mut known, &read(&mut tree));
        }
    });
    follow(&mut known, &read(&mut tree));
    let mut there = BTreeSet::new();
    everything(dir.path(), Path::new(""), &mut there);
    assert_eq!(known, there);
}

proptest! {
    #[test]
    fn following_the_changes_yields_the_entries(steps in steps()) {
        let dir = tempfile::tempdir().unwrap();
        let mut tree = Tree::open(dir.path(), Reach::Everything).unwrap();
        let mut known = BTreeSet::new();
        for step in steps.into_iter().chain([Step::Read]) {
            // Steps that fail change nothing.
            match step {
                Step::Make(path) => drop(fs::create_dir_all(dir.path().join(path))),
                Step::File(path) => drop(fs::write(dir.path().join(path), "x")),
                Step::Remove(path) => {
                    let path = dir.path().join(path);
                    drop(fs::remove_dir_all(&path).or_else(|_| fs::remove_file(&path)));
                }
                Step::Read => {
                    follow(&mut known, &read(&mut tree));
                    let mut there = BTreeSet::new();
                    everything(dir.path(), Path::new(""), &mut there);
                    prop_assert_eq!(&known, &there);
                }
            }
        }
    }
}
