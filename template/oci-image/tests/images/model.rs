//! Random sequences of layers, merged and compared with a model: a flat map of paths.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use crate::{
    archive::{Item, dir, file, hardlink, symlink},
    cases::merge,
};

type Path = Vec<String>;

#[derive(Clone, Debug, PartialEq)]
enum Thing {
    Directory,
    /// Number of the file: equal for hard links.
    File(usize),
    Symlink(String),
}

#[derive(Clone, Debug)]
enum Op {
    Directory(Path),
    File(Path),
    Symlink(Path, String),
    Hardlink(Path, Path),
    Whiteout(Path),
    Opaque(Path),
}

#[derive(Default)]
struct Model {
    things: BTreeMap<Path, Thing>,
    files: usize,
}

impl Model {
    fn remove(&mut self, path: &Path) {
        self.things.retain(|p, _| !p.starts_with(path));
    }

    fn put(&mut self, path: Path, thing: Thing) {
        self.remove(&path);
        self.things.insert(path, thing);
    }

    /// The directory at `path`, or the error of its lookup. Creates missing parts if `make` is set.
    fn directory(&mut self, path: &[String], make: bool) -> Option<Path> {
        let mut ahead: VecDeque<String> = path.iter().cloned().collect();
        let (mut at, mut links) = (Path::new(), 0);
        while let Some(name) = ahead.pop_front() {
            if name == ".." {
                at.pop();
                continue;
            }
            let next = [at.clone(), vec![name]].concat();
            match self.things.get(&next).cloned() {
                Some(Thing::Directory) => at = next,
                Some(Thing::Symlink(target)) => {
                    links += 1;
                    if links > 40 {
                        return None;
                    }
                    if target.starts_with('/') {
                        at.clear();
                    }
                    let parts = target.split('/').filter(|part| !part.is_empty());
                    parts
                        .rev()
                        .for_each(|part| ahead.push_front(part.to_owned()));
                }
                _ if !make => return None,
                _ => {
                    self.put(next.clone(), Thing::Directory);
                    at = next;
                }
            }
        }
        Some(at)
    }

    /// Whether all parts of the path are directories.
    fn is_plain(&self, path: &[String]) -> bool {
        (1..=path.len()).all(|len| self.things.get(&path[..len]) == Some(&Thing::Directory))
    }

    fn apply(&mut self, layer: &[Op]) -> Option<()> {
        for op in layer {
            match op {
                Op::Whiteout(path) if self.is_plain(&path[..path.len() - 1]) => self.remove(path),
                Op::Opaque(path) if self.is_plain(path) => {
                    self.things.retain(|p, _| p == path || !p.starts_with(path));
                }
                _ => {}
            }
        }
        for op in layer {
            self.add(op)?;
        }
        Some(())
    }

    fn add(&mut self, op: &Op) -> Option<()> {
        let (path, thing) = match op {
            Op::Whiteout(_) | Op::Opaque(_) => return Some(()),
            Op::Directory(path) => (path, Thing::Directory),
            Op::File(path) => {
                self.files += 1;
                (path, Thing::File(self.files))
            }
            Op::Symlink(path, target) => (path, Thing::Symlink(target.clone())),
            Op::Hardlink(path, target) => {
                let (name, parents) = target.split_last()?;
                let mut found = self.directory(parents, false)?;
                found.push(name.clone());
                let thing = self.things.get(&found).cloned()?;
                if thing == Thing::Directory {
                    return None;
                }
                (path, thing)
            }
        };
        let (name, parents) = path.split_last()?;
        let mut place = self.directory(parents, true)?;
        place.push(name.clone());
        let is_merged =
            thing == Thing::Directory && self.things.get(&place) == Some(&Thing::Directory);
        if !is_merged {
            self.put(place, thing);
        }
        Some(())
    }
}

fn path() -> impl Strategy<Value = Path> {
    prop::collection::vec("[abc]", 1..4)
}

fn op() -> impl Strategy<Value = Op> {
    let target = prop::sample::select(vec!["a", "../b", "/c", "b/c", "..", "/", "a/../../b"]);
    prop_oneof![
        3 => path().prop_map(Op::Directory),
        3 => path().prop_map(Op::File),
        1 => (path(), target).prop_map(|(path, target)| Op::Symlink(path, target.to_owned())),
        1 => (path(), path()).prop_map(|(path, target)| Op::Hardlink(path, target)),
        2 => path().prop_map(Op::Whiteout),
        1 => path().prop_map(Op::Opaque),
    ]
}

fn to_item(op: &Op, number: usize) -> Item {
    let text = |path: &Path| path.join("/");
    match op {
        Op::Directory(path) => dir(text(path)),
        // Different sizes distinguish the files.
        Op::File(path) => file(text(path), "x".repeat(number)),
        Op::Symlink(path, target) => symlink(text(path), target),
        Op::Hardlink(path, target) => hardlink(text(path), text(target)),
        Op::Whiteout(path) => {
            let (name, parents) = path.split_last().unwrap();
            file([parents, &[format!(".wh.{name}")]].concat().join("/"), "")
        }
        Op::Opaque(path) => file(text(path) + "/.wh..wh..opq", ""),
    }
}

fn to_items(layers: &[Vec<Op>]) -> Vec<Vec<Item>> {
    let mut number = 0;
    let mut item = |op: &Op| {
        number += usize::from(matches!(op, Op::File(_)));
        to_item(op, number)
    };
    let layers = layers.iter();
    layers
        .map(|layer| layer.iter().map(&mut item).collect())
        .collect()
}

/// The properties that the model and a listing share, by path.
fn of_model(model: &Model) -> BTreeMap<String, String> {
    let text = |thing: &Thing| match thing {
        Thing::Directory => "directory".to_owned(),
        Thing::File(number) => format!("file {number}"),
        Thing::Symlink(target) => format!("link {target}"),
    };
    let things = model.things.iter();
    things
        .map(|(path, thing)| (path.join("/"), text(thing)))
        .collect()
}

fn of_merged(layers: &[Vec<Item>]) -> Option<BTreeMap<String, String>> {
    let listing = merge(layers).ok()?;
    let names = listing.iter().filter(|(path, _)| !path.is_empty());
    let text = names.map(|(path, record)| {
        let size = record.content.split(' ').next().unwrap_or_default();
        let text = match record.mode & 0o170_000 {
            0o040_000 => "directory".to_owned(),
            0o100_000 => format!("file {size}"),
            _ => format!("link {}", record.content),
        };
        (String::from_utf8(path[1..].to_vec()).unwrap(), text)
    });
    Some(text.collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn random_layers_merge_as_in_the_model(
        layers in prop::collection::vec(prop::collection::vec(op(), 0..10), 1..5)
    ) {
        let mut model = Model::default();
        let expected = layers.iter().try_for_each(|layer| model.apply(layer));
        let expected = expected.map(|()| of_model(&model));
        prop_assert_eq!(of_merged(&to_items(&layers)), expected);
    }

    #[test]
    fn the_place_of_whiteouts_in_their_layer_does_not_matter(
        lower in prop::collection::vec(op(), 0..10),
        upper in prop::collection::vec(op(), 0..10),
    ) {
        let layers = to_items(&[lower, upper]);
        let is_whiteout = |item: &Item| item.path.windows(4).any(|part| part == b".wh.");
        let (whiteouts, others): (Vec<_>, Vec<_>) = layers[1].iter().cloned().partition(is_whiteout);
        let first = [whiteouts.clone(), others.clone()].concat();
        let last = [others, whiteouts].concat();
        let merged = of_merged(&layers);
        prop_assert_eq!(&merged, &of_merged(&[layers[0].clone(), first]));
        prop_assert_eq!(&merged, &of_merged(&[layers[0].clone(), last]));
    }
}
