//! Manifests that must agree with each other.

use std::{collections::BTreeSet, fs, path::Path};

use crate::workspace::Workspace;

/// The names in the section `[dependencies]`.
fn dependencies(root: &Path, manifest: &str) -> BTreeSet<String> {
    let text = fs::read_to_string(root.join(manifest)).expect(manifest);
    let manifest: toml::Value = toml::from_str(&text).expect(manifest);
    let table = manifest["dependencies"].as_table().expect("[dependencies]");
    table.keys().cloned().collect()
}

/// The fuzz targets `agent` and `interpreter` compile the sources of these programs, so the fuzz manifest must list the
/// dependencies of both.
#[test]
fn the_fuzz_targets_have_the_dependencies_of_the_programs_they_include() {
    let workspace = Workspace::locate().expect("a checkout");
    let root = workspace.root();
    let fuzz = dependencies(root, "dev/fuzz/Cargo.toml");
    for program in ["guest/agent/Cargo.toml", "guest/interpreter/Cargo.toml"] {
        let wanted = dependencies(root, program);
        let missing: Vec<&String> = wanted.difference(&fuzz).collect();
        assert!(
            missing.is_empty(),
            "dev/fuzz/Cargo.toml lacks {missing:?} of {program}"
        );
    }
}
