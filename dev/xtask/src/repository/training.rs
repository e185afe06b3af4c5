//! Tests that `scenarios/work/training.toml` lists exactly the work of the templates' warm-ups, so that trained
//! figures are labelled correctly.

use std::{collections::BTreeSet, fs};

use serde::Deserialize;

use crate::{stages::interpreter, workspace::Workspace};

const PYTHON: &str = "guest/interpreter/hosts/python/cube_host/warm.py";
const NODE: &str = "guest/interpreter/hosts/node/host.js";
const COMMANDS: &str = "template/src/base.rs";

#[derive(Deserialize)]
struct Training {
    items: Vec<Item>,
}

#[derive(Deserialize)]
struct Item {
    source: String,
    #[serde(default)]
    text: String,
    #[serde(default)]
    argv: Vec<String>,
}

/// The words of the items with this source.
fn listed(training: &Training, source: &str) -> BTreeSet<String> {
    let items = training.items.iter().filter(|item| item.source == source);
    items
        .map(|item| match item.argv.as_slice() {
            [] => words(&item.text),
            argv => argv.join(" "),
        })
        .collect()
}

fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The string literals of Python's or JavaScript's source that one of `quotes` encloses. Longer quotes come first.
fn literals(source: &str, quotes: &[&str], comment: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut rest = source;
    while let Some(next) = rest.chars().next() {
        if rest.starts_with(comment) {
            rest = rest.split_once('\n').map_or("", |(_, after)| after);
            continue;
        }
        let quote = quotes.iter().find(|quote| rest.starts_with(**quote));
        let Some(quote) = quote else {
            rest = &rest[next.len_utf8()..];
            continue;
        };
        let (inside, after) = rest[quote.len()..]
            .split_once(quote)
            .expect("the literal ends");
        found.insert(words(inside));
        rest = after;
    }
    found
}

fn between<'a>(text: &'a str, from: &str, to: &str) -> &'a str {
    let (_, after) = text.split_once(from).expect(from);
    after.split_once(to).expect(to).0
}

#[test]
fn the_training_set_lists_what_warm_ups_run() {
    let workspace = Workspace::locate().expect("a checkout");
    let read = |path: &str| fs::read_to_string(workspace.root().join(path)).expect(path);
    let training = read("scenarios/work/training.toml");
    let training: Training = toml::from_str(&training).expect("TOML");

    let python = read(PYTHON);
    let cells = between(&python, "CELLS = (", "\n)");
    assert_eq!(
        literals(cells, &["\"\"\"", "\""], "#"),
        listed(&training, PYTHON)
    );

    let node = read(NODE);
    let block = between(&node, "includes('--warm')", "pending = []");
    let mut cells = literals(block, &["'"], "//");
    cells.remove("typescript");
    assert_eq!(cells, listed(&training, NODE));

    let commands = template::WARM_UP.iter().map(|argv| argv.join(" "));
    assert_eq!(
        commands.collect::<BTreeSet<_>>(),
        listed(&training, COMMANDS)
    );

    let first: serde_json::Value =
        serde_json::from_str(&interpreter::first_request().body).expect("JSON");
    let code = first["code"].as_str().expect("a cell");
    assert!(
        listed(&training, PYTHON).contains(code),
        "the cell of the working set is not in the training set: {code}"
    );
}
