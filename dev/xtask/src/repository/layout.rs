//! Tests that the top level has few entries, and that every folder is described.

use std::{fs, path::Path};

use super::sources::{entries, file_name, visible_dirs};
use crate::workspace::Workspace;

const MOST_DIRS: usize = 17;
const MOST_FILES: usize = 12;
/// Folders that contain crates. Each crate is described in its own README or in the README of its folder.
const GROUPS: [&str; 10] = [
    "base",
    "wire",
    "harness/verify",
    "guest",
    "dev",
    "vmm",
    "api",
    "netisolation",
    "harness",
    "template",
];

#[test]
fn the_top_level_has_few_entries() {
    let workspace = Workspace::locate().expect("a checkout");
    let root = workspace.root();
    let dirs = visible_dirs(root).len();
    let files = entries(root).iter().filter(|path| path.is_file()).count();
    assert!(
        dirs <= MOST_DIRS,
        "{dirs} directories at the top, at most {MOST_DIRS}"
    );
    assert!(
        files <= MOST_FILES,
        "{files} files at the top, at most {MOST_FILES}"
    );
}

#[test]
fn every_folder_is_described() {
    let workspace = Workspace::locate().expect("a checkout");
    let root = workspace.root();
    let mut dirs = visible_dirs(root);
    for group in GROUPS {
        let inside = visible_dirs(&root.join(group)).into_iter();
        dirs.extend(inside.filter(|dir| dir.join("Cargo.toml").is_file()));
    }
    let undescribed: Vec<String> = dirs
        .iter()
        .filter(|dir| !is_described(dir))
        .map(|dir| dir.strip_prefix(root).unwrap_or(dir).display().to_string())
        .collect();
    assert!(
        undescribed.is_empty(),
        "describe these folders in two lines of their own README.md or their parent's: {}",
        undescribed.join(", ")
    );
}

/// Whether the folder's own README.md has at least two lines of text, or a line of its parent's README.md begins with
/// the folder's name and continues with at least 50 characters.
fn is_described(dir: &Path) -> bool {
    let lines = |dir: &Path| fs::read_to_string(dir.join("README.md")).unwrap_or_default();
    let own = lines(dir);
    let text = own
        .lines()
        .filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
    if text.count() >= 2 {
        return true;
    }
    let parents = dir.parent().map(lines).unwrap_or_default();
    let name = format!("{}/", file_name(dir));
    parents.lines().any(|line| {
        let line = line.trim_start_matches(['|', ' ', '-', '*', '`']);
        line.strip_prefix(&name)
            .is_some_and(|description| description.trim().len() >= 50)
    })
}
