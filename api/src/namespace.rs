//! A network namespace for one test.

use std::{panic, process::Command, thread};

use nix::sched::{CloneFlags, unshare};

/// A secondary address of the host, and an address in a prefix that is local as a whole. Neither range is forbidden.
pub(crate) const SECONDARY: &str = "203.0.113.3";
pub(crate) const IN_LOCAL_PREFIX: &str = "198.51.100.77";

/// Runs a test on a host with these addresses. Threads started by the test are in the namespace too.
pub(crate) fn in_namespace(test: impl FnOnce() + Send + 'static) {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let thread = thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        for line in [
            "link set lo up",
            "tuntap add eth mode tap",
            "link set eth up",
            "addr add 203.0.113.2/24 dev eth",
            "addr add 203.0.113.3/24 dev eth",
            "route add local 198.51.100.0/24 dev lo",
        ] {
            let status = Command::new("ip").args(line.split(' ')).status().unwrap();
            assert!(status.success(), "ip {line}: {status}");
        }
        test();
    });
    if let Err(payload) = thread.join() {
        panic::resume_unwind(payload);
    }
}
