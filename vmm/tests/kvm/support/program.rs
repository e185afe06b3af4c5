//! Guest programs: C files of `tests/guest`, compiled here into static binaries.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    process::Command,
    sync::{Mutex, OnceLock, PoisonError},
};

use super::run_dir;

/// The static binary of `tests/guest/<name>.c`, compiled once per process.
pub(crate) fn compiled(name: &str) -> Vec<u8> {
    static DONE: OnceLock<Mutex<BTreeMap<String, Vec<u8>>>> = OnceLock::new();
    let done = DONE.get_or_init(Mutex::default);
    // A compilation that panicked has stored nothing.
    let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
    done.entry(name.to_owned())
        .or_insert_with(|| compile(name))
        .clone()
}

fn compile(name: &str) -> Vec<u8> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/guest")
        .join(format!("{name}.c"));
    let out = run_dir::make("program").join(name);
    let result = Command::new("cc")
        .args([
            "-O1", "-g0", "-s", "-static", "-pthread", "-Wall", "-Werror",
        ])
        .arg(&source)
        .arg("-o")
        .arg(&out)
        .output()
        .expect("cc (package gcc) starts");
    assert!(
        result.status.success(),
        "{name}.c: {}",
        String::from_utf8_lossy(&result.stderr)
    );
    fs::read(out).expect("a binary")
}
