//! The template that most tests clone: the prepared template if it is current, otherwise a template that this process
//! makes once.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use super::{TestVm, host, run_dir};

/// The template's directory. Tests must not write to it.
pub(crate) fn template() -> &'static Path {
    static TEMPLATE: OnceLock<PathBuf> = OnceLock::new();
    TEMPLATE.get_or_init(|| host::prepared_template().unwrap_or_else(make))
}

fn make() -> PathBuf {
    let dir = run_dir::make("template").join("t");
    let mut vm = TestVm::boot(|_| ());
    vm.sh("python3 -c 'print(1)'; sync");
    vm.control().snapshot(&dir).expect("a snapshot");
    dir
}

/// A copy that a test may damage. Holes are preserved.
pub(crate) fn copy_of(template: &Path) -> PathBuf {
    let dir = run_dir::make("copy").join("t");
    let status = std::process::Command::new("cp")
        .args(["-r", "--sparse=always", "--reflink=auto"])
        .args([template, &dir])
        .status()
        .expect("cp");
    assert!(status.success());
    dir
}

/// Changes the manifest.
pub(crate) fn edit_manifest(dir: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let path = dir.join(model::MANIFEST_NAME);
    let mut json = serde_json::from_slice(&fs::read(&path).expect("a manifest")).expect("JSON");
    change(&mut json);
    fs::write(&path, serde_json::to_vec(&json).expect("JSON")).expect("a manifest");
}
