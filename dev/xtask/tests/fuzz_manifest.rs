//! The fuzz targets `agent` and `interpreter` compile the sources of two programs, so the fuzz manifest must list the
//! dependencies of both.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{collections::BTreeSet, fs, path::Path};

/// Names in the section `[dependencies]`.
fn dependencies(manifest: &str) -> BTreeSet<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(manifest);
    let text = fs::read_to_string(path).unwrap();
    let section = text.split("\n[dependencies]\n").nth(1).unwrap();
    let lines = section.lines().take_while(|line| !line.starts_with('['));
    let names = lines.filter_map(|line| line.split(['.', '=', ' ']).next());
    names
        .filter(|name| !name.is_empty() && !name.starts_with('#'))
        .map(str::to_owned)
        .collect()
}

#[test]
fn fuzz_targets_have_the_dependencies_of_their_programs() {
    let fuzz = dependencies("dev/fuzz/Cargo.toml");
    for program in ["guest/agent/Cargo.toml", "guest/interpreter/Cargo.toml"] {
        let missing: Vec<_> = dependencies(program).difference(&fuzz).cloned().collect();
        assert!(missing.is_empty(), "{program}: {missing:?}");
    }
}
