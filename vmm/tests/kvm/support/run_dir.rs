//! One directory for all files of this process: sockets, consoles, templates, guest programs. Its name contains the
//! pid, so that a later run can remove the directory of a process that was killed.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

const PREFIX: &str = "cube-kvm-";

fn root() -> PathBuf {
    // Short, because the path of a unix socket has at most 107 bytes.
    std::env::temp_dir().join(format!("{PREFIX}{}", std::process::id()))
}

/// Creates a new directory in the process's directory.
pub(crate) fn make(what: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let dir = root().join(format!("{what}-{n}"));
    fs::create_dir_all(&dir).expect("a directory for the test");
    dir
}

/// Removes all files of this process.
pub(crate) fn remove() {
    // Absent if no test ran.
    let _ = fs::remove_dir_all(root());
}

/// Removes the directories of processes that no longer exist.
pub(crate) fn sweep() {
    for entry in fs::read_dir(std::env::temp_dir())
        .into_iter()
        .flatten()
        .flatten()
    {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|n| n.strip_prefix(PREFIX));
        let pid = pid.and_then(|p| p.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            // Another run may remove it at the same time.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
