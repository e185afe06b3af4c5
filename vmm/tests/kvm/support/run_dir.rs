//! One directory for everything that this process makes: sockets, consoles, templates, guest programs.
//! Its name carries the process id, so that the next run can remove what a killed one left.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

const PREFIX: &str = "cube-kvm-";

fn root() -> PathBuf {
    // Short: unix socket paths hold 107 bytes.
    std::env::temp_dir().join(format!("{PREFIX}{}", std::process::id()))
}

/// A new directory in it.
pub(crate) fn make(what: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let dir = root().join(format!("{what}-{n}"));
    fs::create_dir_all(&dir).expect("a directory for the test");
    dir
}

/// Removes everything that this process made.
pub(crate) fn remove() {
    // Absent when no test ran.
    let _ = fs::remove_dir_all(root());
}

/// Removes what processes left that are no more.
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
            // Another run may be sweeping too.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
