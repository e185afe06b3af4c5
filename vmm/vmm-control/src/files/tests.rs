//! Templates on disk, and the lineage of the VMs made from them.

use std::{fs, path::Path};

use model::{Bytes, MANIFEST_NAME, template_file};

use super::*;
use crate::SnapshotContent;

const SIZE: &str = r#""memory":"1GiB","vcpus":2"#;

fn manifest(dir: &Path, json: &str) {
    fs::write(dir.join(MANIFEST_NAME), json).unwrap();
}

#[test]
fn a_template_is_opened_with_its_base_and_its_root() {
    let dir = tempfile::tempdir().unwrap();
    let (base, diff) = (dir.path().join("base"), dir.path().join("diff"));
    let root = dir.path().join("root");
    fs::write(&root, "r").unwrap();
    for (at, json) in [
        (&base, format!(r#"{{"root":{root:?},{SIZE}}}"#)),
        (
            &diff,
            format!(r#"{{"root":{root:?},{SIZE},"base":{{"dir":{base:?}}}}}"#),
        ),
    ] {
        fs::create_dir(at).unwrap();
        manifest(at, &json);
        fs::write(at.join(template_file::MEMORY), "m").unwrap();
    }
    let (files, lineage) = of_template(&diff, Places::default()).unwrap();
    let expected = [
        FileRole::Root,
        FileRole::Template(TemplateFile::Manifest),
        FileRole::Template(TemplateFile::Memory),
        FileRole::Base(TemplateFile::Manifest),
        FileRole::Base(TemplateFile::Memory),
    ];
    assert_eq!(files.roles(), expected);
    let home = lineage.home.clone().unwrap();
    assert_eq!(home.dir, base);
    assert_eq!(
        lineage.possible(SnapshotContent::Diff),
        SnapshotContent::Diff
    );
    lineage.check(&diff.join(MANIFEST_NAME)).unwrap();
    // The manifest still exists under another name, but not where the diff would look for it.
    fs::hard_link(base.join(MANIFEST_NAME), dir.path().join("link")).unwrap();
    fs::remove_file(base.join(MANIFEST_NAME)).unwrap();
    fs::write(base.join(MANIFEST_NAME), "another").unwrap();
    assert_eq!(
        lineage.possible(SnapshotContent::Diff),
        SnapshotContent::Full
    );
}

#[test]
fn a_snapshot_of_another_lineage_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let lineage = Lineage {
        root: "/images/root".into(),
        size: Size {
            memory: Bytes(1 << 30),
            vcpus: 2,
        },
        home: Some(Home {
            dir: "/templates/base".into(),
            manifest: (0, 0),
        }),
    };
    let path = dir.path().join(MANIFEST_NAME);
    for (json, is_same) in [
        (format!(r#"{{"root":"/images/root",{SIZE}}}"#), true),
        (
            format!(r#"{{"root":"/images/root",{SIZE},"base":{{"dir":"/templates/base"}}}}"#),
            true,
        ),
        (format!(r#"{{"root":"/etc/shadow",{SIZE}}}"#), false),
        (
            format!(r#"{{"root":"/images/root",{SIZE},"base":{{"dir":"/sandboxes/a/pause"}}}}"#),
            false,
        ),
        (
            r#"{"root":"/images/root","memory":"1TiB","vcpus":2}"#.to_owned(),
            false,
        ),
        (
            r#"{"root":"/images/root","memory":"1GiB","vcpus":1}"#.to_owned(),
            false,
        ),
        (r#"{"root":"/images/root"}"#.to_owned(), false),
        ("not json".to_owned(), false),
    ] {
        manifest(dir.path(), &json);
        assert_eq!(lineage.check(&path).is_ok(), is_same, "{json}");
    }
}
